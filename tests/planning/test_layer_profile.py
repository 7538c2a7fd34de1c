"""Profiles as data: JSON, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.planning.layer_profile import LayerProfile, ModelProfile

LAYERS = tuple(LayerProfile(f"layer{i}", 0.1 * i, 0.25, 40 + i, 30, 20, 10, 5, 3, 40) for i in range(5))
MODEL = ModelProfile(LAYERS, 64, 4, "cpu", "float32", "measured")


def test_json_round_trip(tmp_path: Path) -> None:
    MODEL.save(tmp_path / "profile.json")
    assert ModelProfile.load(tmp_path / "profile.json") == MODEL
    assert len(MODEL) == 5


def test_short_json(tmp_path: Path) -> None:
    layer = {"name": "a", "forward_s": 1, "backward_s": 2, "parameter_bytes": 3, "activation_bytes": 4}
    content: Any = {"input_bytes": 8, "micro_batch_size": 1, "device": "cpu", "dtype": "float32", "source": "analytic"}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**content, "layers": [{**layer, "boundary_bytes": 5}]}))
    model = ModelProfile.load(path)
    assert model.layers == (LayerProfile("a", 1, 2, 3, 4, 5),)


def content(**changes: Any) -> dict[str, Any]:
    return {**asdict(MODEL), **changes}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "content: Invalid JSON"),
        ("[1]", "content: Input should be an object, got [1]; allowed: a profile"),
        (json.dumps(content(layers=[])), "layers: Tuple should have at least 1 item"),
        (json.dumps(content(layers={})), "layers: Input should be a valid array, got {}"),
        (json.dumps(content(source="guess")), "source: Input should be 'measured' or 'analytic', got \"guess\""),
        (json.dumps(content(layer=1)), "layer: Unexpected keyword argument, got 1"),
        (json.dumps(content(layers=[{"name": "a"}])), "layers.0.forward_s: Field required"),
        (
            json.dumps(content(micro_batch_size=0)),
            "micro_batch_size: Input should be greater than or equal to 1, got",
        ),
        (
            json.dumps(content(layers=[{**asdict(MODEL)["layers"][0], "forward_s": -1}])),
            "layers.0.forward_s: Input should be greater than or equal to 0, got -1",
        ),
        (
            json.dumps(content(layers=[{**asdict(MODEL)["layers"][0], "frozen_bytes": 41}])),
            "layers.0: Value error, frozen_bytes 41 is more than parameter_bytes, 40",
        ),
        (
            json.dumps(content(layers=[{**asdict(MODEL)["layers"][0], "boundary_bytes": 1.5}])),
            "layers.0.boundary_bytes: Input should be a valid integer, got 1.5",
        ),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(VPipeConfigError) as error:
        ModelProfile.load(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(VPipeConfigError, match="the file cannot be read: No such file"):
        ModelProfile.load(tmp_path / "none.json")
