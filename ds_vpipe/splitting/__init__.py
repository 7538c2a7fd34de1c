"""Plain modules as lists of pieces, of which a stage keeps and runs a few: the process-free part of splitting.

Every stage calls the user's own forward. Parameters of other stages are meta tensors, which have no values; blocks of
other stages are skipped; values that cross a cut between stages travel. Words that the modules use:

=================  ====================================================================================
block              a module that the model may be split between, such as a layer of its list of layers
piece              what a forward computes from one cut to the next; consecutive pieces are a stage
slot               a place in a model where a parameter is registered, by its name
form               what calls have in common: keywords, nesting, strings and flags, not tensors and numbers
dry run            a pass without values, in which a call of a new form is tried out on every rank
crossings          values that one piece makes and a later one uses, found in a dry run
way                the crossings of one dry run; calls of one form may go several, where the forward branches
=================  ====================================================================================

In the order of reading:

=================  ====================================================================================
blocks             which modules a model is split between
parameter_slots    the places of parameters in a model, which hold a parameter or a meta tensor
layout             a model's blocks, where pieces begin, and which slots are in the blocks
forward_pass       the interpreter of a forward, and what crosses the cuts as plain data
dry_run            a pass without values, which finds the crossings
forward_split      trials and passes of a model's forward, and which piece has what
call               calls as flat tuples that travel, and the loss that comes back
stage_model        the model as one stage has it, its pieces as layers of a pipeline, one call
split              from a model to its pieces: tries blocks and examples of a call in turn
=================  ====================================================================================

What these rest on, to be looked up where it is used:

=================  ====================================================================================
meta_tensor        tensors without values, and the log of their use
output_specs       what skipped blocks return
guards             random generators, buffers, autocast and saved tensors around a pass
python_state       attributes and hooks of modules, which a pass shall not leave changed
module_numbers     counters and other numbers of modules, which count once where a forward is run in portions
kept_state         what a model keeps from call to call, and who reads it
checkpointed       functions that a forward checkpoints itself
piece_tensors      parameters and buffers of one piece, by their names in the model
model_hooks        whole state dicts, and refusal of direct calls
=================  ====================================================================================
"""
