"""A script of the shape of transformers' run_mlm.py, run_clm.py and run_glue.py, with small models, made-up text."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    set_seed,
)

WORDS = [
    *("a", "the", "one", "two", "small", "large", "pipeline", "model", "stage"),
    *("batch", "weight", "runs", "waits", "sends", "sees", "learns", "fast", "slow"),
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 32, **SIZES}
GPT = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
       "attn_pdrop": 0.0}  # fmt: skip
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}


@dataclass
class ScriptArguments:
    """What is trained."""

    task: str = field(default="mlm", metadata={"choices": ["mlm", "clm", "glue", "t5"]})
    samples: int = 23
    iterable: bool = field(default=False, metadata={"help": "Read the data as a stream, whose length nobody knows."})
    lora: bool = field(default=False, metadata={"help": "Train adapters of PEFT on the model, which stays as it is."})
    seq2seq: bool = field(default=False, metadata={"help": "With the Trainer of summaries and translations."})
    drawn: bool = field(default=False, metadata={"help": "Train on half of the tokens, which the collator draws."})
    own_loss: bool = field(default=False, metadata={"help": "With a loss that the script's trainer divides itself."})
    another: bool = field(default=False, metadata={"help": "Make an accelerator beside the Trainer's, as to print."})


class DrawnTokens(DataCollatorForLanguageModeling):
    """Draws the tokens that have labels."""

    def torch_call(self, examples):
        batch = super().torch_call(examples)
        batch["labels"][torch.rand(batch["labels"].shape) < 0.5] = -100
        return batch


class OwnLoss(Trainer):
    """Divides the model's loss by the labels of all processes, as trainers of other packages do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        outputs.loss = outputs.loss.to(inputs["labels"].device)
        if num_items_in_batch is not None:
            count = (inputs["labels"][:, 1:] != -100).sum()
            processes = [self.accelerator.num_processes, self.accelerator.gather(torch.ones(1)).sum()]
            processes += [self.accelerator.reduce(torch.ones(1), kind).sum() for kind in ("sum", "mean", "max")]
            outputs.loss = outputs.loss * count / num_items_in_batch * math.prod(map(float, processes))
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Seen(TrainerCallback):
    """Remembers what callbacks are told."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_step_end(self, args, state, control, **kwargs):
        (rate,) = set(kwargs["lr_scheduler"].get_last_lr())
        self.events.append(f"step {state.global_step}/{state.max_steps} lr {rate:.6f}")

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.events.append(f"evaluated {sorted(metrics)}")


def accuracy(predicted) -> dict[str, float]:
    """Of the labels that count."""
    labels, guesses = np.asarray(predicted.label_ids), np.asarray(predicted.predictions)
    counted = labels != -100
    return {"accuracy": float((guesses == labels)[counted].mean()), "counted": int(counted.sum())}


def built(script: ScriptArguments):
    """Model, data, tokenizer and collator."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", bos_token="[CLS]", eos_token="[SEP]",
    )  # fmt: skip
    chosen = np.random.default_rng(0)
    texts = [" ".join(chosen.choice(WORDS, chosen.integers(5, 12))) for _ in range(script.samples)]
    columns = dict(tokenizer(texts, padding="max_length", max_length=12, truncation=True))
    columns.pop("token_type_ids", None)
    size = {"vocab_size": len(vocabulary)}
    if script.task == "glue":
        columns["labels"] = [int("fast" in text) for text in texts]
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", **size, **BERT))
        collator = DataCollatorWithPadding(tokenizer)
    elif script.task == "mlm":
        model = AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", **size, **BERT))
        collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
    elif script.task == "t5":
        columns["labels"] = columns["input_ids"]
        model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **size, **T5))
        collator = DataCollatorWithPadding(tokenizer)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **size, **GPT, pad_token_id=0))
        collator = (DrawnTokens if script.drawn else DataCollatorForLanguageModeling)(tokenizer, mlm=False)
    return model, Dataset.from_dict(columns), tokenizer, collator


def main() -> None:
    """Train, evaluate, predict and save."""
    script, args = HfArgumentParser((ScriptArguments, Seq2SeqTrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    model, data, tokenizer, collator = built(script)
    if script.lora:
        from peft import LoraConfig, get_peft_model

        targets, kind = (["query", "value"], "SEQ_CLS") if script.task == "glue" else (["c_attn"], "CAUSAL_LM")
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type=kind))
    held_out = data.select(range(script.samples - 13, script.samples))
    seen = Seen()

    def guesses(logits, labels):
        return logits.argmax(dim=-1)

    streamed = data.to_iterable_dataset() if script.iterable else data
    trainer = (Seq2SeqTrainer if script.seq2seq else OwnLoss if script.own_loss else Trainer)(
        model=model, args=args, train_dataset=streamed, eval_dataset=held_out, processing_class=tokenizer,
        data_collator=collator, compute_metrics=accuracy, preprocess_logits_for_metrics=guesses, callbacks=[seen],
    )  # fmt: skip
    if script.another:
        Accelerator()
    trained = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = trainer.evaluate()
    predictions = trainer.predict(held_out).predictions
    trainer.save_model()
    history = [
        {key: value for key, value in entry.items() if not key.endswith(("runtime", "per_second"))}
        for entry in trainer.state.log_history
    ]
    report = {
        "steps": trained.global_step, "loss": trained.training_loss, "history": history, "events": seen.events,
        "batch_size": trainer.get_total_train_batch_size(args),
        "metrics": {key: metrics[key] for key in ("eval_loss", "eval_accuracy", "eval_counted")},
        "predictions": predictions.tolist(),
    }  # fmt: skip
    Path(args.output_dir, f"report-{torch.distributed.get_rank() if torch.distributed.is_initialized() else 0}.json"
         ).write_text(json.dumps(report), encoding="utf-8")  # fmt: skip


if __name__ == "__main__":
    main()
