"""BERT with its decoder tied to the word embeddings, against Hugging Face's model and against the replay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases
import pytest
import reference
import torch
from test_bert_layers import BATCH, LENGTH, SLOTS, small_config
from test_exactness import OPTIMIZERS, adamw, difference
from torch import Tensor, nn
from worlds import Worlds

from ds_vpipe.checkpoints.pipeline_checkpoint import PipelineCheckpoint, checkpoint_folder
from ds_vpipe.export import full_state_dict
from ds_vpipe.models.bert.layers import WORDS, bert_layers
from ds_vpipe.models.bert.loss import PretrainingLoss
from ds_vpipe.partition import uniform_partition
from ds_vpipe.schedules.one_f_one_b import default_depths


def specs(layers: int = 2) -> list[Any]:
    config = small_config(layers=layers)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    assert config.tie_word_embeddings
    return bert_layers(config)


def built() -> list[nn.Module]:
    modules = [spec.build() for spec in specs()]
    modules[-1].load_state_dict({WORDS: modules[0].get_parameter(WORDS)}, strict=False)
    return modules


def micro_batch(index: int, replica: int = 0) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1000 + index)

    def random(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    model_inputs = (random(80, BATCH, LENGTH), random(2, BATCH, LENGTH), mask, random(LENGTH, BATCH, SLOTS))
    return model_inputs, (random(80, BATCH, SLOTS), random(2, BATCH))


def data(index: int = 0) -> Iterator[Any]:
    while True:
        yield micro_batch(index)
        index += 1


def train(stages: int, micro_batches: int, folder: str = "", save: str = "") -> tuple[dict[str, Tensor], list[float]]:
    """Ten batches; with a folder the last five of them, from a checkpoint or up to one."""
    import ds_vpipe

    ds_config = cases.config(micro_batches, OPTIMIZERS["AdamW"][0], {"partition": "uniform"})
    ds_config["train_micro_batch_size_per_gpu"] = BATCH
    module = ds_vpipe.VPipeModule(specs(), num_stages=stages, loss_fn=PretrainingLoss(), partition_method="uniform")
    engine = ds_vpipe.initialize(model=module, config=ds_config)[0]
    if folder:
        engine.load_checkpoint(folder)
    iterator = data(engine.consumed_micro_batches if folder else 0)
    losses = [float(engine.train_batch(iterator)) for _ in range(5 if folder or save else 10)]
    if save:
        engine.save_checkpoint(save)
    return cases.parameters(engine), losses


@pytest.mark.mp
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_asynchronous_training_against_the_replay(worlds: Worlds, micro_batches: int) -> None:
    layers = built()
    last = len(layers) - 1
    wanted = reference.Replay(
        uniform_partition(len(layers), 2), default_depths(2), micro_batches, adamw,
        layers=layers, criterion=PretrainingLoss(), micro_batch=micro_batch,
        ties=[((0, WORDS), (last, WORDS))],
    ).run(10)  # fmt: skip
    found: dict[str, Tensor] = {}
    for rank, position in zip(worlds.run(2, train, 2, micro_batches), (0, last), strict=True):
        found |= {name.replace("other.tied_modules.words", str(position)): value for name, value in rank[0].items()}
    assert difference(found, wanted.parameters()) <= 1e-5


@pytest.mark.mp
def test_one_stage_has_both_ends_and_its_checkpoints_fit_two(worlds: Worlds, tmp_path: Path) -> None:
    """A stage with both ends has one weight; five batches on K stages and five on others, synchronous where K = 1."""
    layers, last = built(), 4
    wanted = reference.Replay(
        [last + 1], [0], 1, adamw, layers=layers, criterion=PretrainingLoss(), micro_batch=micro_batch,
        ties=[((0, WORDS), (last, WORDS))],
    ).run(10)  # fmt: skip
    ((whole, losses),) = worlds.run(1, train, 1, 1)
    found = {name.replace("other.tied_modules.words", "0"): value for name, value in whole.items()}
    own = {name: value for name, value in wanted.parameters().items() if name != f"{last}.{WORDS}"}
    assert difference(found, own) <= 1e-5

    ((_, begun),) = worlds.run(1, train, 1, 1, "", str(tmp_path / "one"))
    assert begun == losses[:5]
    two = worlds.run(2, train, 2, 1, str(tmp_path / "one"), str(tmp_path / "two"))
    assert two[0][1][0] == pytest.approx(losses[5], abs=1e-5)
    ((_, back),) = worlds.run(1, train, 1, 1, str(tmp_path / "two"))
    assert back[0] < two[0][1][0] + 0.5
    for name in ("one", "two"):
        state = full_state_dict(PipelineCheckpoint(checkpoint_folder(tmp_path / name, None)), by_layer=True)
        assert torch.equal(state[f"0.{WORDS}"], state[f"{last}.{WORDS}"])
        assert {key.partition(".")[0] for key in state} == {"0", "1", "2", "3", "4"}
