"""Memory, links and optimizer that a plan counts with.

Mixed-precision wrappers and ZeRO-1 add fp32 master weights; ZeRO-1 divides those and the optimizer's state by the
number of replicas. Counts are those of DeepSpeed 0.19 and torch 2: Adam and LAMB keep two fp32 values per weight, SGD
with momentum and Lion one, plain SGD none (Rajbhandari et al., ZeRO, SC 2020, section 3, has the same sums).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.errors import Refusal
from ds_vpipe.planning.pace import FREE_LINK, LinkCost
from ds_vpipe.schedules.counts import StageLoad, stage_loads
from ds_vpipe.schedules.pipeline import Pipeline

_MASTER = 4  # bytes of an fp32 master weight
_NORMED = 8  # bytes of a number of a gradient whose norm an offloaded optimizer takes, in fp64
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Values that an optimizer keeps per weight, and those that it needs for a moment per weight of the parameter that it
# is updating, as it does on the CPU: a root and what is divided by it. Fused ones are one kernel, in place.
_VALUES = {
    "sgd": (0, 0),
    "musgd": (0, 2),
    "lion": (1, 0),
    "fusedlion": (1, 0),
    "adam": (2, 0),
    "adamw": (2, 0),
    "fusedadam": (2, 0),
    "fusedlamb": (2, 0),
    "muon": (2, 2),  # one for matrices, two for the rest, which Adam trains
    # Two, and two n x n and m x m matrices per n x m matrix: that of a transformer whose MLP is four times as wide.
    "soap": (9, 4),
    "adagrad": (1, 2),
    "rmsprop": (1, 2),
    "asgd": (1, 2),
    "rprop": (2, 3),
}
_OTHERS = (2, 2)  # LAMB, Adadelta, Adamax, NAdam, RAdam, torch's own Adam, and whatever is not known
_WITH_MOMENTUM = ("sgd", "musgd", "rmsprop")
_OF_TORCH = ("sgd", "adagrad", "adadelta", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop")
_FUSED = ("adam", "adamw", "fusedadam")  # those whose wrapper in half precision has all weights in one vector


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes that training needs besides the weights and as many of gradients."""

    held: Fraction = Fraction(0)  # master weights and state per byte of trained weights; they stay
    update: Fraction = Fraction(1)  # gradients during the update, copies and temporaries, per byte of trained weights
    bucket_bytes: int = 0  # a reduction's buffer, from a batch's first backward pass on; the reduction has a second
    reduced: Fraction = Fraction(0)  # gradients that stay after a reduction, in memory of their own, likewise
    # Gradients added up in another type, or copies of gradients and weights on their way to and from an offloaded
    # optimizer, per byte of trained weights; they stay.
    sums: Fraction = Fraction(0)
    # What exists only during an update, per byte of the largest trained parameter, where they are updated one by one.
    temporary: Fraction = Fraction(0)
    norm: Fraction = Fraction(0)  # the copy of a gradient for the norm of those reduced, likewise
    buffers: Fraction = Fraction(0)  # what stays, per byte of the largest trained parameter


NO_OPTIMIZER = OptimizerBytes()  # gradients only, as for SGD without momentum in fp32


def optimizer_bytes(ds_config: DeepSpeedJson, replicas: int = 1, on_host: bool = True) -> OptimizerBytes:
    """Bytes that the optimizer of a DeepSpeed JSON needs; one that it does not name counts as Adam.

    Adam is DeepSpeed's fused one unless its parameters have ``torch_adam``. ZeRO-1 has buckets, but for bf16 with
    gradients that are added in fp32, of which DeepSpeed's optimizer has a vector on every replica. An offloaded
    optimizer needs host memory, which is counted if that is what the weights are in: ``on_host``.

    Raises:
        VPipeConfigError: the ZeRO stage is not a number.
    """
    zero_stage = ds_config.zero_stage
    if zero_stage is None or not 0 <= zero_stage <= 3:
        wrong = ds_config.get("zero_optimization.stage")
        raise Refusal("zero_optimization.stage", wrong, "0 or 1", "correct the JSON").error()
    size, kind = _DTYPE_BYTES[ds_config.dtype], (ds_config.optimizer or "adam").lower()
    given = {key for key, value in ds_config.optimizer_params.items() if value}
    values, temporary = _VALUES.get(kind, _OTHERS)
    values += len(given & {"amsgrad", "centered", *(["momentum"] if kind in _WITH_MOMENTUM else [])})
    if kind == "sgd":
        temporary = len(given & {"weight_decay", "nesterov"})
    elif "torch_adam" in given:
        temporary = max(temporary, _OTHERS[1])
    at_once, foreach = 0, ds_config.optimizer_params.get("foreach")
    if (kind in _OF_TORCH or "torch_adam" in given) and (not on_host if foreach is None else foreach):
        # On a GPU they update all parameters at once, Adam with one value for each.
        at_once, temporary = 1 if "torch_adam" in given else temporary, 0
    if zero_stage == 0 and size >= _MASTER:
        return OptimizerBytes(Fraction(values), Fraction(1 + at_once), temporary=Fraction(temporary))
    share = replicas if zero_stage else 1
    held = Fraction(_MASTER, size * share) * (1 + values)
    if ds_config.adds_bf16_in_fp32 and zero_stage == 1:
        # The partition's gradients are a part of that vector; to gather the weights takes them once more.
        update = 1 + max(Fraction(1), Fraction(_MASTER * (at_once + temporary), size * share))
        return OptimizerBytes(held=held, update=update, sums=Fraction(_MASTER, size))
    bucket_bytes = ds_config.reduce_bucket * size if zero_stage else 0
    if zero_stage and ds_config.optimizer_offload is not None:
        largest = Fraction(_NORMED, size)  # gradient by gradient, each through a buffer on either side
        if not on_host:
            return OptimizerBytes(bucket_bytes=bucket_bytes, temporary=largest, buffers=Fraction(1))
        update, sums = 1 + Fraction(_MASTER * temporary, size * share), Fraction(_MASTER + size, size * share)
        return OptimizerBytes(held, update, bucket_bytes, sums=sums, temporary=largest, buffers=Fraction(2))
    in_fp32 = Fraction(_MASTER, size * share)
    if zero_stage:
        # Once reduced, only the partition's gradients are left, and no bucket. They are put in one vector, which is
        # copied to fp32 before any of them goes. The optimizer then needs its temporaries for all of it at once.
        copies = Fraction(2, share) + (in_fp32 if size < _MASTER else 0)
        update = max(copies, in_fp32 * (1 + at_once + temporary))
        norm = Fraction(_NORMED, size)
        return OptimizerBytes(held, update, bucket_bytes, reduced=Fraction(1, share), norm=norm)
    if kind in _FUSED and "torch_adam" not in given:  # each gradient is copied to fp32, then all to one vector
        return OptimizerBytes(held, 1 + 2 * in_fp32)
    return OptimizerBytes(held, 1 + in_fp32 * (1 + at_once), temporary=in_fp32 * temporary)


@dataclass(frozen=True)
class Devices:
    """Devices that a plan is for."""

    budget: int | tuple[int, ...] | None = None  # bytes of each, one number or one for each rank; None for no limit
    optimizer: OptimizerBytes = NO_OPTIMIZER  # bytes that training needs per byte of weights
    link: LinkCost = FREE_LINK  # between two stages
    host_transfers: bool = False  # messages are kept in the memory that is planned, as on the CPU
    packed_on_device: bool = False  # messages leave from the device's memory
    # One direction between device and host, in bytes per second; None: unknown, swaps count no time and are not chosen.
    host_bandwidth: float | None = None
    slowness: tuple[float, ...] = ()  # seconds of a pass on each rank, the fastest one's as 1; none: all are alike
    reduction_s: float = 0.0  # seconds of a batch's reduction over replicas, per byte of trained weights

    def slowness_of(self, rank: int) -> float:
        """Factor of the seconds of passes on ``rank``."""
        return self.slowness[rank] if self.slowness else 1.0

    @classmethod
    def of(
        cls,
        config: VPipeConfig,
        json: DeepSpeedJson,
        *,
        replicas: int = 1,
        device_bytes: int | None = None,
        host_transfers: bool = False,
        latency_s: float = 0.0,
        reduce_bandwidth: float | None = None,
    ) -> Devices:
        """Devices as the JSON that training reads, with its ``"vpipe"`` block, describes them.

        ``device_bytes`` is the budget if the block has none. Transfers take no time but ``latency_s`` unless it has a
        ``link_bandwidth``. ZeRO-1 divides among ``replicas``, data-parallel ranks per stage, whose reductions take no
        time unless there is a ``reduce_bandwidth``: with one as long as in a ring (Patarasuk and Yuan, JPDC 2009).
        """
        return cls(
            budget=device_bytes if config.memory_budget is None else config.memory_budget,
            optimizer=optimizer_bytes(json, replicas, on_host=host_transfers),
            link=LinkCost(latency_s, config.link_bandwidth or FREE_LINK.bytes_per_s),
            host_transfers=host_transfers,
            packed_on_device=config.link in ("ipc", "nccl") and not host_transfers,
            host_bandwidth=config.host_bandwidth,
            reduction_s=2 * (replicas - 1) / (replicas * reduce_bandwidth) if reduce_bandwidth else 0.0,
        )

    def budgets(self, pipeline: Pipeline) -> list[int | None]:
        """Bytes for each virtual stage: the device's, shared evenly by those that it holds.

        Raises:
            VPipeConfigError: there is not one budget per rank, or one is not above 0.
        """
        if self.budget is None:
            return [None] * pipeline.num_parts
        ranks = pipeline.num_stages
        given = (self.budget,) * ranks if isinstance(self.budget, int) else self.budget
        if len(given) != ranks or min(given) <= 0:
            allowed = f"bytes > 0, one number or one for each of {ranks} ranks"
            raise Refusal("memory budget", self.budget, allowed, "correct the numbers").error()
        return [given[pipeline.rank_of(part)] // pipeline.virtual_stages for part in range(pipeline.num_parts)]

    def loads(self, pipeline: Pipeline) -> tuple[StageLoad, ...]:
        """Most that each virtual stage holds."""
        return stage_loads(pipeline, self.host_transfers, self.packed_on_device)
