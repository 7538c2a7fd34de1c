"""A training loop with the habits of Megatron-DeepSpeed's: its calls of the engine, and a model in tensor slices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cases
import torch
import toy
from torch import distributed, nn

VOCABULARY, HIDDEN, HEADS, SEQUENCE, SAMPLES = 12, 8, 2, 5, 2
SEEDS = (0, 1, 2, 3, 4, 5, 1)  # of the layers; the last one is the embedding once more


class CopyIn(torch.autograd.Function):
    """The same value on all ranks of a slice group, whose gradients are summed."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return summed(gradient, ctx.group), None


class SumOut(torch.autograd.Function):
    """The sum of what the ranks of a slice group have."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        return summed(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class JoinOut(torch.autograd.Function):
    """What the ranks of a slice group have, side by side."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        if group is None:
            return value.view_as(value)
        parts = [torch.empty_like(value) for _ in range(slices(group))]
        distributed.all_gather(parts, value.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.group is None:
            return gradient, None
        return gradient.chunk(slices(ctx.group), dim=-1)[distributed.get_rank(ctx.group)], None


def slices(group: Any) -> int:
    return 1 if group is None else distributed.get_world_size(group)


def summed(value: torch.Tensor, group: Any) -> torch.Tensor:
    value = value.clone(memory_format=torch.contiguous_format)
    if group is not None:
        distributed.all_reduce(value, group=group)
    return value


def sliced(seed: int, rows: int, columns: int, dim: int, group: Any) -> nn.Parameter:
    """This rank's slice of a matrix; ``dim`` is the one that is cut."""
    whole = toy.seeded(seed, lambda: torch.randn(rows, columns) / columns**0.5)
    part = whole if group is None else whole.chunk(slices(group), dim)[distributed.get_rank(group)]  # type: ignore[index]
    found = nn.Parameter(part.clone())
    found.partition_dim = dim  # type: ignore[attr-defined]
    return found


def as_it_is(inputs: Any) -> Any:
    """A layer that is a function."""
    return inputs


class Words(nn.Module):
    """Word embeddings, sliced by word, and positions, which only the first stage uses."""

    def __init__(self, seed: int, group: Any) -> None:
        super().__init__()
        self.group = group
        self.table = sliced(seed, VOCABULARY, HIDDEN, 0, group)
        self.scale = nn.Parameter(toy.seeded(seed + 50, lambda: torch.rand(HIDDEN) + 0.5))  # type: ignore[arg-type]
        self.positions = nn.Parameter(toy.seeded(seed + 60, lambda: torch.randn(SEQUENCE, HIDDEN)))  # type: ignore[arg-type]

    @property
    def word_embeddings_weight(self) -> torch.Tensor:
        return self.table

    def forward(self, inputs: Any) -> Any:
        tokens, positions, mask = inputs
        first = 0 if self.group is None else distributed.get_rank(self.group) * len(self.table)
        here = (tokens >= first) & (tokens < first + len(self.table))
        found = nn.functional.embedding((tokens - first) * here, self.table) * here[..., None]
        return SumOut.apply(found, self.group) * self.scale + self.positions[positions], mask


def logits(words: Words, hidden: torch.Tensor) -> torch.Tensor:
    hidden = CopyIn.apply(hidden * words.scale, words.group)
    return JoinOut.apply(hidden @ words.word_embeddings_weight.T, words.group)


class Attend(nn.Module):
    """Attention with heads in slices, below a mask that travels with the activation."""

    def __init__(self, seed: int, group: Any) -> None:
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(HIDDEN)
        for at, name in enumerate(("query", "key", "value")):
            setattr(self, name, sliced(100 * seed + at, HIDDEN, HIDDEN, 0, group))
        self.out = sliced(100 * seed + 9, HIDDEN, HIDDEN, 1, group)
        self.bias = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, inputs: Any) -> Any:
        hidden, mask = inputs
        assert mask.dtype is torch.bool
        value = CopyIn.apply(self.norm(hidden), self.group)
        query, key, value = (
            (value @ weight.T).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for weight in (self.query, self.key, self.value)
        )
        scores = (query @ key.transpose(-1, -2)).masked_fill(mask, -1e4).softmax(-1)
        found = (scores @ value).transpose(1, 2).flatten(2)
        return hidden + SumOut.apply(found @ self.out.T, self.group) + self.bias, mask


class Last(nn.Module):
    def __init__(self, seed: int, group: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, inputs: Any) -> torch.Tensor:
        return self.norm(inputs[0])


class Criterion:
    """Its method is the loss function."""

    def mean(self, output: torch.Tensor, labels: Any) -> torch.Tensor:
        wanted, weights = labels
        found = nn.functional.cross_entropy(output.float().flatten(0, 1), wanted.flatten(), reduction="none")
        return (found * weights.flatten()).sum() / weights.sum()


def specs(group: Any, tied: str | list[str]) -> list[Any]:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    blocks = [LayerSpec(Attend, seed, group) for seed in SEEDS[2:5]]
    first = TiedLayerSpec("embed", Words, SEEDS[1], group, tied_weight_attr=tied)
    last = TiedLayerSpec("embed", Words, SEEDS[6], group, forward_fn=logits, tied_weight_attr=tied)
    return [as_it_is, first, *blocks, LayerSpec(Last, SEEDS[5], group), last]


def sample(index: int) -> dict[str, torch.Tensor]:
    """A micro-batch as the script's loader gives it."""
    generator = torch.Generator().manual_seed(index)
    text = torch.randint(VOCABULARY, (SAMPLES, SEQUENCE + 1), generator=generator)
    return {"text": text, "weights": torch.randint(1, 3, (SAMPLES, SEQUENCE), generator=generator)}


def micro_batch(item: dict[str, torch.Tensor]) -> Any:
    """Inputs and labels; both are tuples, and a mask of bools is among them."""
    tokens, wanted = item["text"][:, :-1].contiguous(), item["text"][:, 1:].contiguous()
    mask = torch.ones(SAMPLES, 1, SEQUENCE, SEQUENCE).tril() < 0.5
    positions = torch.arange(SEQUENCE).expand(SAMPLES, -1).contiguous()
    return (tokens, positions, mask), (wanted, item["weights"].float())


def loader(consumed: int, start: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """The script's own: begins where the samples end that a checkpoint has consumed."""
    index = start + consumed // SAMPLES
    while True:
        yield sample(index)
        index += 1


class Rates:
    """A schedule that counts samples: its ``step()`` needs to know how many."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.samples = optimizer, 0
        self.step(0)

    def step(self, increment: int) -> None:
        self.samples += increment
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.samples)

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]


def rate(samples: int) -> float:
    return 2e-2 / (1 + samples / 40)


def groups_of(parameters: Any) -> list[dict[str, Any]]:
    """Matrices decay and vectors do not."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def train(
    block: dict[str, Any] | None,
    sizes: list[int],
    tied: str | list[str] = "word_embeddings_weight",
    folder: str | None = None,
    *,
    save_at: int = -1,
    resume: bool = False,
    own_loader: bool = True,
) -> dict[str, Any]:
    """One rank of 2 stages x 2 tensor slices; ``sizes`` are the micro-batches of each batch."""
    import deepspeed
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    import ds_vpipe

    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    found = [distributed.new_group(ranks) for ranks in topology.get_axis_comm_lists("model")]
    group = next(one for one in found if distributed.get_rank(one) >= 0)
    net = deepspeed.pipe.PipelineModule(
        specs(group, tied), topology=topology, loss_fn=Criterion().mean, partition_method="uniform"
    )
    optimizer = torch.optim.AdamW(groups_of(net.parameters()))
    ds_config = cases.config(sizes[0], {}, block, train_micro_batch_size_per_gpu=SAMPLES)
    del ds_config["optimizer"]
    engine, _, _, rates = ds_vpipe.initialize(
        model=net, optimizer=optimizer, lr_scheduler=Rates(optimizer), mpu=None, config=ds_config
    )
    grid = engine.grid
    root = min(grid.slice_group)

    def batch_fn(item: Any) -> Any:
        item = sample(0) if item is None else item  # of the same form
        for value in item.values():
            distributed.broadcast(value, root, group=group)
        return micro_batch(item)

    engine.set_batch_fn(batch_fn)
    reads = grid.get_slice_parallel_rank() == 0
    state = {"iteration": 0, "consumed": 0}
    if resume:
        _, state = engine.load_checkpoint(folder, load_module_strict=True, load_optimizer_states=True)
    data = loader(state["consumed"]) if reads else None
    if not own_loader and reads:
        engine.set_dataloader([sample(index) for index in range(sum(sizes))])
        data = None
    report: dict[str, Any] = {"losses": [], "evals": [], "rates": []}
    engine.train()
    for iteration in range(state["iteration"], len(sizes)):
        engine.set_train_batch_size(sizes[iteration] * SAMPLES)
        engine.reset_activation_shape()
        report["losses"].append(float(engine.train_batch(data_iter=data)))
        assert engine.was_step_applied()
        assert engine.get_additional_losses() is None
        report["rates"].append(optimizer.param_groups[0]["lr"])
        state = {"iteration": iteration + 1, "consumed": state["consumed"] + sizes[iteration] * SAMPLES}
        if iteration % 3 == 2:
            report["evals"].append(evaluate(engine, reads))
        if iteration + 1 == save_at:
            engine.save_checkpoint(folder, client_state=state)
    if block is not None:
        engine.quiesce()
    report["rank"] = (grid.get_pipe_parallel_rank(), grid.get_slice_parallel_rank(), grid.get_data_parallel_rank())
    report["parameters"] = {
        name: (getattr(value, "partition_dim", None), value.detach().clone())
        for name, value in engine.module.named_parameters()
    }
    assert rates.samples == state["consumed"]
    cases.end(engine)
    return report


def evaluate(engine: Any, reads: bool) -> list[Any]:
    """The mean on all ranks, then what each micro-batch has on the last stage."""
    engine.eval()
    engine.reset_activation_shape()
    data = loader(0, start=1000) if reads else None
    with torch.no_grad():
        mean = engine.eval_batch(data, compute_loss=True, reduce_output="avg", bcast_loss=True, num_micro_batches=2)
        each = engine.eval_batch(data, compute_loss=True, reduce_output=None, bcast_loss=False, num_micro_batches=2)
    engine.train()
    return [float(mean), [float(one) for one in each] if engine.is_last_stage() else None]


def whole(reports: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Parameters of the model that was not sliced, by stage and name; slices of what is not cut are equal."""
    found: dict[str, torch.Tensor] = {}
    for stage in sorted({report["rank"][0] for report in reports}):
        mine = sorted((r for r in reports if r["rank"][0] == stage), key=lambda report: report["rank"][1])
        for name, (dim, value) in mine[0]["parameters"].items():
            parts = [report["parameters"][name][1] for report in mine]
            assert dim is not None or all(torch.equal(part, value) for part in parts), name
            found[f"{stage}.{name}"] = value if dim is None else torch.cat(parts, dim)
    return found
