"""A partition kept in a JSON file of its own, ``{"partition": [...], "recompute_ratio": [...], "swap_ratio": [...]}``.

Planners write such files and several configs can share one. Ratios are optional in it.
"""

import json
from typing import Any

from typing_extensions import TypeIs

from ds_vpipe.errors import Refusal, did_you_mean, read_json

_KEYS = ("partition", "recompute_ratio", "swap_ratio")
_CONTENT = 'a JSON file {"partition": [counts], "recompute_ratio": [ratios], "swap_ratio": [ratios]}'


def is_partition_file(partition: object) -> TypeIs[str]:
    """Whether ``partition`` is a file's path, not counts or a method."""
    return isinstance(partition, str) and partition.endswith(".json") and not partition.startswith("type:")


def merge_partition_file(block: dict[Any, Any]) -> tuple[dict[Any, Any], dict[str, str]]:
    """Replace the path in ``block["partition"]``, relative to the current directory, by what the file says.

    Returns:
        The new block, and for each key taken from the file the path of the file. Values are not checked.

    Raises:
        VPipeConfigError: The file cannot be read, its keys are wrong, or it and ``block`` give different ratios.
    """
    path: str = block["partition"]
    content = read_json(path, "vpipe.partition", _CONTENT, "correct the path or the file")
    for key in (*content, "partition"):
        if key not in _KEYS or key not in content:
            unknown = f"unknown key {json.dumps(key)}{did_you_mean(key, _KEYS)}"
            reason = 'the file has no key "partition"' if key in _KEYS else unknown
            raise Refusal("vpipe.partition", path, _CONTENT, "correct the keys in the file", reason).error()
    if not isinstance(content["partition"], list):
        name, allowed = f"vpipe.partition (file {path}, key partition)", "a list of layer counts > 0"
        raise Refusal(name, content["partition"], allowed, "write the counts in the file").error()
    merged = {**block, **content, **{key: block[key] for key in _KEYS[1:] if key in block}}
    for name in _KEYS[1:]:
        in_block, in_file = merged.get(name), content.get(name)
        if name in content and not _same(in_block, in_file):
            reason = f"file {path} has {json.dumps(in_file)} under the same key"
            allowed = "the ratios in one of the two places, or the same in both"
            raise Refusal(f"vpipe.{name}", in_block, allowed, "remove one of them", reason).error()
    return merged, {key: path for key in content if key == "partition" or key not in block}


def _same(one: object, other: object) -> bool:
    """Equality of two ratios. A number stands for itself at every stage."""
    if isinstance(one, list) and not isinstance(other, list):
        return all(item == other for item in one)
    if isinstance(other, list) and not isinstance(one, list):
        return _same(other, one)
    return one == other
