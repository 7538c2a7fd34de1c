"""The files of a vPipe or PipeDream run: its YAML, its partition file and its ``mp_conf.json``.

The YAML has one quoted ``'key': value`` pair a line and no braces, which is a YAML mapping. Some are edited by people
who think of Python: a comma at the end of a line, a tab, ``None``. All of these are read, and nothing is executed.
"""

import json
import re
from collections.abc import Hashable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.partition_file import merge_partition_file
from ds_vpipe.errors import Refusal, did_you_mean, read_json

# A host's name goes to ssh and, in the launcher's command, through the shells of other hosts: nothing that they read.
Machine = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*:(0|[1-9][0-9]{0,3})$")]


def _different(machines: list[str]) -> list[str]:
    if len(set(machines)) < len(machines):
        raise ValueError
    return machines


def _field(allowed: str, remedy: str, **limits: Any) -> Any:
    """Limits of a field, and the texts of its refusal."""
    return Field(title=allowed, description=remedy, **limits)


_Text = Annotated[str | None, _field("a text", "write it in quotes", min_length=1)]
_Count = Annotated[int, _field("a whole number >= 1, without quotes", "write such a number", ge=1)]
_Frequency = Annotated[int, _field("a whole number >= 0, without quotes", "write such a number", ge=0)]
_POINT = "write it with a point, such as 0.05 (YAML takes 5e-2 for a text)"
_Number = Annotated[float, _field("a number >= 0, without quotes", _POINT, ge=0, allow_inf_nan=False)]
_Flag = Annotated[bool, _field("True or False, without quotes", "write one of them")]
_Machines = Annotated[
    list[Machine],
    AfterValidator(_different),
    _field("a list of different 'HOST:GPU'", "write one per rank, such as ['localhost:0']", min_length=1),
]
_REMEDY = "correct the path or the file"
_MODELS = "bert, translation, image_classification, speech_to_text"


class VPipeFile(BaseModel):
    """A run's YAML file. Paths are as written; numbers that are not there are those of vPipe's training script."""

    model_config = ConfigDict(strict=True, frozen=True)

    path: Path
    given: dict[Any, Any]  # all fields as written, in order
    directory: _Text = None
    log_directory: _Text = None
    module: _Text = None
    config_file: _Text = None
    partition: _Text = None
    container: _Text = None
    machines: _Machines
    model_type: Annotated[
        Literal["bert", "translation", "image_classification", "speech_to_text"], _field(_MODELS, "write one of them")
    ]
    sync_mode: Annotated[Literal["asp", "bsp"], _field("asp or bsp", "write one of them")]
    distributed_backend: Annotated[Literal["gloo", "nccl"], _field("gloo or nccl", "write one of them")]
    data_dir: _Text = None
    batch_size: _Count = 8  # samples per micro-batch and rank
    learning_rate: _Number = 0.1
    learning_rate_policy: _Text = None
    weight_decay: _Number = 1e-4
    epochs: _Count = 100
    print_frequency: _Frequency = 10  # in micro-batches, as verbose_frequency
    verbose_frequency: _Frequency = 0
    lr_warmup: _Flag = False
    recompute: _Flag = False
    macrobatch: _Flag = False
    synthetic_data: _Flag = False
    no_input_pipelining: _Flag = False

    def find(self, key: str, root: Path | None) -> Path | None:
        """Path of a file that the YAML names, None if it names none.

        Raises:
            VPipeConfigError: it is in none of the :meth:`folders`.
        """
        name = getattr(self, key)
        if name is None:
            return None
        tried = [folder / name for folder in self.folders(root)]
        for path in tried:
            if path.is_file():
                return path
        remedy = "name the folder in which driver.py was started: --root DIR"
        reason = f"there is no {', no '.join(str(path) for path in tried)}"
        raise Refusal(f"{self.path}: {key}", name, "an existing file", remedy, reason).error()

    def folders(self, root: Path | None) -> Iterator[Path]:
        """Folders that the paths in the YAML may be relative to, most likely first.

        vPipe's driver is started in ``root`` and goes to ``directory`` below it; PipeDream's goes to the folder of the
        type of model. Without a ``root`` these are looked for here, beside the YAML and above it.
        """
        roots = [root] if root is not None else [Path(), self.path.parent, self.path.parent.parent]
        for folder in dict.fromkeys(roots):
            yield folder / (self.directory or self.model_type)
        yield from dict.fromkeys(roots)


FIELDS = tuple(key for key in VPipeFile.model_fields if key not in ("path", "given"))


class StageMaps(BaseModel):
    """vPipe's ``mp_conf.json``; other keys are in ``model_extra``."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    module_to_stage_map: Annotated[
        list[int],
        _field(
            "the stage of every module, from 0, rising by 0 or 1",
            "give a list such as [0, 1, 2, 3, 3], the last entry for the criterion",
            min_length=2,
        ),
    ]
    stage_to_rank_map: Annotated[
        dict[str, Annotated[list[int], Field(min_length=1)]],
        _field('the ranks of every stage, such as {"0": [0], "1": [1]}', "give a list of ranks per stage"),
    ]
    stage_to_depth_map: Annotated[
        dict[str, Annotated[int, Field(ge=0)]] | None,
        _field("a depth per stage, falling to 0 at the last stage", "give whole numbers >= 0"),
    ] = None

    @property
    def modules(self) -> list[int]:
        """Modules of every stage. The last one of the file, the criterion, is not counted."""
        *layers, criterion = self.module_to_stage_map
        return [layers.count(stage) for stage in range(criterion + 1)]

    @property
    def ranks(self) -> list[list[int]]:
        """Ranks of every stage."""
        return [self.stage_to_rank_map[str(stage)] for stage in range(len(self.stage_to_rank_map))]

    @property
    def depth(self) -> list[int] | None:
        """Warm-up depth of every stage, None for the usual one."""
        depths = self.stage_to_depth_map
        return None if depths is None else [depths[str(stage)] for stage in range(len(depths))]


_Model = TypeVar("_Model", bound=BaseModel)


def read_vpipe_file(path: str | Path) -> VPipeFile:
    """Read and check a run's YAML.

    Raises:
        VPipeConfigError: the file cannot be read, is no mapping, or a key is missing or has a wrong value. The line
            names file and key.
    """
    path = Path(path)
    given = {key: value for key, value in _yaml(path).items() if value is not None and value != "None"}
    found = {key: value for key, value in given.items() if key in FIELDS}
    if not {"directory", "sync_mode", "partition"} & given.keys():
        found["sync_mode"] = "asp"  # PipeDream knows no other
    file = _validated(VPipeFile, {**found, "path": path, "given": given}, path)
    if file.data_dir is None and not file.synthetic_data:
        raise _missing(path, VPipeFile, "data_dir", given).error()
    if file.partition is None and file.config_file is None:
        remedy = "add one of them to the file"
        raise Refusal(f"{path}: partition", None, "partition or config_file, a JSON with the stages", remedy).error()
    return file


def read_split(path: Path) -> VPipeConfig:
    """Read ``{"partition": [counts], "recompute_ratio": [ratios]}``, a file that ``vpipe.partition`` may name too.

    Raises:
        VPipeConfigError: the file or a value in it is wrong.
    """
    settings, origin = merge_partition_file({"partition": str(path)})
    block = VPipeConfig.parse(settings, origin)
    count = len(settings["partition"])
    for name, ratios in (("recompute_ratio", block.recompute_ratio), ("swap_ratio", block.swap_ratio)):
        if isinstance(ratios, tuple) and len(ratios) != count:
            reason = f"partition has {count} entries and this has {len(ratios)}"
            raise Refusal(f"{path}: {name}", ratios, "one number per stage", f"give {count}", reason).error()
    return block


def read_stage_maps(path: Path) -> StageMaps:
    """Read ``mp_conf.json``.

    Raises:
        VPipeConfigError: the file or a value in it is wrong, or stages are replicated unevenly.
    """
    maps = _validated(StageMaps, read_json(path, "file", "a file with a JSON object", _REMEDY), path)
    for key, wrong, remedy, reason, allowed in _map_rules(maps):
        if wrong:
            title = StageMaps.model_fields[key].title or ""
            raise Refusal(f"{path}: {key}", getattr(maps, key), allowed or title, remedy, reason).error()
    return maps


def _map_rules(maps: StageMaps) -> Iterator[tuple[str, bool, str, str, str]]:
    """Rules for the maps: key, whether it breaks the rule, remedy, reason, and what is allowed if not as ever."""
    key, stages = "module_to_stage_map", maps.module_to_stage_map
    yield key, stages[0] != 0, "number the stages from 0", "", ""
    for before, stage in pairwise(stages):
        yield key, stage - before not in (0, 1), "order the modules by stage", f"{stage} follows {before}", ""
    remedy = "put the criterion on the stage of the last module"
    yield key, stages[-2] != stages[-1], remedy, "the criterion has a stage of its own", ""
    count = stages[-1] + 1
    for key in ("stage_to_rank_map", "stage_to_depth_map"):
        value = getattr(maps, key)
        wrong = value is not None and value.keys() != {str(stage) for stage in range(count)}
        yield key, wrong, f'give the keys "0" to "{count - 1}"', f"module_to_stage_map has {count} stages", ""
    key, sizes = "stage_to_rank_map", [len(ranks) for ranks in maps.ranks]
    wrong = sorted(chain(*maps.ranks)) != list(range(sum(sizes)))
    yield key, wrong, "number the ranks so", "the ranks are not 0, 1, 2, ... once each", ""
    reason = f"stages have {', '.join(map(str, sizes))} ranks, and uneven replication has no counterpart"
    remedy = f"give every stage {max(sizes)} ranks, or one, and move layers instead: python -m ds_vpipe plan --help"
    yield key, len(set(sizes)) > 1, remedy, reason, "the same number of ranks at every stage"
    depth = maps.depth or [0]
    remedy = f"write {json.dumps({str(stage): count - 1 - stage for stage in range(count)})}, or remove the key"
    wrong = depth[-1] != 0 or sorted(depth, reverse=True) != depth
    yield "stage_to_depth_map", wrong, remedy, "stage 0 runs furthest ahead", ""


def plain_yaml(text: str) -> str:
    """``text`` as plain YAML: no tabs, no commas after values at line ends.

    A comma stays where more of a list follows: neither a key nor the end of the file.
    """
    in_braces = re.match(r"\s*(#.*\s*)*\{", text) is not None

    def plain(match: re.Match[str]) -> str:
        return " " if match[0] == "\t" else match[0] if match[1] or in_braces else ""

    quoted = r"""('[^'\n]*'|"(?:\\.|[^"\\\n])*")"""
    blank = r"[ \t]*(?:#.*)?"
    key = r"""(?:'[^'\n]*'|"[^"\n]*"|[\w-]+)[ \t]*:(?=\s)"""
    return re.sub(rf"{quoted}|\t|,(?={blank}(?:(?:\n{blank})+{key}|(?:\n{blank})*\Z))", plain, text)


def _validated(model: type[_Model], content: dict[Any, Any], path: Path) -> _Model:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = min(error.errors(), key=lambda found: found["type"] == "missing")
    key = str(first["loc"][0])
    field = model.model_fields[key]
    if first["type"] == "missing":
        raise _missing(path, model, key, content.get("given", content)).error()
    raise Refusal(f"{path}: {key}", content[key], field.title or "", field.description or "").error()


def _missing(path: Path, model: type[BaseModel], key: str, given: dict[Any, Any]) -> Refusal:
    reason = next((hint for word in given if (hint := did_you_mean(word, [key]))), "").removeprefix(", ")
    allowed = model.model_fields[key].title or ""
    return Refusal(f"{path}: {key}", None, allowed, f"add '{key}': ... to the file", reason)


class _Loader(yaml.SafeLoader):
    """Plain data only, and every key once: of two equal keys YAML keeps the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, (key, (where, _)) in enumerate(zip(keys, node.value, strict=True)):
            if key in keys[:number]:
                text = f"the key {key!r} is there twice"
                raise yaml.constructor.ConstructorError(None, None, text, where.start_mark)
        return super().construct_mapping(node, deep)


def _yaml(path: Path) -> dict[Any, Any]:
    def parse(text: str) -> object:
        try:
            return yaml.load(plain_yaml(text), Loader=_Loader)  # a safe loader
        except yaml.YAMLError as error:
            raise ValueError(error) from None

    return read_json(path, "file", "a YAML file with one 'key': value a line", _REMEDY, parse, "plain YAML")
