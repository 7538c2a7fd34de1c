"""Plain modules as lists of pieces, of which a stage keeps and runs a few: the process-free part of splitting.

Every stage calls the user's own forward. Parameters of other stages are meta tensors, which have no values; blocks of
other stages are skipped; values that cross a cut between stages travel. In the order of reading:

=================  ====================================================================================
crossings          what crosses the cuts, as plain data: places, sources, one table per form of a call
forward_pass       the interpreter: a dry run that finds the crossings, and runs that use them
forward_split      a model's forward, its cuts, and which piece has what
meta_tensor        tensors without values, and the log of their use
output_specs       what skipped blocks return
parameter_slots    the places of parameters in a model, which show a parameter or a meta tensor
block_proxy        stand-ins that hand calls of blocks to the interpreter
guards             random generators, grad mode and saved tensors around a pass
blocks             which modules a model is split between
example            examples of a call
split              from a model to its pieces: tries blocks and examples in turn
call               calls as flat tuples that travel, and the loss that comes back
stage_model        the model as one stage has it, its pieces' parameters, one call
piece              one piece as a module, the layer that a pipeline sees
init_meta          values for what was built on the meta device
model_hooks        whole state dicts, and refusal of direct calls
=================  ====================================================================================
"""
