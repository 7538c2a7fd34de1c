"""The DeepSpeed JSON, read as DeepSpeed 0.19 reads it.

The one reader for engine, planner and commands, without DeepSpeed and its process groups. Values that DeepSpeed itself
refuses, such as an ``"auto"`` that nobody filled in, are left to it where they are not needed.

The three batch sizes are related by the number of replicas, which is that of ranks over stages. A JSON that gave all
three for plain data parallelism on the same ranks is therefore wrong for a pipeline. Scripts that compute it so, as
most do, are not edited for one: for them the total is corrected (:meth:`DeepSpeedJson.corrected`).
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ds_vpipe.errors import Refusal, parse_json, read_json
from ds_vpipe.tables import counted

T = TypeVar("T")
D = TypeVar("D")

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
BLOCK = "vpipe"
STAGES_REMEDY = 'write "pipeline": {"stages": 4} into the DeepSpeed JSON'
_PARTS = (MICRO, STEPS)
_TRAINS = frozenset(  # sections by which weights come out otherwise, of which a script's own are none
    {TOTAL, MICRO, STEPS, BLOCK, "optimizer", "scheduler", "gradient_clipping", "zero_optimization", "pipeline"}
    | {"fp16", "bf16", "bfloat16", "torch_autocast", "data_types", "communication_data_type", "sparse_gradients"}
    | {"prescale_gradients", "gradient_predivide_factor", "progressive_layer_drop", "curriculum_learning"}
    | {"gradient_allreduce_op", "dataloader_drop_last", "zero_force_ds_cpu_optimizer", "checkpoint", "data_efficiency"}
    | {"activation_checkpointing", "compression_training", "tensor_parallel", "sequence_parallel_size", "elasticity"}
)
_OF_ONE_RANK = ("vpipe.timeline", "vpipe.record", "vpipe.profile", "vpipe.peer_timeout_s")
_LONGEST = 1_000_000  # characters that may be Hjson, which takes its reader long
_BUCKET = 500_000_000  # DeepSpeed's default of zero_optimization.reduce_bucket_size, in elements
_SWITCH, _NUMBER = TypeAdapter(bool), TypeAdapter(int)  # as DeepSpeed has them


@dataclass(frozen=True)
class DeepSpeedJson:
    """The content of a DeepSpeed JSON."""

    content: Mapping[str, Any]

    def get(self, path: str) -> Any:
        """The value at a dotted ``path``. None if a part is missing or no object."""
        value: Any = self.content
        for key in path.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(key)
        return value

    def on(self, path: str, default: bool = False) -> bool:
        """Whether DeepSpeed's models read the value as true. They take 1 and some words, too."""
        return _read(_SWITCH, self.get(path), default)

    def is_set(self, path: str) -> bool:
        """Whether the value at ``path`` counts as true where DeepSpeed has no model: all but 0, ``""`` and the like."""
        return bool(self.get(path))

    def whole(self, path: str) -> int:
        """The value at ``path``, read as an int. 0 if it is none."""
        return _read(_NUMBER, self.get(path), 0)

    @property
    def block(self) -> dict[str, Any] | None:
        """The ``"vpipe"`` block, or None if there is none.

        Raises:
            VPipeConfigError: the block is not an object, or its key is spelled otherwise (``"vPipe"``), which DeepSpeed
                would ignore in silence.
        """
        for key, value in self.content.items():
            if isinstance(key, str) and key != BLOCK and key.lower().replace("-", "").replace("_", "") == BLOCK:
                why = f'unknown key, did you mean "{BLOCK}"?'
                raise Refusal(key, value, f'the block under the key "{BLOCK}"', "rename the key", why).error()
        return checked_block(self.content[BLOCK]) if BLOCK in self.content else None

    def of_every_rank(self) -> dict[str, Any]:
        """Values by path that have to be the same on every rank, if all are to train one model. Not paths of files."""
        found: dict[str, Any] = {}
        left: list[tuple[str, Any]] = [(key, value) for key, value in self.content.items() if key in _TRAINS]
        for path, value in left:  # which grows by what is in an object
            if isinstance(value, Mapping):
                left += [(f"{path}.{key}", item) for key, item in value.items()]
            elif not (path.startswith(_OF_ONE_RANK) or (isinstance(value, str) and value.endswith(".json"))):
                found[path] = value
        return found

    @property
    def dtype(self) -> str:
        """Type of the weights that are trained: ``bfloat16``, ``float16`` or ``float32``."""
        if self.on("fp16.enabled"):
            return "float16"
        key = "bfloat16" if self.get("bf16") is None else "bf16"  # the old name counts only without the new one
        return "bfloat16" if self.on(f"{key}.enabled") else "float32"

    @property
    def adds_bf16_in_fp32(self) -> bool:
        """Whether gradients of bf16 weights are to be added in fp32."""
        return self.dtype == "bfloat16" and self.get("data_types.grad_accum_dtype") in ("fp32", "float32")

    @property
    def zero_stage(self) -> int | None:
        """ZeRO stage, or None if it is not a number. A bare boolean is the deprecated form."""
        zero, stage = self.get("zero_optimization"), self.get("zero_optimization.stage")
        if isinstance(zero, bool):
            return int(zero)
        return 0 if stage in (None, "auto") else _read(_NUMBER, stage, None)

    @property
    def optimizer_offload(self) -> str | None:
        """Key by which ZeRO offloads the optimizer, or None. The deprecated one is a flag."""
        path, flag = "zero_optimization.offload_optimizer.device", "zero_optimization.cpu_offload"
        if self.get(path) not in (None, "none", "auto"):
            return path
        return flag if self.on(flag) else None

    @property
    def reduce_bucket(self) -> int:
        """Elements in a buffer of ZeRO's reduction."""
        return self.whole("zero_optimization.reduce_bucket_size") or _BUCKET

    @property
    def optimizer(self) -> str | None:
        """Type of the optimizer, or None if the script brings one."""
        name = self.get("optimizer.type")
        return None if name is None else str(name)

    @property
    def optimizer_params(self) -> Mapping[str, Any]:
        """Parameters of the optimizer."""
        params = self.get("optimizer.params")
        return params if isinstance(params, Mapping) else {}

    def next_to(self, optimizer: Any) -> DeepSpeedJson:
        """The JSON without its optimizer, if the script brings an ``optimizer``, which DeepSpeed takes first."""
        others = {key: value for key, value in self.content.items() if key != "optimizer"}
        return self if optimizer is None else DeepSpeedJson(others)

    @property
    def clipping(self) -> Any:
        """Largest norm of gradients, 0 for no limit. DeepSpeed's default for pipelines is 1.0."""
        given = self.get("gradient_clipping")
        return 1.0 if given is None else given

    @property
    def stages(self) -> int | None:
        """Stages of a plain module, ``"pipeline": {"stages": K}``. None if others say it, as with ``"auto"``.

        Raises:
            VPipeConfigError: it is no number.
        """
        given = self.get("pipeline.stages")
        if given is None or given == "auto":
            return None
        if type(given) is not int or given < 1:
            raise Refusal("pipeline.stages", given, "an int >= 1", STAGES_REMEDY).error()
        return given

    @property
    def replicas(self) -> int:
        """Data-parallel replicas that three batch sizes say; 1 where one is missing."""
        sizes = [self.get(key) for key in (TOTAL, *_PARTS)]
        if not all(type(value) is int and value > 0 for value in sizes):
            return 1
        return max(1, sizes[0] // prod(sizes[1:]))

    def micro_batches(self, replicas: int) -> int:
        """Micro-batches per batch, M, which two of the three batch sizes say.

        Raises:
            VPipeConfigError: no key says it, or not with a number.
        """
        total, micro, given = (self.get(key) for key in (TOTAL, MICRO, STEPS))
        if given is None and type(total) is int and type(micro) is int and micro > 0:
            return max(1, total // (micro * replicas))
        if given is None and (type(total) is int or type(micro) is int):
            return 1
        if type(given) is not int or given < 1:
            remedy = f"write it, or {TOTAL} and {MICRO}; to a command give --micro-batches M"
            raise Refusal(STEPS, given, "a whole number >= 1 in the JSON", remedy).error()
        return given

    def corrected(self, ranks: int, num_stages: int) -> tuple[DeepSpeedJson, str]:
        """The same with the total for ``ranks / num_stages`` replicas where it is exactly that for ``ranks``.

        Returns:
            The JSON, and one line about the change, empty if there is none.
        """
        total, parts = self.get(TOTAL), [self.get(key) for key in _PARTS]
        numbers = [value for value in parts if type(value) is int]
        if num_stages == 1 or len(numbers) < len(parts) or total != prod(numbers) * ranks:
            return self, ""
        right = total // num_stages
        return DeepSpeedJson({**self.content, TOTAL: right}), (
            f"{TOTAL}: got {total} for {counted(ranks, 'replica')}, but {ranks} ranks in {num_stages} stages are "
            f"{ranks // num_stages}; an update is of {right} samples; for {total} write {STEPS} "
            f"{numbers[1] * num_stages}"
        )

    def refuse_batch_sizes(self, ranks: int, num_stages: int) -> None:
        """Refuse batch sizes that contradict each other on ``ranks / num_stages`` replicas."""
        total = self.get(TOTAL)
        given = {key: self.get(key) for key in _PARTS if self.get(key) is not None}
        if not given or not all(type(value) is int and value > 0 for value in (total, *given.values())):
            return  # nothing to compare, or for DeepSpeed to refuse
        replicas = ranks // num_stages
        unit = prod(given.values()) * replicas
        if total == unit or (len(given) < len(_PARTS) and total % unit == 0):
            return
        factors = " x ".join([*(f"{key} {value}" for key, value in given.items()), counted(replicas, "replica")])
        all_given = len(given) == len(_PARTS)
        allowed = f"{'' if all_given else 'a multiple of '}{unit}, which is {factors}"
        reason = f"{counted(ranks, 'rank')} in {counted(num_stages, 'stage')} are {counted(replicas, 'replica')}"
        remedy = f"write {unit}, or remove the key" if all_given else f"change it, or {next(iter(given))}"
        raise Refusal(TOTAL, total, allowed, remedy, reason).error()


def parse_deepspeed_json(text: str) -> object:
    """The content of a DeepSpeed JSON, which may have comments: DeepSpeed reads Hjson.

    Raises:
        ValueError: it is neither, or is empty, or has a key twice.
    """
    if not text.strip():
        raise ValueError("it is empty")  # to Hjson an object without keys
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        if len(text) > _LONGEST:
            raise
        import hjson  # for few texts only

        try:
            return parse_json(text, hjson.loads)
        except hjson.HjsonDecodeError as other:
            raise ValueError(f"{error}; nor is it Hjson, which may have comments: {other}") from None


def load_deepspeed_json(given: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a file, or of text in base64, as DeepSpeed takes either.

    Raises:
        VPipeConfigError: it cannot be read or holds no object.
    """
    if isinstance(given, str) and not os.path.exists(given):
        text, why = "", "it holds no object"
        try:
            text = base64.urlsafe_b64decode(given).decode()
            if isinstance(found := parse_deepspeed_json(text), dict):
                return found
        except ValueError as error:
            why = f"it is not JSON: {error}"
        if text.lstrip().startswith(("{", "[")):  # no path
            raise Refusal("config in base64", text, "a JSON object", "correct it", why).error()
    if not isinstance(given, (str, os.PathLike)):
        remedy = "pass its content, or its path"
        raise Refusal("config", type(given).__name__, "a dict, or the path of a DeepSpeed JSON", remedy).error()
    allowed, remedy = "a file with a JSON object", "correct the path or the file"
    return read_json(given, "DeepSpeed JSON", allowed, remedy, parse_deepspeed_json)


def checked_block(block: object) -> dict[str, Any]:
    """The value of the ``"vpipe"`` key, which has to be an object."""
    if not isinstance(block, dict):
        remedy = f'write "{BLOCK}": {{}} for the defaults, or remove the key for the stock engine'
        raise Refusal(BLOCK, block, "an object of settings", remedy).error()
    return block


def _read(kind: TypeAdapter[T], value: object, default: D) -> T | D:
    try:
        return kind.validate_python(value)
    except ValidationError:
        return default
