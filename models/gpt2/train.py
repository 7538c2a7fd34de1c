"""Train a GPT-2 or its adapters on text: Hugging Face's model in DeepSpeed's loop. Nothing here knows of pipelines.

From the repository root, on four pipeline stages, without a GPU or any data of your own::

    deepspeed --num_accelerators 4 --module ds_vpipe.run models/gpt2/train.py --deepspeed_config \
        ds_configs/gpt2_tiny_cpu.json
"""

import argparse
import pydoc_data.topics
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import RepeatingLoader
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

HELD_OUT = 20  # the last 20th of the text, or a block, is for validation
VALIDATION_BATCHES = 16
END_OF_TEXT = "<|endoftext|>"


def parse_arguments() -> argparse.Namespace:
    """The command line, with the names of Hugging Face's ``run_clm.py``."""
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser(description="Train a GPT-2."))
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    parser.add_argument("--model_name_or_path", help="folder with weights and tokenizer; default: a new model")
    parser.add_argument("--train_file", nargs="+", type=Path, help="UTF-8; default: the manual of Python's language")
    parser.add_argument("--block_size", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--max_steps", type=int, default=300, help="optimizer updates")
    parser.add_argument("--config_overrides", default="", help="of a new model, such as n_layer=2,n_embd=32")
    parser.add_argument("--lora_rank", type=int, default=0, help="train adapters of this rank on a frozen model")
    parser.add_argument("--output_dir", default="runs/gpt2", help="folder for the trained model, or its adapters")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def new_config(block_size: int, overrides: str) -> GPT2Config:
    """A small GPT-2. No dropout, because it is trained for minutes and cannot overfit."""
    config = GPT2Config(
        vocab_size=2048, n_positions=max(256, block_size), n_embd=128, n_layer=4, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    if overrides:
        config.update_from_string(overrides)
    return config


def main() -> None:
    """Train, validate and save."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    texts = [path.read_text(encoding="utf-8") for path in args.train_file or ()]
    texts = texts or list(pydoc_data.topics.topics.values())
    model: Any  # PEFT's wraps the other
    if args.model_name_or_path is None:
        config = new_config(args.block_size, args.config_overrides)
        tokenizer = GPT2Tokenizer().train_new_from_iterator(texts, config.vocab_size, show_progress=False)
        model = GPT2LMHeadModel(config)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
        model = GPT2LMHeadModel.from_pretrained(args.model_name_or_path)
    if args.lora_rank:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=args.lora_rank, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
    encoded = tokenizer([text + END_OF_TEXT for text in texts]).input_ids
    tokens = torch.tensor([token for ids in encoded for token in ids])
    blocks = tokens[: len(tokens) // args.block_size * args.block_size].view(-1, args.block_size)
    if len(blocks) < 2:
        raise SystemExit(f"--train_file: got {len(tokens)} tokens, allowed are 2 blocks or more; lower --block_size")
    cut = len(blocks) - max(1, len(blocks) // HELD_OUT)

    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=trained, training_data=TensorDataset(blocks[:cut])
    )
    batches = iter(RepeatingLoader(loader))
    while engine.global_steps < args.max_steps:
        ids = next(batches)[0].to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0 and engine.is_gradient_accumulation_boundary() and engine.global_steps % 50 == 0:
            print(f"after {engine.global_steps} updates: loss {loss.item():.4f} nats", flush=True)

    engine.eval()
    total, count = 0.0, 0
    held_out = DataLoader(TensorDataset(blocks[cut:]), engine.train_micro_batch_size_per_gpu())
    with torch.no_grad():
        for (ids,), _ in zip(held_out, range(VALIDATION_BATCHES), strict=False):
            ids = ids.to(engine.device)
            total += engine(input_ids=ids, labels=ids).loss.item() * len(ids)
            count += len(ids)
    model.save_pretrained(args.output_dir)  # on every rank: each has a part
    if engine.global_rank == 0:
        tokenizer.save_pretrained(args.output_dir)
        print(f"after {engine.global_steps} updates: validation loss {total / count:.4f} nats", flush=True)


if __name__ == "__main__":
    main()
