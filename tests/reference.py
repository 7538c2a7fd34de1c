"""An independent replay of the asynchronous semantics in one process: no engine, no schedule, no stashing.

Every stage keeps the full history of its weights. Micro-batch ``j`` runs through all stages at once,
stage ``s`` with the version that design rule ``max(0, j - W_s) // M`` names, and the mean gradient of
each batch updates the newest weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import toy
from torch import nn
from torch.func import functional_call


def replay(
    counts: Sequence[int],
    depths: Sequence[int],
    micro_batches: int,
    batches: int,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    vertical: bool = False,
    newest: bool = False,
    replicas: int = 1,
    clip: float = 0.0,
    order: Sequence[int] | None = None,
    refills: Sequence[int] = (0,),
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train the toy model; returns final parameters by layer number and name, and the mean loss per batch.

    Args:
        newest: break the rule on purpose: every micro-batch uses the newest weights.
        clip: largest gradient norm of each stage by itself; 0 for no clipping.
        order: position in the data of every micro-batch; default: its own number.
        refills: micro-batches that were the first after the pipeline had drained.
        dtype: of the weights in forward and backward passes and of gradients; the optimizer's are fp32.
    """
    layers = [layer.to(dtype).float() for layer in toy.built_layers()]
    stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
    optimizers = [
        make_optimizer([p for layer, s in zip(layers, stage_of, strict=True) if s == stage for p in layer.parameters()])
        for stage in range(len(counts))
    ]

    def snapshot() -> list[dict[str, torch.Tensor]]:
        return [{n: p.detach().to(dtype, copy=True) for n, p in layer.named_parameters()} for layer in layers]

    history = [snapshot()]
    criterion = nn.CrossEntropyLoss()
    losses = []
    for batch in range(batches):
        total = [0.0] * replicas
        sums: list[list[dict[str, torch.Tensor]]] = [[{} for _ in layers] for _ in range(replicas)]
        for j in range(batch * micro_batches, (batch + 1) * micro_batches):
            for replica in range(replicas):
                value, labels = toy.micro_batch(j if order is None else order[j], replica)
                leaves = []
                for position, layer in enumerate(layers):
                    depth = depths[0] if vertical else depths[stage_of[position]]
                    refill = max(r for r in refills if r <= j)
                    version = batch if newest else max(refill, j - depth) // micro_batches
                    weights = {n: w.clone().requires_grad_() for n, w in history[version][position].items()}
                    leaves.append(weights)
                    value = functional_call(layer, weights, (value,))
                loss = criterion(value, labels)
                total[replica] += float(loss.detach())
                (loss / micro_batches).backward()
                for position, weights in enumerate(leaves):
                    for name, weight in weights.items():
                        assert weight.grad is not None
                        before = sums[replica][position].get(name)
                        sums[replica][position][name] = weight.grad if before is None else before + weight.grad
        losses.append(sum(total) / replicas / micro_batches)
        for position, layer in enumerate(layers):
            for name, parameter in layer.named_parameters():
                mean = torch.stack([sums[r][position][name] for r in range(replicas)]).sum(0) / replicas
                parameter.grad = mean.float()
        for optimizer in optimizers:
            if clip:
                norm = torch.stack([p.grad.norm() for p in optimizer.param_groups[0]["params"]]).norm()
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.grad *= torch.clamp(clip / (norm + 1e-6), max=1.0)
            optimizer.step()
        history.append(snapshot())
    names = {
        f"{position}.{name}": parameter.detach().to(dtype).float()
        for position, layer in enumerate(layers)
        for name, parameter in layer.named_parameters()
    }
    return names, losses
