"""A pipeline checkpoint on disk, read by parameter and without processes.

Weights lie in one file per layer, numbered over the whole model, and so do not depend on the split.
Optimizer states lie in one file per stage (``mp_rank_XX_model_states.pt``), with ZeRO-1 in one per stage
and replica (``[bf16_]zero_pp_rank_R_mp_rank_XX_optim_states.pt``). Files are mapped into memory, so that only what is
asked for is read. They are pickles: open only checkpoints that you trust, as with DeepSpeed itself.
"""

import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ds_vpipe.checkpoints.optimizer_states import Groups, ParameterState, form_of, unpack
from ds_vpipe.checkpoints.stage_layout import (
    LAYOUT_KEY,
    StageLayout,
    first_owners,
    has_layout,
    infer_groups,
)
from ds_vpipe.errors import VPipeError, one_line

_STAGE_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_LAYER_FILE = re.compile(r"layer_(\d+)-(?:.*-)?model_states\.pt")
_COPY = "copy it anew, or load another tag"
_LOST = f"files are lost; {_COPY}"


def previous_folder(folder: Path) -> Path:
    """Name of the checkpoint that ``folder`` replaces, while a save renames them."""
    return folder.with_name(f".{folder.name}.previous")


def checkpoint_folder(directory: str | Path, tag: str | None = None) -> Path:
    """Folder that holds a checkpoint's files, also after a save that was killed.

    ``directory`` is what was given to ``save_checkpoint()``, or the checkpoint's own folder. Without a ``tag`` it is
    the checkpoint that the file ``latest`` names.

    Raises:
        VPipeError: there is none.
    """
    root, remedy = Path(directory), "correct the tag"
    if tag is None:
        if any(root.glob("mp_rank_*_model_states.pt")):
            return root
        latest = root / "latest"
        if not latest.is_file():
            raise VPipeError(
                f"checkpoint: got {str(root)!r}, which has neither a file 'latest' nor mp_rank_*_model_states.pt; "
                f"allowed is a directory written by save_checkpoint(); correct the path or name a tag"
            )
        tag, remedy = latest.read_text(encoding="utf-8", errors="replace").strip(), "correct 'latest', or name a tag"
    set_aside = previous_folder((root / tag).absolute())  # "." has no name
    if not (root / tag).exists() and set_aside.exists():
        return set_aside  # a save was killed between two renamings; the next load puts it back
    if not any((root / tag).glob("mp_rank_*_model_states.pt")):
        tags = sorted(path.parent.name for path in root.glob("[!.]*/mp_rank_00_model_states.pt"))
        raise VPipeError(f"checkpoint: got tag {tag!r} in {str(root)!r}; allowed: {tags}; {remedy}")
    return root / tag


def names_layer(file: str, number: int) -> bool:
    """Whether ``file`` is the name, or one of the names, of that layer's file in a checkpoint's folder."""
    match = _LAYER_FILE.fullmatch(file)
    return match is not None and int(match[1]) == number


def rank_file(stage: int | str, replica: int, slice_index: int) -> str:
    """Name of the file that a rank writes beside DeepSpeed's. ``*`` as stage: a pattern for those of all stages."""
    number = stage if isinstance(stage, str) else f"{stage:02d}"
    return f"vpipe-stage_{number}-replica_{replica:02d}-slice_{slice_index:02d}.pt"


def outside_layers(folder: Path, slice_index: int) -> dict[str, torch.Tensor]:
    """Parameters and buffers that are in no layer's file. What several stages had is the last one's, which trains it.

    Such are those of a loss function, and what a tied layer that runs a ``forward_fn`` does not share with others.
    """
    found: dict[str, torch.Tensor] = {}
    for state in _rank_states(folder, slice_index):
        found |= state["outside"]
    return found


def _rank_states(folder: Path, slice_index: int) -> Iterator[Mapping[str, Any]]:
    """Contents of the stages' rank files, of their first replicas."""
    for path in sorted(folder.glob(rank_file("*", 0, slice_index))):
        yield torch.load(path, map_location="cpu", weights_only=False)


class PipelineCheckpoint:
    """Checkpoint of a pipeline.

    Args:
        folder: its folder, see :func:`checkpoint_folder`.
        slice_index: which tensor-parallel rank's part to read.
        ties: layers that are tied, with their keys, for checkpoints that do not say it.

    Raises:
        VPipeError: files are missing, or there are several slices and none was chosen.
    """

    def __init__(self, folder: Path, slice_index: int | None = None, ties: Mapping[int, str] | None = None) -> None:
        self.folder = folder
        self._slice = slice_index or 0
        found: dict[int, list[Path]] = {}
        for path in sorted(folder.iterdir()):
            match = _LAYER_FILE.fullmatch(path.name)
            if match:
                found.setdefault(int(match[1]), []).append(path)
        self.slices = max(map(len, found.values()), default=1)
        if self.slices > 1 and slice_index is None:
            raise VPipeError(
                f"checkpoint {str(folder)!r}: got layers in {self.slices} tensor-parallel slices, allowed is one; how "
                f"slices are put together is up to the model"
            )
        for index, paths in found.items():
            if len(paths) != self.slices:
                raise VPipeError(
                    f"checkpoint {str(folder)!r}: got {len(paths)} of {self.slices} files of layer {index}, allowed "
                    f"are all; {_LOST}"
                )
        self._layer_files = {index: paths[self._slice] for index, paths in found.items()}
        numbers = sorted(int(match[1]) for path in folder.iterdir() if (match := _STAGE_FILE.fullmatch(path.name)))
        contents = {number: self._load(f"mp_rank_{number:02d}_model_states.pt") for number in numbers}
        whole = any(content.get("module") for content in contents.values())
        if whole and not self._layer_files:
            raise VPipeError(
                f"checkpoint {str(folder)!r}: got one of an engine that is no pipeline, allowed are those of "
                f"pipelines; to begin with its weights load them into the model before initialize()"
            )
        if whole:
            raise VPipeError(
                f"checkpoint {str(folder)!r}: got files of a pipeline and, from another save under the same tag, "
                f"of an engine that is no pipeline; allowed are those of one save; save to another folder or tag"
            )
        self.layouts: list[StageLayout] | None = None
        if all(has_layout(content) for content in contents.values()):
            layouts = {n: StageLayout.from_plain(content[LAYOUT_KEY]) for n, content in contents.items()}
            numbers = [number for number in numbers if layouts[number].slice_index == self._slice]
            numbers.sort(key=lambda number: layouts[number].stage)
            self.layouts = [layouts[number] for number in numbers]
        elif self.slices > 1:
            numbers = numbers[self._slice :: self.slices]
        saved = max(len(numbers), sum(1 for _ in folder.glob(rank_file("*", 0, self._slice))))
        if not numbers or (self.layouts and [layout.stage for layout in self.layouts] != list(range(saved))):
            raise VPipeError(f"checkpoint {str(folder)!r}: got stages {numbers}, allowed are all of them; {_LOST}")
        for layout in self.layouts or ():
            for replica in range(layout.replicas):
                self._refuse_lost(rank_file(layout.stage, replica, self._slice))
        self._numbers = numbers
        self.stages: list[dict[str, Any]] = [contents[number] for number in numbers]
        for index in self._saved_layers() - self._layer_files.keys():
            some = next(iter(self._layer_files.values()), Path("layer_00-model_states.pt")).name
            self._refuse_lost(re.sub(r"\d+", f"{index:02d}", some, count=1))
        self._given_ties = dict(ties or {})
        self._layers: dict[int, Mapping[str, torch.Tensor]] = {}
        self._optimizers: dict[int, list[Mapping[str, Any]]] = {}

    def _saved_layers(self) -> set[int]:
        """Layers that had a file, as far as the stages' files say."""
        named: list[Iterable[str]] = [self.trained]
        for stage in self.stages:
            named += [stage.get("buffer_names") or (), *(stage.get("param_shapes") or ())]
        heads = {name.partition(".")[0] for name in chain(*named)}
        layouts = self.layouts or ()
        tied = {index for layout in layouts for index in layout.ties}  # one that runs a forward_fn has no file
        return ({int(head) for head in heads if head.isdecimal()} - tied).union(*(layout.files for layout in layouts))

    @cached_property
    def groups(self) -> list[Groups]:
        """The optimizer's parameters, per stage and parameter group.

        Raises:
            VPipeError: a checkpoint of the stock engine does not tell.
        """
        if self.layouts is not None:
            return [layout.groups for layout in self.layouts]
        shapes = {index: {n: t.shape for n, t in self.layer(index).items()} for index in self._layer_files}
        return infer_groups(self.stages, shapes)

    @cached_property
    def ties(self) -> Mapping[int, str]:
        """Tied layers with their keys."""
        if self.layouts is not None:
            return self.layouts[0].ties
        if self._given_ties or all(stage.get("param_shapes") is None for stage in self.stages):
            return self._given_ties
        return self._guess_ties()

    @cached_property
    def untied(self) -> set[str]:
        """Names within tied layers, ``tied_modules.KEY.NAME``, that are not tied: every layer has its own.

        Without layouts those whose tensors differ between layers.
        """
        if self.layouts is not None:
            named = {name for layout in self.layouts for name in layout.untied.values()}
            # Tied layers of several classes on one stage have their parameters under their own numbers.
            members = (name.partition(".") for layout in self.layouts for name in layout.names)
            ties = {str(index): key for index, key in self.ties.items()}
            return named | {f"tied_modules.{ties[layer]}.{rest}" for layer, _, rest in members if layer in ties}
        found: dict[str, torch.Tensor] = {}
        differing = set()
        for index, key in self.ties.items():
            for name, tensor in self.layer(index).items() if index in self._layer_files else ():
                full = f"tied_modules.{key}.{name}"
                if not torch.equal(found.setdefault(full, tensor), tensor):
                    differing.add(full)
        return differing

    @property
    def copies(self) -> Mapping[str, str] | None:
        """:attr:`StageLayout.copies`."""
        return self.layouts[0].copies if self.layouts else None

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: stage for name, (stage, _) in first_owners(self.groups).items()}

    def unique_name(self, name: str) -> str:
        """The name under which a parameter that has several is known to the optimizer."""
        found = (layout.aliases[name] for layout in self.layouts or () if name in layout.aliases)
        return next(found, name)

    @property
    def trained(self) -> list[str]:
        """Names of all parameters that optimizers hold, as far as the checkpoint says them."""
        return list(dict.fromkeys(name for layout in self.layouts or () for name in layout.names))

    def stage_of(self, name: str) -> int | None:
        """The stage whose optimizer holds a parameter, or None."""
        return self._index.get(self.unique_name(name))

    def stage_file(self, stage: int) -> Path:
        """The file of :attr:`stages` for a stage."""
        return self.folder / f"mp_rank_{self._numbers[stage]:02d}_model_states.pt"

    @property
    def layers(self) -> list[int]:
        """Layers with weights, by number."""
        return sorted(self._layer_files)

    def layer(self, index: int) -> Mapping[str, torch.Tensor]:
        """A layer's own state dict."""
        if index not in self._layers:
            self._layers[index] = self._load(self._layer_files[index].name)
        return self._layers[index]

    def weight(self, name: str) -> torch.Tensor | None:
        """Weight of a parameter in the type in which it was saved. None if the checkpoint does not have it."""
        head, _, rest = name.partition(".")
        layers = [int(head)] if head.isdecimal() else []
        if head == "tied_modules":
            key, _, rest = rest.partition(".")
            layers = [index for index, tie in self.ties.items() if tie == key]
        found = (self.layer(index).get(rest) for index in layers if index in self._layer_files)
        return next((tensor for tensor in found if tensor is not None), self.outside.get(name))

    @cached_property
    def outside(self) -> dict[str, torch.Tensor]:
        """See :func:`outside_layers`."""
        return outside_layers(self.folder, self._slice)

    def left_out(self) -> list[str]:
        """Frozen parameters that ``exclude_frozen_parameters`` kept out; DeepSpeed's own checkpoints do not say it."""
        return [name for state in _rank_states(self.folder, self._slice) for name in state.get("left_out", ())]

    def optimizer(self, stage: int) -> list[Mapping[str, Any]]:
        """State dicts of a stage's optimizer: one per replica with ZeRO, else one, or none without an optimizer."""
        if stage not in self._optimizers:
            content = self.stages[stage]
            found = [] if content.get("optimizer") is None else [content["optimizer"]]
            if not found and content.get("param_shapes") is not None:
                files = [self._zero_file(stage, replica) for replica in range(content["dp_world_size"])]
                found = [self._load(name)["optimizer_state_dict"] for name in files]
            self._optimizers[stage] = found
        return self._optimizers[stage]

    def states(self, names: Iterable[str]) -> dict[str, ParameterState]:
        """Optimizer states of the parameters ``names``.

        Raises:
            VPipeError: it holds nothing of one of them, or see :attr:`groups`.
        """
        wanted = {name: self.unique_name(name) for name in names}
        lost = [name for name, own in wanted.items() if own not in self._index]
        if lost:
            raise VPipeError(
                f"checkpoint {str(self.folder)!r}: got no optimizer state of {lost[0]} (and {len(lost) - 1} more), "
                f"allowed are models that train the same parameters; load with load_optimizer_states=False"
            )
        stages = {stage: self._unpacked(stage) for stage in sorted({self._index[own] for own in wanted.values()})}
        return {name: stages[self._index[own]][own] for name, own in wanted.items()}

    def _unpacked(self, stage: int) -> dict[str, ParameterState]:
        return unpack(self.optimizer(stage), self.groups[stage], stage)

    def masters(self) -> dict[str, torch.Tensor]:
        """fp32 master weights by name, of all parameters that have one.

        Raises:
            VPipeError: see :attr:`groups`.
        """
        kept = [s for s in range(len(self.stages)) if (o := self.optimizer(s)) and form_of(o[0]).masters is not None]
        return {
            name: state.master
            for stage in kept
            for name, state in self._unpacked(stage).items()
            if state.master is not None and self._index.get(name) == stage
        }

    def _zero_file(self, stage: int, replica: int) -> str:
        name = f"zero_pp_rank_{replica}_mp_rank_{self._numbers[stage]:02d}_optim_states.pt"
        return f"bf16_{name}" if (self.folder / f"bf16_{name}").is_file() else name

    def _refuse_lost(self, name: str) -> None:
        if not (self.folder / name).is_file():
            raise VPipeError(f"checkpoint {str(self.folder)!r}: got no file {name}, allowed are all; {_LOST}")

    def _load(self, name: str) -> Any:
        self._refuse_lost(name)
        path = self.folder / name
        try:
            return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=False)
        except (ImportError, AttributeError) as error:
            raise VPipeError(
                f"checkpoint {str(self.folder)!r}: got {name} with objects whose code is not here ({error}), allowed "
                f"are those that can be imported; run this where the training script's modules are, or add their "
                f"folder to PYTHONPATH"
            ) from error
        except Exception as error:  # whatever the bytes of a damaged pickle lead its reader to
            raise VPipeError(
                f"checkpoint {str(self.folder)!r}: got {name}, which cannot be read ({one_line(error)}); allowed are "
                f"files as they were written; {_COPY}"
            ) from error

    def _guess_ties(self) -> dict[int, str]:
        """Ties in a ZeRO checkpoint of the stock engine: layers that only the tied modules' names account for."""
        own: set[int] = set()
        tied: dict[str, dict[str, tuple[int, ...]]] = {}
        for groups in self.groups:
            for name, shape in chain(*groups):
                head, _, rest = name.partition(".")
                if head.isdecimal():
                    own.add(int(head))
                elif head == "tied_modules":
                    key, _, inner = rest.partition(".")
                    tied.setdefault(key, {})[inner] = tuple(shape)
        ties: dict[int, str] = {}
        for index in self.layers:
            if index in own:
                continue
            shapes = {name: tuple(tensor.shape) for name, tensor in self.layer(index).items()}
            keys = [key for key, members in tied.items() if members.items() <= shapes.items()]
            if len(keys) > 1:
                raise VPipeError(
                    f"checkpoint {str(self.folder)!r}: got tied layer {index} that could be any of {keys}, allowed is "
                    f"one; save it with ds_vpipe, which writes the keys down"
                )
            if keys:
                ties[index] = keys[0]
        return ties
