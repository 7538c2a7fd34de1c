"""Every shipped DeepSpeed configuration: strict JSON, the published split, and a split that fits its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.config.unsupported import refuse_unsupported
from ds_vpipe.lr_policies import lr_policy
from ds_vpipe.models.bert.layers import bert_layers
from ds_vpipe.models.bert.model import bert_config

FOLDER = Path(__file__).parents[2] / "ds_configs"
# file: model, partition, recompute ratio, sync mode
PUBLISHED: dict[str, tuple[str, list[int], list[float], str]] = {
    "gpt2_tiny_cpu": ("plain", [2, 1, 1, 2], [0, 0, 0, 0], "asp"),
    "bert_finetune_cpu": ("plain", [3, 3], [0, 0], "asp"),
    "bert_tiny_cpu": ("tiny", [2, 2, 2, 3], [0, 0, 0, 0], "asp"),
    "bert_large_gpipe_2stages": ("large", [26, 23], [1, 1], "bsp"),
    "bert_large_gpipe_4stages": ("large", [13, 13, 13, 10], [1, 1, 1, 1], "bsp"),
    "bert_large_pipedream_4stages": ("large", [13, 13, 13, 10], [0, 0, 0, 0], "asp"),
    "bert_large_unbalanced_4stages": ("large", [20, 11, 10, 8], [0, 0, 0, 0], "asp"),  # of docs/tuning.md
    "bert_large_vpipe_4stages": ("large", [12, 13, 13, 11], [0.3, 0, 0, 0], "asp"),
    "bert_large_48l_gpipe_8stages": ("large-48l", [12, 12, 13, 13, 13, 13, 12, 9], [1] * 8, "bsp"),
    "bert_large_48l_pipedream_8stages": ("large-48l", [11, 12, 13, 13, 13, 13, 12, 10], [0] * 8, "asp"),
    "bert_large_48l_vpipe_8stages": (
        "large-48l",
        [11, 11, 12, 12, 13, 13, 14, 11],
        [1, 0.85, 0.8, 0.6, 0.5, 0.2, 0, 0],
        "asp",
    ),
}


def load(name: str) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs)
        return dict(pairs)

    return dict(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"), object_pairs_hook=no_duplicates))


def num_layers(model: str) -> int:
    return 6 if model == "plain" else len(bert_layers(bert_config(model)))  # embeddings, four blocks, head


def test_every_file_is_known_here() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_split_is_the_published_one_and_fits_the_model(name: str) -> None:
    model, partition, ratio, sync_mode = PUBLISHED[name]
    content = load(name)
    config = VPipeConfig.parse(DeepSpeedJson(content).block)
    assert config.sync_mode == sync_mode
    config.check_sizes(len(partition), num_layers(model))
    pipeline = config.pipeline(len(partition), 1)
    assert pipeline.partition == tuple(partition)
    assert pipeline.recompute_ratio == tuple(ratio)
    refuse_unsupported(DeepSpeedJson(content), config, len(partition))


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "large" in name])
def test_learning_rates_are_vpipes(name: str) -> None:
    """A fifth of 36320 updates is warm-up."""
    policy = lr_policy(load(name))
    assert policy is not None
    assert policy.name == "PolyWarmupLR"
    assert [policy.factor(update) for update in (726, 7264, 36320)] == pytest.approx([726 / 7264, 0.8**0.5, 0.0])


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "large" not in name])
def test_warm_up_ends_at_the_learning_rate_of_the_optimizer(name: str) -> None:
    content = load(name)
    assert content["scheduler"]["params"]["warmup_max_lr"] == content["optimizer"]["params"]["lr"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_synchronous_variants_amortise_the_bubble_over_micro_batches(name: str) -> None:
    content = load(name)
    assert (content["gradient_accumulation_steps"] > 1) == (content["vpipe"]["sync_mode"] == "bsp")
