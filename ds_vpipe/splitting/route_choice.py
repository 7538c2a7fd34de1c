"""How a model is split: along its chain of blocks through its own forward, or else along an exported graph."""

from __future__ import annotations

import inspect

from torch import nn

from ds_vpipe.splitting.absent import Ledger, SplitError
from ds_vpipe.splitting.alone import refuse_parts
from ds_vpipe.splitting.call import CallForms
from ds_vpipe.splitting.chain import Chain, chains
from ds_vpipe.splitting.example import Call, guesses, own_example, takes
from ds_vpipe.splitting.forward_route import ForwardRoute
from ds_vpipe.splitting.graph_route import GraphRoute
from ds_vpipe.splitting.materialisation import materialise_buffers
from ds_vpipe.splitting.slots import Slot, slots_of
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
    ledger = Ledger()
    slots = slots_of(model, ledger)
    materialise_buffers(model, slots)
    reasons: list[str] = []
    unfit = None if example is None or takes(model, example) else _unfit(model, example)
    example = None if unfit else example
    for chain in chains(model):
        if len(chain.keys) + 2 < num_stages:
            reasons.append(_too_few(model, chain, num_stages))
            continue
        route = ForwardRoute(model, chain, slots, ledger)
        found = _try_out(route, chain, example, model)
        if found is None:
            return StageModel(model, route, slots)
        reasons.append(found)
    if reasons and example is None:
        raise SplitError(reasons[0])
    given = example or own_example(model)
    if unfit and given is None:
        raise SplitError(unfit)
    return StageModel(model, _graph_route(model, slots, given, num_stages, reasons), slots)


def _try_out(route: ForwardRoute, chain: Chain, given: Call | None, model: nn.Module) -> str | None:
    """Find out which piece uses what; returns why the chain will not do, or None.

    Without an example, and if neither the model's own nor a guess is to the forward's liking, pieces stay as modules
    are registered: every first real call is tried out too, and refused if that was wrong.
    """
    if given is not None:
        calls = [(given, True)]
    else:
        own = own_example(model)
        known = [*([] if own is None else [own]), *guesses(model)]
        # One that the whole forward likes tells more than one that only its loss does not.
        calls = [(call, to_the_end) for to_the_end in (True, False) for call in known]
    refused = None
    for call, to_the_end in calls:
        packed, form = CallForms().pack(*call)
        try:
            route.assign(route.try_out(form, form.rebuild(packed[1:]), to_the_end=to_the_end))
        except SplitError as error:
            refused = refused or str(error)
        except Exception as error:  # the user's code, with inputs that it may not like
            if given is not None:
                return f"{chain.name}: forward failed without parameters: {type(error).__name__}: {_first_line(error)}"
        else:
            return None
    return refused


def _graph_route(
    model: nn.Module, slots: list[Slot], given: Call | None, num_stages: int, reasons: list[str]
) -> GraphRoute:
    if given is None:
        raise SplitError(
            f"{type(model).__name__}: has no list of two or more blocks of one class to split between, allowed without "
            f"one is a model with an example of its inputs; give initialize() training_data, or the model dummy_inputs"
        )
    packed, form = CallForms().pack(*given)
    try:
        return GraphRoute(model, slots, form, form.rebuild(packed[1:]), num_stages)
    except SplitError as error:
        raise SplitError("; and ".join([*reasons[:1], str(error)])) from None


def _too_few(model: nn.Module, chain: Chain, num_stages: int) -> str:
    return (
        f"{type(model).__name__}: got {num_stages} stages, allowed are 1 to {len(chain.keys) + 2}, the "
        f"{len(chain.keys)} blocks of {chain.name} and what is before and behind them; use fewer stages"
    )


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
