"""As DeepSpeed's BERT pre-training example is built: a data set provider, epochs, accumulation, resuming."""

import argparse
import json

import deepspeed
import torch
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from transformers import BertConfig, BertForPreTraining


class Samples(Dataset):
    """Random sentence pairs."""

    def __init__(self, epoch: int) -> None:
        generator = torch.Generator().manual_seed(epoch)
        self.ids = torch.randint(5, 97, (80, 16), generator=generator)
        chosen = torch.rand(self.ids.shape, generator=generator) < 0.3
        self.labels = torch.where(chosen, self.ids, -100)
        self.next = torch.randint(0, 2, (80,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        ids = self.ids[index]
        return ids, torch.ones_like(ids), (torch.arange(16) > 7).long(), self.labels[index], self.next[index]


class DatasetProvider:
    """Makes the loader of an epoch."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def get_shard(self, epoch: int) -> DataLoader:
        samples = Samples(epoch)
        return DataLoader(samples, batch_size=self.batch_size, sampler=SequentialSampler(samples))


class BertMultiTask:
    """Holds the network, as the example's class does."""

    def __init__(self) -> None:
        config = BertConfig(
            vocab_size=97, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            tie_word_embeddings=False,
        )  # fmt: skip
        self.network = BertForPreTraining(config)

    def prepare_optimizer_parameters(self) -> list[dict]:
        no_decay = ["bias", "LayerNorm.bias", "LayerNorm.weight"]
        named = list(self.network.named_parameters())
        return [
            {"params": [p for n, p in named if not any(part in n for part in no_decay)], "weight_decay": 0.01},
            {"params": [p for n, p in named if any(part in n for part in no_decay)], "weight_decay": 0.0},
        ]


def train(args: argparse.Namespace, model: BertMultiTask, provider: DatasetProvider, epoch: int) -> None:
    """One epoch."""
    for batch in provider.get_shard(epoch):
        ids, mask, types, labels, following = (tensor.to(args.device) for tensor in batch)
        loss = model.network(
            input_ids=ids, attention_mask=mask, token_type_ids=types, labels=labels, next_sentence_label=following
        )[0]
        model.network.backward(loss)
        if model.network.is_gradient_accumulation_boundary():
            args.global_step += 1
        model.network.step()


def main() -> None:
    """Train from the first epoch or from a checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--output")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    args.config = json.load(open(args.deepspeed_config))  # noqa: SIM115 - as the example does
    args.global_step, first = 0, 0
    torch.manual_seed(0)
    model = BertMultiTask()
    model.network.train()
    model.network, _, _, _ = deepspeed.initialize(
        args=args, model=model.network, model_parameters=model.prepare_optimizer_parameters()
    )
    args.device = model.network.device
    if args.resume:
        _, state = model.network.load_checkpoint(args.output)
        first, args.global_step = state["epoch"] + 1, state["global_step"]
    provider = DatasetProvider(args.config["train_micro_batch_size_per_gpu"])
    for epoch in range(first, args.epochs):
        train(args, model, provider, epoch)
        state = {"epoch": epoch, "global_step": args.global_step}
        model.network.save_checkpoint(args.output, tag=f"epoch{epoch}", client_state=state)
    torch.save(model.network.module.state_dict(), f"{args.output}/model.pt")  # by every rank
    print(f"trained {args.global_step} steps, {model.network.global_steps} of the engine", flush=True)


if __name__ == "__main__":
    main()
