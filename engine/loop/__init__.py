"""Engine for scripts that loop over forward, ``backward()`` and ``step()``. In the order of reading:

=================  ====================================================================================
call_order         which of the three calls is due
engine             VPipeLoopEngine: the calls as scripts make them, and what they ask of the engine
rounds             what a stage does in each of the three calls, and in a drain
script_loss        the loss that a script gets, on every rank
other_outputs      what a forward returns beside its loss
script_rates       learning rates that a script sets, for the update of the batch in which it does
evaluation         calls in ``eval()`` mode or without gradients
script_end         the end of the script with micro-batches in flight
=================  ====================================================================================
"""
