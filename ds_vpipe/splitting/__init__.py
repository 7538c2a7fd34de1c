"""Plain modules as lists of pieces, of which a stage keeps and runs a few: the process-free part of splitting.

Every stage calls the user's own forward. Parameters of other stages are meta tensors, which have no values; blocks of
other stages are skipped; values that cross a cut between stages travel. In the order of reading:

=================  ====================================================================================
layout             a model's blocks, where pieces begin, and the places of its parameters
forward_split      trials and passes of a model's forward, and which piece has what
forward_pass       the interpreter of a forward, and what crosses the cuts as plain data
dry_run            a pass without values, which finds the crossings
meta_tensor        tensors without values, and the log of their use
output_specs       what skipped blocks return
parameter_slots    the places of parameters in a model, which hold a parameter or a meta tensor
module_numbers     counters and other numbers of modules, which count once where a forward is run in portions
guards             random generators, buffers, autocast and saved tensors around a pass
python_state       attributes and hooks of modules, which a pass shall not leave changed
kept_state         what a model keeps from call to call, and who reads it
checkpointed       functions that a forward checkpoints itself
blocks             which modules a model is split between
split              from a model to its pieces: tries blocks and examples of a call in turn
piece_tensors      parameters and buffers of one piece, by their names in the model
call               calls as flat tuples that travel, and the loss that comes back
stage_model        the model as one stage has it, its pieces as layers of a pipeline, one call
model_hooks        whole state dicts, and refusal of direct calls
=================  ====================================================================================
"""
