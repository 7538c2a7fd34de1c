"""A script with TRL's trainers for supervised fine-tuning and for preferences, with a small model and made-up text."""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from trainer_script import WORDS, ScriptArguments, built
from transformers import HfArgumentParser, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


@dataclass
class Chosen:
    """What is trained."""

    trainer: str = field(default="sft", metadata={"choices": ["sft", "dpo"]})
    samples: int = 23


def main() -> None:
    """Train, evaluate and save."""
    chosen = HfArgumentParser(Chosen).parse_args_into_dataclasses(return_remaining_strings=True)[0]
    config = DPOConfig if chosen.trainer == "dpo" else SFTConfig
    chosen, args = HfArgumentParser((Chosen, config)).parse_args_into_dataclasses()
    set_seed(args.seed)
    model, _, tokenizer, _ = built(ScriptArguments(task="clm"))
    drawn = np.random.default_rng(1)
    columns = {"sft": ["prompt", "completion"], "dpo": ["prompt", "chosen", "rejected"]}[chosen.trainer]
    data = Dataset.from_dict(
        {name: [" ".join(drawn.choice(WORDS, drawn.integers(3, 9))) for _ in range(chosen.samples)] for name in columns}
    )
    given = {"train_dataset": data, "eval_dataset": data.select(range(11)), "processing_class": tokenizer, "args": args}
    if chosen.trainer == "dpo":
        trainer = DPOTrainer(model=model, ref_model=copy.deepcopy(model), **given)
    else:
        trainer = SFTTrainer(model=model, **given)
    trainer.train()
    trainer.save_model()
    trainer.evaluate()
    history = [
        {key: value for key, value in entry.items() if not key.endswith(("runtime", "per_second", "flos"))}
        for entry in trainer.state.log_history
    ]
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    Path(args.output_dir, f"report-{rank}.json").write_text(json.dumps({"history": history}), encoding="utf-8")


if __name__ == "__main__":
    main()
