"""A small GPT with dropout on data that a DistributedSampler deals out, and its accuracy on held-out data."""

import argparse
import json

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.feed_forward = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return hidden + self.dropout(self.feed_forward(hidden))


class GPT(nn.Module):
    """Returns the loss and the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(31, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(16, 31)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.words(ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--output")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
deepspeed.init_distributed()

torch.manual_seed(0)
model = GPT()
ids = torch.randint(0, 31, (12, 8))
ids[:, 0] = torch.arange(12)  # number of the sample
training = TensorDataset(ids, ids.roll(1, 1))
held_out = TensorDataset(ids[:8].flip(0), ids[:8].flip(0).roll(1, 1))


def loader_of(data: Dataset, *, shuffle: bool) -> DataLoader:
    """A loader of this rank's share."""
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=shuffle))


loader = loader_of(training, shuffle=True)
engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())

seen = []
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for given, targets in loader:
        seen += given[:, 0].tolist()
        loss = engine(given, targets)[0]
        engine.backward(loss)
        engine.step()
engine.eval()
correct, losses = [], []
with torch.no_grad():
    for given, targets in loader_of(held_out, shuffle=False):
        loss, logits = engine(given, targets)
        correct += (logits.argmax(-1) == targets).sum(1).tolist()
        losses.append(loss.item())
engine.save_checkpoint(args.output)
torch.save(model.state_dict(), f"{args.output}/model.pt")
report = {"seen": seen, "correct": correct, "losses": losses, "steps": engine.global_steps}
print("report", json.dumps(report), flush=True)
