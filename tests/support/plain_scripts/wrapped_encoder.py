"""An encoder with a head and a loss of the script's own, and two groups of parameters in an optimizer object."""

import argparse

import deepspeed
import torch
from torch import nn
from transformers import RobertaConfig, RobertaModel


class MaskedLanguageModel(nn.Module):
    """Predicts tokens; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        config = RobertaConfig(
            vocab_size=97,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=40,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.encoder = RobertaModel(config, add_pooling_layer=False)
        self.head = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 97))

    def forward(self, src_tokens: torch.Tensor, attention_mask: torch.Tensor, tgt_tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(input_ids=src_tokens, attention_mask=attention_mask).last_hidden_state
        chosen = tgt_tokens != -100
        return nn.functional.cross_entropy(self.head(hidden[chosen]), tgt_tokens[chosen])


parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--output")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

torch.manual_seed(0)
model = MaskedLanguageModel()
decayed = [p for name, p in model.named_parameters() if "bias" not in name and "LayerNorm" not in name]
others = [p for name, p in model.named_parameters() if "bias" in name or "LayerNorm" in name]
optimizer = torch.optim.SGD([{"params": decayed, "weight_decay": 0.01}, {"params": others}], lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
engine, _, _, _ = deepspeed.initialize(args=args, model=model, optimizer=optimizer, lr_scheduler=scheduler)

generator = torch.Generator().manual_seed(1)
for step in range(40):
    tokens = torch.randint(5, 97, (4, 16), generator=generator)
    targets = torch.where(torch.rand(tokens.shape, generator=generator) < 0.3, tokens, -100)
    loss = engine(tokens, torch.ones_like(tokens), targets)
    engine.backward(loss)
    engine.step()
    if step % 10 == 9:
        print(f"step {step}: loss {loss:.4f}, learning rate {engine.get_lr()[0]:.4f}", flush=True)
engine.save_checkpoint(args.output)
state = engine.module.state_dict()
if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
    torch.save(state, f"{args.output}/model.pt")
print(f"trained {engine.global_steps} steps", flush=True)
