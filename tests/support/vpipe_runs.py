"""Runs as vPipe's and PipeDream's users have them: folders with a YAML, a partition file and the stage maps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# variant: sync_mode, batch_size, partition, recompute_ratio
FOUR_GPUS: dict[str, tuple[str, int, list[int], list[float]]] = {
    "vpipe": ("asp", 16, [12, 13, 13, 11], [0.3, 0, 0, 0]),
    "pipedream": ("asp", 8, [13, 13, 13, 10], [0, 0, 0, 0]),
    "gpipe": ("bsp", 16, [13, 13, 13, 10], [1, 1, 1, 1]),
}
MAPS: dict[str, Any] = {
    "module_to_stage_map": [0, 1, 2, 3, 3],
    "stage_to_rank_map": {"0": [0], "1": [1], "2": [2], "3": [3]},
}


def fields(variant: str = "vpipe", **changes: Any) -> dict[str, Any]:
    """The fields of ``bert_4VARIANT.yml``, in their order; a change to None removes a field."""
    sync_mode, batch_size, _, _ = FOUR_GPUS[variant]
    shipped = {
        "directory": "bert",
        "log_directory": "output",
        "module": "vgpus=4",
        "data_dir": "data/hdf5/bookscorpus",
        "config_file": "vgpus=4/mp_conf.json",
        "partition": f"vgpus=4/{variant}.json",
        "container": "bert",
        "machines": ["localhost:0", "localhost:1", "localhost:2", "localhost:3"],
        "sync_mode": sync_mode,
        "batch_size": batch_size,
        "learning_rate": 0.05,
        "weight_decay": 0.0,
        "epochs": 40,
        "print_frequency": 100,
        "verbose_frequency": 0,
        "compress_activations": False,
        "compress_in_gpu": False,
        "learning_rate_policy": "polynomial",
        "model_type": "bert",
        "distributed_backend": "gloo",
    }
    return {key: value for key, value in {**shipped, **changes}.items() if value is not None}


def yaml_text(values: dict[str, Any]) -> str:
    """As the files are written: quoted keys, one a line, no braces, Python's words for values."""
    return "".join(f"{key!r}: {value!r}\n" for key, value in values.items())


def write_run(
    root: Path, variant: str = "vpipe", maps: dict[str, Any] | None = None, split: Any = None, **changes: Any
) -> Path:
    """Write a run into the folder where its driver would be started; returns the path of the YAML."""
    _, _, partition, ratios = FOUR_GPUS[variant]
    stages = root / "bert" / "vgpus=4"
    stages.mkdir(parents=True, exist_ok=True)
    content = {"partition": partition, "recompute_ratio": ratios} if split is None else split
    (stages / f"{variant}.json").write_text(json.dumps(content), encoding="utf-8")
    (stages / "mp_conf.json").write_text(json.dumps(MAPS if maps is None else maps), encoding="utf-8")
    (root / "configs").mkdir(exist_ok=True)
    path = root / "configs" / f"bert_4{variant}.yml"
    path.write_text(yaml_text(fields(variant, **changes)), encoding="utf-8")
    return path
