"""A script of the shape of transformers' run_glue_no_trainer.py, with a small model and made-up data."""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--output_dir")
parser.add_argument("--samples", type=int, default=20)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--averages", action="store_true", help="the optimizer writes weights for an evaluation")
args = parser.parse_args()

Accelerator(gradient_accumulation_steps=2).print("one accelerator after another has the same configuration")
accelerator = Accelerator(gradient_accumulation_steps=2)
set_seed(0)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
)  # fmt: skip
ids = torch.randint(0, 30, (args.samples, 8))
data = TensorDataset(ids, (ids < 15).sum(1).gt(4).long())
train_loader = DataLoader(data, batch_size=4, shuffle=True)
eval_loader = DataLoader(TensorDataset(*data[: args.samples // 2 + 1]), batch_size=4)
decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=1e-3
)
if args.averages:
    optimizer.eval = torch.no_grad()(lambda: [p.mul_(1.0) for group in optimizer.param_groups for p in group["params"]])
epochs, updates = 2, -(-len(train_loader) // 2)
scheduler = get_scheduler(
    "linear", optimizer, num_warmup_steps=0, num_training_steps=epochs * updates * accelerator.num_processes
)
model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, eval_loader, scheduler
)
updated = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), lambda number: number)
updated = accelerator.prepare_scheduler(updated)
output = Path(args.output_dir)
if args.resume:
    accelerator.load_state(str(output / "state"))
rates, losses, found = [], [], []
for epoch in range(int(args.resume), epochs):
    model.train()
    for batch, labels in train_loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=labels).loss
            losses.append(accelerator.gather(loss.detach()).mean().item())
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            updated.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            rates += [scheduler.get_last_lr()[0], updated.get_last_lr()[0]]
    model.eval()
    optimizer.eval()
    guesses, wanted, right = [], [], []
    for batch, labels in eval_loader:
        with torch.no_grad():
            logits = model(input_ids=batch).logits
        hits = logits.argmax(-1).eq(labels).sum()
        right += [accelerator.gather(hits).sum().item(), accelerator.reduce(hits).item(), accelerator.num_processes]
        right.append(accelerator.reduce({"hits": hits / len(labels)}, "mean")["hits"].item())
        guesses += accelerator.gather_for_metrics(logits.argmax(-1)).tolist()
        wanted += accelerator.gather_for_metrics({"labels": labels})["labels"].tolist()
    with accelerator.split_between_processes(list(range(5))) as part:
        right.append(part)
    found.append([guesses, wanted, right, accelerator.gather_for_metrics([f"{accelerator.process_index}"], True)])
    if epoch == 0:
        accelerator.save_state(str(output / "state"))
accelerator.wait_for_everyone()
assert isinstance(accelerator.unwrap_model(model), BertForSequenceClassification)
accelerator.unwrap_model(model).save_pretrained(
    args.output_dir, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
)
report = {"rates": rates, "losses": losses, "found": found}
(output / f"report-{accelerator.process_index}.json").write_text(json.dumps(report), encoding="utf-8")
