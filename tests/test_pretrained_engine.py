"""Hugging Face weights on ranks: each reads its own, they train, and go back to Hugging Face."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases
import hugging_face as hf
import pytest
import torch
from test_exactness import OPTIMIZERS
from transformers import BertForMaskedLM
from worlds import Worlds

from ds_vpipe.models.bert.loss import PretrainingLoss
from ds_vpipe.models.export import main
from ds_vpipe.models.gpt2.loss import causal_lm_loss

pytestmark = pytest.mark.mp


def data(kind: str) -> Iterator[Any]:
    """The same micro-batch for ever: a model that learns can learn it by heart."""
    value = hf.inputs(kind)
    generator = torch.Generator().manual_seed(2)
    slots = torch.randint(hf.VOCABULARY, (3, 4), generator=generator)
    labels: Any = value if kind == "gpt2" else (slots, torch.tensor([0, 1, 0]))
    while True:
        yield value, labels


@contextlib.contextmanager
def counted_reads() -> Iterator[dict[str, int]]:
    """Bytes of every tensor that this process reads from a safetensors file, by name."""
    from ds_vpipe.models import weight_folder

    reads: dict[str, int] = {}
    real = weight_folder.safe_open

    class Counting:
        def __init__(self, file: Any, framework: str) -> None:
            self.file = real(file, framework=framework)

        def __enter__(self) -> Counting:
            self.opened = self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.opened, name)

        def get_tensor(self, name: str) -> Any:
            tensor = self.opened.get_tensor(name)
            reads[name] = reads.get(name, 0) + tensor.nbytes
            return tensor

    weight_folder.safe_open = Counting  # type: ignore[misc,assignment]
    try:
        yield reads
    finally:
        weight_folder.safe_open = real


def fine_tune(kind: str, folder: str, partition: list[int], batches: int, checkpoint: str) -> dict[str, Any]:
    import ds_vpipe
    from ds_vpipe.models.architecture import model_state
    from ds_vpipe.models.export import ARCHITECTURES
    from ds_vpipe.models.pretrained import from_pretrained

    model = from_pretrained(folder, ARCHITECTURES)
    loss = causal_lm_loss if kind == "gpt2" else PretrainingLoss()
    ds_config = cases.config(1, OPTIMIZERS["AdamW"][0], {"partition": partition})
    ds_config["train_micro_batch_size_per_gpu"] = 3
    with counted_reads() as reads:
        module = ds_vpipe.VPipeModule(model.layers, num_stages=len(partition), loss_fn=loss, partition_method=partition)
    engine = ds_vpipe.initialize(model=module, config=ds_config)[0]
    before = logits(engine, kind)
    iterator = data(kind)
    losses = [float(engine.train_batch(iterator)) for _ in range(batches)]
    engine.save_checkpoint(checkpoint, client_state=model_state(model.config))
    report = {"reads": reads, "losses": losses, "before": before, "after": logits(engine, kind)}
    engine.destroy()
    return report


def logits(engine: Any, kind: str) -> Any:
    outputs = engine.eval_batch(data(kind), return_logits=True)[1]
    return outputs if outputs is None or isinstance(outputs, tuple) else (outputs, None)


@pytest.mark.parametrize(
    ("kind", "tied", "partition", "batches"),
    [("gpt2", True, [1, 2, 1, 2], 40), ("bert", True, [3, 5], 8), ("roberta", False, [1, 4], 8)],
)
def test_ranks_read_their_own_layers_train_and_give_them_back(
    worlds: Worlds, tmp_path: Path, kind: str, tied: bool, partition: list[int], batches: int
) -> None:
    model = hf.save(kind, tied, tmp_path / "in")
    checkpoint = str(tmp_path / "checkpoint")
    ranks = worlds.run(len(partition), fine_tune, kind, str(tmp_path / "in"), partition, batches, checkpoint)

    sizes = {name: tensor.nbytes for name, tensor in model.state_dict().items()}
    names = [set(rank["reads"]) for rank in ranks]
    shared = {theirs for theirs in hf.MODELS[kind][0].tied.values() if tied}
    assert all((one & other) <= shared for one in names for other in names if one is not other)
    assert shared <= names[0] & names[-1]
    unread = {"lm_head.bias"} if kind == "roberta" else set()  # its decoder has one of its own
    assert set().union(*names) == set(sizes) - unread - (
        {*hf.MODELS[kind][0].tied, *hf.MODELS[kind][0].same} if tied else set()
    )
    assert all(rank["reads"][name] == sizes[name] for rank in ranks for name in rank["reads"])

    hf.assert_equal(ranks[-1]["before"], hf.wanted(kind, model))
    losses = ranks[0]["losses"]
    assert losses[-1] < losses[0] * (0.75 if batches > 10 else 0.95)

    assert main([checkpoint, str(tmp_path / "out")]) == 0
    exported = hf.MODELS[kind][0].model.from_pretrained(tmp_path / "out").eval()
    assert exported.config.tie_word_embeddings == tied
    hf.assert_equal(hf.wanted(kind, exported), ranks[-1]["after"])
    assert not torch.allclose(ranks[-1]["after"][0], ranks[-1]["before"][0], atol=1e-3)


def repartitioned(folder: str) -> Any:
    import deepspeed

    import ds_vpipe
    from ds_vpipe.models.export import ARCHITECTURES
    from ds_vpipe.models.pretrained import from_pretrained

    model = from_pretrained(folder, ARCHITECTURES)
    module = deepspeed.pipe.PipelineModule(
        model.layers, num_stages=2, loss_fn=causal_lm_loss, partition_method="uniform"
    )
    ds_config = cases.config(1, OPTIMIZERS["AdamW"][0], {"partition": [1, 5]})
    ds_config["train_micro_batch_size_per_gpu"] = 3
    engine = ds_vpipe.initialize(model=module, config=ds_config)[0]
    found = logits(engine, "gpt2"), list(module.parts)
    engine.destroy()
    return found


def test_layers_that_move_before_training_keep_their_weights(worlds: Worlds, tmp_path: Path) -> None:
    model = hf.save("gpt2", True, tmp_path)
    found, parts = worlds.run(2, repartitioned, str(tmp_path))[-1]
    assert parts == [0, 1, 6]
    hf.assert_equal(found, hf.wanted("gpt2", model))


def pretrain(arguments: list[str]) -> tuple[int, str]:
    """The exit code of BERT's training script, and what it has printed."""
    import io
    import sys

    from ds_vpipe.models.bert.training import main as script

    out, sys.stdout = sys.stdout, io.StringIO()
    try:
        return script(arguments), sys.stdout.getvalue()
    finally:
        sys.stdout = out


def test_the_training_script_begins_with_the_weights_of_a_folder(worlds: Worlds, tmp_path: Path) -> None:
    model = hf.save("bert", True, tmp_path / "bert", BertForMaskedLM)
    torch.nn.init.normal_(model.cls.predictions.bias, std=8.0)
    model.save_pretrained(tmp_path / "bert")
    hf.save("roberta", True, tmp_path / "roberta")
    ds_config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "vpipe": {"sync_mode": "asp"},
    }
    (tmp_path / "ds.json").write_text(json.dumps(ds_config))
    common = ["--deepspeed_config", str(tmp_path / "ds.json"), "--synthetic", "--max_steps", "2"]
    common += ["--output_dir", str(tmp_path / "output")]
    bert = [*common, "--max_seq_length", "12", "--model_name_or_path", str(tmp_path / "bert")]
    ranks = worlds.run(2, pretrain, bert)
    assert [code for code, _ in ranks] == [0, 0]
    said = [line for line in ranks[0][1].splitlines() if line.startswith("Model: ")]
    assert said == [
        f"Model: {tmp_path / 'bert'}: bert, 8 pipeline layers; initialised, not in the folder: bert.pooler.dense.weight"
        " and 3 more"
    ]
    assert "Model: " not in ranks[1][1]
    # The bias makes it certain of the wrong words: a new model would begin at about ln(83) + ln(2) = 5.1.
    losses = [json.loads(line) for line in (tmp_path / "output" / "metrics.jsonl").read_text().splitlines()]
    assert next(record["loss"] for record in losses if "loss" in record) > 10
    assert [code for code, _ in worlds.run(2, pretrain, [*bert, "--no-tie-word-embeddings"])] == [0, 0]
    roberta = [*common, "--model_name_or_path", str(tmp_path / "roberta"), "--max_seq_length"]
    assert [code for code, _ in worlds.run(2, pretrain, [*roberta, "12"])] == [0, 0]
    assert [code for code, _ in worlds.run(2, pretrain, [*roberta, "13"])] == [2, 2]
