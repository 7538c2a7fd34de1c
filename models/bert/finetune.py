"""Fine-tune a classifier: which package is a line of documentation from?

A plain Hugging Face model in DeepSpeed's loop; each stage reads its own part of the weights. From the repository root::

    deepspeed --num_accelerators 2 --module ds_vpipe.run models/bert/finetune.py --deepspeed_config \
        ds_configs/bert_finetune_cpu.json --model_name_or_path DIR
"""

import argparse
import random
import re
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import deepspeed
import torch
from datasets import Dataset
from deepspeed.utils import RepeatingLoader
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from ds_vpipe.models.hugging_face import from_pretrained

PACKAGES = ("deepspeed", "numpy", "torch", "transformers")
FILES, LINES = 300, 2000  # of each package, at most
HELD_OUT = 400  # lines for validation


def parse_arguments() -> argparse.Namespace:
    """The command line, with the names of Hugging Face's ``run_glue.py``."""
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser(description="Fine-tune a classifier."))
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    parser.add_argument("--model_name_or_path", type=Path, required=True, help="folder with weights and tokenizer")
    parser.add_argument("--max_seq_length", type=int, default=32, help="tokens per line")
    parser.add_argument("--max_steps", type=int, default=300, help="optimizer updates")
    parser.add_argument("--output_dir", default="runs/finetuned", help="folder for the trained model")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def documentation(package: str) -> list[str]:
    """Lines from the docstrings of an installed package."""
    spec = find_spec(package)
    files = sorted(Path(spec.origin).parent.rglob("*.py")) if spec and spec.origin else []
    lines: dict[str, None] = {}
    for path in random.Random(0).sample(files, min(FILES, len(files))):
        for text in re.findall(r'"""(.*?)"""', path.read_text(encoding="utf-8"), re.DOTALL):
            lines |= dict.fromkeys(line.strip() for line in text.splitlines() if len(line.split()) > 4)
    return list(lines)[:LINES]


def samples(seed: int) -> list[tuple[str, int]]:
    """Lines of all packages with the package's number, shuffled."""
    found = [(line, label) for label, package in enumerate(PACKAGES) for line in documentation(package)]
    random.Random(seed).shuffle(found)
    return found


def tokenised(lines: list[tuple[str, int]], tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
    """Tokens, padding mask and label of each line."""
    texts, labels = zip(*lines, strict=True)
    tokens = tokenizer(list(texts), padding="max_length", truncation=True, max_length=length)
    columns = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    return Dataset.from_dict({**columns, "labels": labels}).with_format("torch")


def main() -> None:
    """Train, validate and save."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    lines = samples(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    make = AutoModelForSequenceClassification.from_config
    model = from_pretrained(args.model_name_or_path, make, num_labels=len(PACKAGES))
    parts = (lines[HELD_OUT:], lines[:HELD_OUT])
    training, held_out = (tokenised(part, tokenizer, args.max_seq_length) for part in parts)
    model.train()
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=training
    )
    for batch in islice(RepeatingLoader(loader), args.max_steps * engine.gradient_accumulation_steps()):
        loss = engine(**{name: value.to(engine.device) for name, value in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0 and engine.is_gradient_accumulation_boundary() and engine.global_steps % 50 == 0:
            print(f"after {engine.global_steps} updates: loss {loss.item():.4f}", flush=True)

    engine.eval()
    hits = 0
    with torch.no_grad():
        for batch in DataLoader(held_out, engine.train_micro_batch_size_per_gpu()):
            output = engine(**{name: value.to(engine.device) for name, value in batch.items()})
            hits += int((output.logits.argmax(-1).cpu() == batch["labels"]).sum())
    model.config.id2label = dict(enumerate(PACKAGES))
    model.config.label2id = {package: label for label, package in enumerate(PACKAGES)}
    model.save_pretrained(args.output_dir)  # on every rank: each has a part
    if engine.global_rank == 0:
        tokenizer.save_pretrained(args.output_dir)
        print(f"accuracy: {hits / len(held_out):.4f} of {len(held_out)} lines of {len(PACKAGES)} packages", flush=True)


if __name__ == "__main__":
    main()
