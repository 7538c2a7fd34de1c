"""How a model is split: between the layers in its lists, or else between any of its modules.

What a piece uses is found with an example of a call: the one that is given, the model's own, or a guess.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from ds_vpipe.splitting import guards
from ds_vpipe.splitting.blocks import BlockList, all_modules, block_choices
from ds_vpipe.splitting.call import Call, CallForms
from ds_vpipe.splitting.forward_split import ForwardSplit
from ds_vpipe.splitting.layout import dummy_inputs_of
from ds_vpipe.splitting.meta_tensor import AccessLog, SplitError
from ds_vpipe.splitting.model_hooks import DirectCalls
from ds_vpipe.splitting.parameter_slots import materialise_buffers, slots_of
from ds_vpipe.splitting.stage_model import StageModel

_SAMPLES, _LENGTH, _MOST, _IMAGE, _SOUND = 2, 8, 8, 224, 16000


def split_in_process(model: nn.Module, num_stages: int, example: Call | None = None) -> StageModel:
    """Find pieces of a plain module, at least ``num_stages``. The result still holds all of them.

    The example is a call's positional and keyword arguments; by default, and if the forward does not take those, the
    model's ``dummy_inputs``.

    Raises:
        SplitError: it cannot be split; one line says why and where.
    """
    if any(isinstance(hook, DirectCalls) for hook in model._forward_pre_hooks.values()):
        raise SplitError(
            f"model: got a {type(model).__name__} of which an earlier initialize() has left one stage here, allowed is "
            f"a whole one; build the model again"
        )
    if num_stages > 1 and any(hasattr(type(module), "update_and_allocate") for module in model.modules()):
        raise SplitError(
            f"model: got a {type(model).__name__} with AdaLoRA, whose loss and update_and_allocate() need the adapters "
            f"of all layers, allowed with several stages is LoRA; write LoraConfig, with rank_pattern for single layers"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise SplitError(
                f"{name or 'model'}: is a module of torch.jit, which does not run on tensors without values, allowed "
                f"are plain modules, and functions of torch.jit.script; pass the module that it was made from"
            )
    log = AccessLog()
    slots = slots_of(model, log)
    materialise_buffers(model, slots)
    reasons: list[tuple[BlockList, str]] = []

    def found(blocks: BlockList, given: Call | None) -> StageModel | None:
        split = ForwardSplit(model, blocks, slots, log)
        refused = _try_out(split, blocks, given, num_stages)
        if refused is not None:
            reasons.append((blocks, refused))
            return None
        stage = StageModel(model, split, slots)
        stage.remark = _remark(model, blocks, reasons) if num_stages > 1 else None
        return stage

    unfit = None if example is None or takes(model, example) else _unfit(model, example)
    example = None if unfit else example
    for blocks in block_choices(model):
        if stage := found(blocks, example):
            return stage
    if reasons and example is None:
        raise SplitError(reasons[0][1])
    if unfit and own_example(model) is None:
        raise SplitError(unfit)
    example = example or own_example(model)
    if example is None:
        raise SplitError(
            f"{type(model).__name__}: has no list of two or more layers to split between, allowed without one is a "
            f"model with an example of its inputs; give initialize() training_data, or {dummy_inputs_of(model)}"
        )
    if stage := found(all_modules(model), example):
        return stage
    raise SplitError(reasons[0][1])


def _try_out(split: ForwardSplit, blocks: BlockList, given: Call | None, num_stages: int) -> str | None:
    """Find out which piece uses what. Returns why these blocks will not do, or None.

    If the forward fails with the example, as a script may pass on only a part of its data, with the model's own and
    with every guess, pieces stay as modules are registered: every first real call is tried out too, and refused if that
    was wrong.
    """
    if not blocks.modules:
        return f"{blocks.name}: has no parameters, allowed are models to be trained; use it without a vpipe block"
    refused = failed = None
    for call, to_the_end in _calls(split.model, given):
        packed, form = CallForms().pack(*call)
        try:
            with torch.enable_grad():
                dry = split.try_out(form, form.rebuild(packed[1:]), to_the_end=to_the_end)
                if blocks.merged and split.drop_wide_cuts(num_stages):
                    dry = split.try_out(form, form.rebuild(packed[1:]), to_the_end=to_the_end)
        except SplitError as error:
            refused = refused or str(error)
            if call is given:
                break
        except Exception as error:  # the user's code, with inputs that it may not like
            reason = (str(error).strip().splitlines() or [""])[0][:200]
            failed = failed or f"{blocks.name}: forward failed without parameters: {type(error).__name__}: {reason}"
            if call is given:
                warnings.warn(
                    f"ds_vpipe: {failed}; that was with the first batch of training_data, or with dummy_inputs: the "
                    f"split goes by another call, as is right if the script passes on a part of the batch; else give "
                    f"{dummy_inputs_of(split.model)} that its forward takes",
                    stacklevel=2,
                )
        else:
            split.assign(dry)
            return _too_few(split, blocks, num_stages)
    if refused is not None or blocks.merged:
        return refused or failed
    split.layout.call_as_registered()
    split.assign(None)
    return _too_few(split, blocks, num_stages)


def _calls(model: nn.Module, given: Call | None) -> Iterator[tuple[Call, bool]]:
    """Calls to try out, the given one first, and whether their whole forward has to run, or all of it but the loss."""
    if given is not None:
        yield given, True
    own = own_example(model)
    known = [*([] if own is None else [own]), *guesses(model)]
    for to_the_end in (True, False):
        yield from ((call, to_the_end) for call in known)


def _too_few(split: ForwardSplit, blocks: BlockList, num_stages: int) -> str | None:
    pieces = len(split.layout.piece_names)
    if pieces >= num_stages:
        return None
    which = (
        "as many as it calls modules with parameters"
        if blocks.merged
        else f"the {pieces - 2} blocks of {blocks.name} and what is before and behind them"
    )
    return (
        f"{type(split.model).__name__}: got {num_stages} stages, allowed are 1 to {pieces}, {which}; use fewer stages"
    )


def _remark(model: nn.Module, blocks: BlockList, refused: Sequence[tuple[BlockList, str]]) -> str | None:
    """Why these blocks are split in the place of larger ones, if they have less than half of the parameters."""
    share = blocks.size / sum(parameter.numel() for parameter in model.parameters())
    larger = next(((other.name, reason) for other, reason in refused if other.size > blocks.size), None)
    if larger is None or share >= 0.5:
        return None
    return (
        f"{type(model).__name__}: is split between the blocks of {blocks.name}, which have {share:.0%} of its "
        f"parameters, as it cannot be split between those of {larger[0]}: {larger[1]}"
    )


def _unfit(model: nn.Module, example: Call) -> str:
    args, kwargs = example
    given = [f"{len(args)} by position"] * bool(args) + sorted(kwargs)
    return (
        f"{type(model).__name__}: got a batch of training_data with the values {', '.join(given)} for "
        f"forward{inspect.signature(model.forward)}, allowed is a forward that takes them, the labels too, and returns "
        f"the loss; wrap the model in a module that computes the loss"
    )


# Examples of a call


def as_call(batch: Any) -> Call:
    """A batch as scripts hand it to a model: a dict by keywords, a tuple or list by position, anything else alone."""
    if isinstance(batch, Mapping):
        return (), {str(name): value for name, value in batch.items()}
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}


def from_data(data: Any, collate: Callable[[list[Any]], Any] | None = None) -> Call | None:
    """A call with the first samples of ``initialize(training_data=...)``. None if it has no samples by index."""
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or not len(data):
        return None
    # What a data set draws for a sample, as a random crop, it draws again for the script: its data are the same as
    # without a pipeline.
    with guards.untouched_generators():
        samples = [data[index % len(data)] for index in range(_SAMPLES)]
        try:
            return as_call((collate or default_collate)(samples))
        except RuntimeError:  # they have other shapes, which batches of one may
            return as_call((collate or default_collate)(samples[:1]))


def own_example(model: nn.Module) -> Call | None:
    """A call with the model's ``dummy_inputs``, as Hugging Face's have them. None if its forward does not take them.

    A class that derives from one of theirs inherits it, whatever its own forward takes.
    """
    inputs = getattr(model, "dummy_inputs", None)
    if not isinstance(inputs, (Mapping, Sequence)) or not len(inputs):
        return None
    call = as_call(inputs)
    return call if takes(model, call) else None


def takes(model: nn.Module, call: Call) -> bool:
    """Whether the signature of the model's forward allows a call. Its types are not looked at."""
    try:
        inspect.signature(model.forward).bind(*call[0], **call[1])
    except TypeError:
        return False
    return True


def guesses(model: nn.Module) -> Iterator[Call]:
    """Calls with token indices, int64 zeros [2, 8], for required arguments.

    If that is one, it may also be a batch of several tensors. Forwards with the names that Hugging Face's models give
    to their inputs may want those by keyword, as encoders with a decoder do, and models of images and of sound.
    """
    parameters = inspect.signature(model.forward).parameters
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters.values() if p.default is p.empty and p.kind in positional]

    def indices() -> torch.Tensor:
        return torch.zeros(_SAMPLES, _LENGTH, dtype=torch.int64, device="cpu")

    named = {name: indices() for name in ("input_ids", "decoder_input_ids") if name in parameters}
    if "pixel_values" in parameters:
        named["pixel_values"] = _images(getattr(model, "config", None))
    if "input_values" in parameters and "input_ids" not in parameters:
        named["input_values"] = torch.zeros(_SAMPLES, _SOUND, device="cpu")
    if named and all(p.name in named for p in required):
        yield (), named
    yield tuple(indices() for _ in required), {}
    if len(required) == 1:
        for count in range(2, _MOST + 1):
            yield (tuple(indices() for _ in range(count)),), {}


def _images(config: Any) -> torch.Tensor:
    config = getattr(config, "vision_config", config)
    if not hasattr(config, "image_size"):
        config = getattr(config, "encoder", config)
    size = getattr(config, "image_size", None)
    if not isinstance(size, (list, tuple)):
        size = (size if isinstance(size, int) else _IMAGE,) * 2
    return torch.zeros(_SAMPLES, getattr(config, "num_channels", 3), *size, device="cpu")
