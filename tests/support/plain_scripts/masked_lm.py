"""Masked LM with Hugging Face's BERT, as users write it: dict batches, one loop. Nothing here knows of pipelines."""

import argparse

import deepspeed
import torch
from transformers import BertConfig, BertForMaskedLM

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--output")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

torch.manual_seed(0)
config = BertConfig(
    vocab_size=97,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForMaskedLM(config)
model.train()
engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())

generator = torch.Generator().manual_seed(1)
while engine.global_steps < 20:
    ids = torch.randint(5, 97, (4, 16), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, ids, -100)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    batch = {name: value.to(engine.device) for name, value in batch.items()}
    outputs = engine(**batch)
    engine.backward(outputs.loss)
    engine.step()
    if engine.is_gradient_accumulation_boundary() and engine.global_steps % 5 == 0:
        print(f"step {engine.global_steps}: loss {outputs.loss.item():.4f}", flush=True)
engine.save_checkpoint(args.output, client_state={"seen": "all"})
model.save_pretrained(f"{args.output}/model")
print(f"trained {engine.global_steps} steps", flush=True)
