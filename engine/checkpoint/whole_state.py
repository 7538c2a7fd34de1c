"""State dicts of the whole model on every rank of a pipeline.

Every stage lists its entries; then each goes from its owner to the others through host memory, one at a time. All ranks
of a pipeline have to call for it. A rank whose script has ended takes part in the calls of the others, so that
``if rank == 0: model.save_pretrained(...)`` in the last lines works.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import logger

from ds_vpipe.checkpoints.stage_layout import is_outside_layers
from ds_vpipe.engine.checkpoint.parameter_states import untied_names
from ds_vpipe.engine.modules.split_module import SplitModule
from ds_vpipe.engine.stage import Stage
from ds_vpipe.errors import PipelinePeerError, PipelineProtocolError, VPipeError
from ds_vpipe.splitting.meta_tensor import MetaTensor
from ds_vpipe.splitting.model_hooks import StateHooks, in_order
from ds_vpipe.whole_file import whole_file

_PATIENCE_S = 5.0
_REMEDY = (
    "call state_dict() or engine.full_state_dict() on every rank and write its result on one, or call "
    "engine.save_checkpoint() on every rank and then python -m ds_vpipe.export"
)


@dataclass(frozen=True)
class _Entry:
    """Entry of a stage's state dict: shape and type of a tensor, or another value itself."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    value: Any = None
    apart: str | None = None  # name by layer, of what a tied layer does not share with those of other stages


@dataclass(frozen=True)
class _Request:
    """State dict that a rank calls for."""

    path: str
    rank0_only: bool = False
    copied: bool = False  # in a copy of the model, unknown to a rank at the end of its script

    def __str__(self) -> str:
        kinds = " in a copy" * self.copied + " for rank 0 alone" * self.rank0_only
        return repr(self.path or "the model") + kinds


class WholeModel:
    """State dicts of the whole model, gathered from all stages. All ranks of a pipeline have one."""

    def __init__(self, stage: Stage, drain_before: Callable[[str], None]) -> None:
        self._drain: Callable[[str], None] = drain_before  # before weights are gathered, until leave()
        self._consensus, self._module, self._stage = stage.consensus, stage.module, stage.number
        self._last = stage.pipeline.num_stages - 1
        self._calls = 0
        self._given: list[tuple[torch.Tensor, int]] = []
        self.alone = self._last == 0  # no other stage is asked: there is one, or all scripts have ended
        if isinstance(stage.module, SplitModule) and not self.alone:
            stage.module.stage_model.state_hooks = StateHooks(stage.module.user_module, self)
        elif not self.alone:
            stage.module.register_load_state_dict_pre_hook(_take_back)

    def leave(self) -> None:
        """Gather without the engine, which has nothing in flight from now on."""
        self._drain = lambda what: None

    def save(self, save_dir: str, save_filename: str, exclude_frozen: bool) -> None:
        """Gather the weights on rank 0 and write them. The file appears when it is complete."""
        what = f"save_16bit_model({str(save_dir)!r})"
        state_dict = self.full_state_dict(what, True, exclude_frozen)
        with self._consensus.all_or_none(what):
            if dist.get_rank() == 0:
                path = Path(save_dir, save_filename)
                path.parent.mkdir(parents=True, exist_ok=True)
                with whole_file(path) as part:
                    torch.save(state_dict, part)

    def full_state_dict(self, what: str, rank0_only: bool, exclude_frozen: bool) -> dict[str, torch.Tensor]:
        """A copy of the whole state dict in host memory. See ``VPipeEngine.full_state_dict()``."""
        module = self._module
        slices = module.mpu().get_slice_parallel_world_size()
        if slices > 1:
            raise VPipeError(
                f"{what}: got a model whose tensors are sliced over {slices} ranks, "
                f"allowed are whole tensors; call save_checkpoint() and use python -m ds_vpipe.export"
            )
        model = module.user_module if isinstance(module, SplitModule) else module
        own = module.own_state() if isinstance(module, SplitModule) else module.state_dict()
        if exclude_frozen:
            named = model.named_parameters(remove_duplicate=False)
            frozen = {name for name, parameter in named if not parameter.requires_grad}
            own = {name: value for name, value in own.items() if name not in frozen}
        if self.alone:
            return {name: _copy(value) for name, value in own.items()}
        found = self.gather(own, what, rank0_only=rank0_only)
        copies: dict[int, Any] = {}
        for mine, value in found.values():
            if id(value) not in copies:
                copies[id(value)] = value if mine is None else _copy(value)
        # A PipelineModule knows its own names only, and every rank is to have the same order.
        names = in_order(model, found) if isinstance(module, SplitModule) else found
        return {name: copies[id(found[name][1])] for name in names}

    def gather(
        self, own: Mapping[str, Any], what: str, path: str = "", rank0_only: bool = False, copied: bool = False
    ) -> dict[str, tuple[Any, Any]]:
        """The entries of all stages. All ranks of the pipeline call it.

        Args:
            own: this stage's entries.
            what: begins the line of a refusal.
            path: of the module whose state dict it is, the same on all ranks.
            rank0_only: only the first stage gets them; others get nothing.
            copied: the module is in a copy of the model.

        Returns:
            For every entry, a value in host memory, the same one for names of the same tensor, and in front of it the
            one of ``own`` that it is, or None.

        Raises:
            VPipeError: not all ranks have called.
        """
        request = _Request(path, rank0_only, copied)
        with self._all_calling(what):
            self._drain(what)
            requests = self._consensus.pipeline.gather(request, f"all ranks of the pipeline in {what}")
        wanted = {request for request in requests if request is not None}
        if len(wanted) > 1:
            modules = ", ".join(str(request) for request in requests if request is not None)
            raise VPipeError(f"{what}: got calls for {modules} on different ranks, allowed is the same on every rank")
        if copied and None in requests:
            raise VPipeError(
                f"{what}: called on rank {dist.get_rank()} for a copy of the model, of which another rank, whose "
                f"script has come to its end, has a part; call state_dict() of the copy on every rank and write its "
                f"result on one"
            )
        return self._exchange(own, request, what)

    def complete(self, path: str, own: dict[str, Any], what: str, copied: bool) -> dict[str, Any]:
        """A whole state dict, for :class:`~ds_vpipe.splitting.model_hooks.StateHooks`.

        All ranks have equal tensors, so that scripts may write the same file on each. Of a copy of the model the
        stage's own ones are as they are: averages of weights are kept by writing into them.
        """
        if not copied:
            self.refuse_written(what)
        whole: dict[str, Any] = {}
        for name, (mine, value) in self.gather(own, what, path, copied=copied).items():
            same = isinstance(mine, torch.Tensor) and (copied or _is(mine, value))
            whole[name] = mine if same else value
            if mine is not None and not same and isinstance(value, torch.Tensor):
                self._given.append((value, value._version))
        return whole

    def uses_buffer(self, module: int, key: str) -> bool:
        """:meth:`.StageModel.uses_buffer`."""
        return isinstance(self._module, SplitModule) and self._module.stage_model.uses_buffer(module, key)

    def before_loading(self) -> None:
        """Finish what is in flight and uses the parameters."""
        self._drain("load_state_dict()")

    def refuse_written(self, call: str) -> None:
        """Refuse ``call`` if the script has written into a copied state dict, or replaced parameters."""
        if isinstance(self._module, SplitModule):
            self._module.stage_model.refuse_replaced(call)
        given, self._given = self._given, []
        if any(value._version != version for value, version in given):
            raise VPipeError(
                f"{call}: got a state_dict() that was written into, allowed is to read it: of a split model it is a "
                f"copy; call model.load_state_dict() on every rank, or clone before you write"
            )

    def serve(self, own: Callable[[str], Mapping[str, Any]], drained: bool) -> None:
        """At the end of the script: take part in other ranks' calls until all have ended.

        ``own`` gives this stage's entries of a module; ``drained``: the end of the script has drained the pipeline.

        Raises:
            VPipeError: another rank is lost, does something else or did not come in time.
        """
        what = "the end of the script"
        while True:
            if not drained:
                self._drain(what)
            drained = False
            requests = self._consensus.pipeline.gather(None, f"all ranks of the pipeline at {what}")
            wanted = {request for request in requests if request is not None}
            if not wanted:
                return
            if len(wanted) == 1:
                (request,) = wanted
                if not request.copied:
                    self._exchange(own(request.path), request, what)

    def _owners(self) -> Mapping[str, tuple[str, int]]:
        """Names and stages of values by name in the whole state dict. Of others the first stage that has the name."""
        if isinstance(self._module, SplitModule):
            return self._module.owners()
        names = filter(is_outside_layers, self._module.state_dict())
        return {name: (name, self._last) for name in names}

    def _exchange(self, given: Mapping[str, Any], request: _Request, what: str) -> dict[str, tuple[Any, Any]]:
        within = f"{request.path}." if request.path else ""
        # What a script has made of an absent parameter has a value elsewhere.
        own = {within + name: value for name, value in given.items() if not isinstance(value, MetaTensor)}
        by_layer = untied_names(self._module)
        mine_of = {name: _entry(value, by_layer.get(name)) for name, value in own.items()}
        entries = _named_apart(self._consensus.pipeline.gather(mine_of, what))
        own = dict(zip(entries[self._stage], own.values(), strict=True))
        receivers = [0] if request.rank0_only else list(range(len(entries)))
        owners, values, result = self._owners(), dict[tuple[str, int], Any](), dict[str, tuple[Any, Any]]()
        for name in dict.fromkeys(name for found in entries for name in found):
            owner = owners.get(name)
            if owner is None or owner[0] not in entries[owner[1]]:
                owner = name, next(stage for stage, found in enumerate(entries) if name in found)
            there, stage = owner
            mine = own.get(there) if stage == self._stage else None
            if owner not in values:
                values[owner] = self._bring(entries[stage][there], mine, stage, receivers, what)
            if self._stage in receivers:
                result[name[len(within) :]] = mine, values[owner]
        return result

    def _bring(self, entry: _Entry, mine: Any, stage: int, receivers: list[int], what: str) -> Any:
        """One entry from its stage to the receivers, in host memory."""
        if entry.shape is None or entry.dtype is None:
            return entry.value
        sends = stage == self._stage
        if not sends and self._stage not in receivers:
            return None
        with torch.inference_mode(False), torch.no_grad():
            value = (
                mine.detach().cpu().contiguous() if sends else torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
            )
            if value.untyped_storage().nbytes() != value.nbytes:
                value = value.clone()  # else the whole flat buffer would be saved with it
            if value.numel() and receivers != [stage]:
                self._consensus.bytes_of_stage(value, stage, receivers, what)
        return value

    @contextmanager
    def _all_calling(self, what: str) -> Iterator[None]:
        """Context that warns of ranks that have not called, and in the end refuses."""
        self._calls += 1
        name = self._consensus.pipeline.name
        store = dist.distributed_c10d._get_default_store()
        keys = {rank: f"ds_vpipe/{name}/whole_state/{self._calls}/{rank}" for rank in self._consensus.pipeline.ranks}
        store.set(keys[dist.get_rank()], "here")
        if self._calls > 2:  # of the call before this one some rank may still be in the midst
            store.delete_key(f"ds_vpipe/{name}/whole_state/{self._calls - 2}/{dist.get_rank()}")

        def missing() -> str:
            with suppress(RuntimeError):  # the store's own rank is gone
                return ", ".join(str(rank) for rank, key in keys.items() if not store.check([key]))
            return ""

        def remind() -> None:
            if others := missing():
                logger.warning(f"ds_vpipe: {what}: waits on rank {dist.get_rank()} for rank {others}; {_REMEDY}")

        reminder = threading.Timer(_PATIENCE_S, remind)
        reminder.daemon = True
        reminder.start()
        try:
            yield
        except (PipelinePeerError, PipelineProtocolError) as error:
            if not (others := missing()):
                raise
            raise VPipeError(
                f"{what}: called on rank {dist.get_rank()}, but not on rank {others}, where other parts of the model "
                f"are; {_REMEDY}"
            ) from error
        finally:
            reminder.cancel()


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _entry(value: Any, apart: str | None) -> _Entry:
    plain = isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized
    return _Entry(tuple(value.shape), value.dtype, None, apart) if plain else _Entry(None, None, value, apart)


def _named_apart(entries: list[dict[str, _Entry]]) -> list[dict[str, _Entry]]:
    """Entries of all stages. A name that is taken becomes one by layer."""
    known: set[str] = set()
    result = []
    for found in entries:
        result.append({entry.apart if entry.apart and name in known else name: entry for name, entry in found.items()})
        known |= found.keys()
    return result


def _take_back(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load what :func:`_named_apart` has given names by layer."""
    for name, apart in untied_names(module).items():
        if prefix + apart in state_dict:
            state_dict[prefix + name] = state_dict.pop(prefix + apart)


def _is(mine: torch.Tensor, value: torch.Tensor) -> bool:
    return mine.device == value.device and mine.data_ptr() == value.data_ptr()
