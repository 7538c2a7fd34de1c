"""How a model is split: between the layers in its lists, or else between any of its modules."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from ds_vpipe.splitting.blocks import BlockList, all_modules, block_choices
from ds_vpipe.splitting.call import Call, CallForms
from ds_vpipe.splitting.example import guesses, own_example, takes
from ds_vpipe.splitting.forward_split import ForwardSplit
from ds_vpipe.splitting.meta_tensor import AccessLog, SplitError
from ds_vpipe.splitting.model_hooks import refuse_parts
from ds_vpipe.splitting.parameter_slots import materialise_buffers, slots_of
from ds_vpipe.splitting.stage_model import StageModel


def split_in_process(model: nn.Module, num_stages: int, example: Call | None = None) -> StageModel:
    """Find pieces of a model; the result still holds all of them.

    Args:
        model: a plain module.
        num_stages: the least number of pieces.
        example: positional and keyword arguments of a call; by default, and if the forward does not take those, the
            model's ``dummy_inputs``.

    Returns:
        The model in pieces.

    Raises:
        SplitError: it cannot be split; one line says why and where.
    """
    refuse_parts(model)
    log = AccessLog()
    slots = slots_of(model, log)
    materialise_buffers(model, slots)
    reasons: list[str] = []
    unfit = None if example is None or takes(model, example) else _unfit(model, example)
    example = None if unfit else example
    for blocks in block_choices(model):
        found = _found(ForwardSplit(model, blocks, slots, log), blocks, example, num_stages)
        if isinstance(found, ForwardSplit):
            return StageModel(model, found, slots)
        reasons.append(found)
    if reasons and example is None:
        raise SplitError(reasons[0])
    if unfit and own_example(model) is None:
        raise SplitError(unfit)
    example = example or own_example(model)
    if example is None:
        raise SplitError(
            f"{type(model).__name__}: has no list of two or more layers to split between, allowed without one is a "
            f"model with an example of its inputs; give initialize() training_data, or the model dummy_inputs"
        )
    blocks = all_modules(model)
    found = _found(ForwardSplit(model, blocks, slots, log), blocks, example, num_stages)
    if isinstance(found, ForwardSplit):
        return StageModel(model, found, slots)
    raise SplitError((reasons or [found])[0])


def _found(split: ForwardSplit, blocks: BlockList, example: Call | None, num_stages: int) -> ForwardSplit | str:
    """The split, if a call goes through it and it has enough pieces, or why not."""
    if not blocks.modules:
        return f"{blocks.name}: has no parameters, allowed are models to be trained; use it without a vpipe block"
    refused = _try_out(split, blocks, example, num_stages)
    if refused is not None:
        return refused
    if len(split.piece_names) >= num_stages:
        return split
    if blocks.merged:
        return (
            f"{type(split.model).__name__}: got {num_stages} stages, allowed are 1 to {len(split.piece_names)}, as "
            f"many as it calls modules with parameters; use fewer stages"
        )
    return (
        f"{type(split.model).__name__}: got {num_stages} stages, allowed are 1 to {len(split.piece_names)}, the "
        f"{len(split.piece_names) - 2} blocks of {blocks.name} and what is before and behind them; use fewer stages"
    )


def _try_out(split: ForwardSplit, blocks: BlockList, given: Call | None, num_stages: int) -> str | None:
    """Find out which piece uses what; returns why these blocks will not do, or None.

    Without an example, and if neither the model's own nor a guess is to the forward's liking, pieces stay as modules
    are registered: every first real call is tried out too, and refused if that was wrong.
    """
    if given is not None:
        calls = [(given, True)]
    else:
        own = own_example(split.model)
        known = [*([] if own is None else [own]), *guesses(split.model)]
        # One that the whole forward likes tells more than one that only its loss does not.
        calls = [(call, to_the_end) for to_the_end in (True, False) for call in known]
    refused = None
    for call, to_the_end in calls:
        packed, form = CallForms().pack(*call)
        try:
            with torch.enable_grad():
                dry = split.try_out(form, form.rebuild(packed[1:]), to_the_end=to_the_end)
                if blocks.merged and split.thin(num_stages):
                    dry = split.try_out(form, form.rebuild(packed[1:]), to_the_end=to_the_end)
        except SplitError as error:
            refused = refused or str(error)
        except Exception as error:  # the user's code, with inputs that it may not like
            if given is not None:
                return f"{blocks.name}: forward failed without parameters: {type(error).__name__}: {_first_line(error)}"
        else:
            split.assign(dry)
            return None
    if refused is None:
        split.split_at_all(blocks.modules)
        split.assign(None)
    return refused


def _unfit(model: nn.Module, example: Call) -> str:
    args, kwargs = example
    given = [f"{len(args)} by position"] * bool(args) + sorted(kwargs)
    return (
        f"{type(model).__name__}: got a batch of training_data with the values {', '.join(given)} for "
        f"forward{inspect.signature(model.forward)}, allowed is a forward that takes them, the labels too, and returns "
        f"the loss; wrap the model in a module that computes the loss"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
