"""What each key of the ``"vpipe"`` block accepts, in words, and how a wrong value is refused.

The model in :mod:`ds_vpipe.config` decides; this module speaks. Each key is described once, and every message
about it is made from that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from pydantic_core import ErrorDetails

from ds_vpipe.errors import Refusal, did_you_mean
from ds_vpipe.staleness.settings import HELP as STALENESS_HELP

# Key -> (what it accepts, what to do about a value that it does not accept).
HELP: dict[str, tuple[str, str]] = {
    "": ("an object of settings", 'write "vpipe": {} for the defaults, or remove the key for the stock engine'),
    "sync_mode": ('"asp" or "bsp"', 'write "asp" to never drain the pipeline, "bsp" to drain it every batch'),
    "schedule": (
        '"1f1b", or "gpipe" or "interleaved" with sync_mode "bsp"',
        'write "1f1b", "gpipe" for all forward passes before all backward passes, or "interleaved" with virtual_stages',
    ),
    "virtual_stages": (
        'an int >= 2 with schedule "interleaved", else 1',
        "give the number of parts of the model on each stage, such as 2",
    ),
    "weight_sync": (
        '"stash", "vertical" or "none", with sync_mode "asp" only',
        'write "stash" or remove the key',
    ),
    "partition": (
        'a list of layer counts > 0, one per stage, "uniform", "parameters", "type:REGEX", "profile", the path of a '
        ".json file, or null for the module's own",
        'give one count per stage, such as [12, 13, 13, 11], or "parameters" to balance by size',
    ),
    "recompute_ratio": (
        'a number in [0, 1], a list of one such number per stage or per part, or "auto"',
        "give the fraction of a stage's layers to recompute, such as 0.5, or 0 for none",
    ),
    "stage_to_depth_map": (
        '"default", "auto", or a list of one int >= 0 per stage that never rises and ends in 0, '
        'with sync_mode "asp" only',
        'write "default" (K-1, ..., 1, 0) or a list such as [3, 2, 1, 0]',
    ),
    "profile": (
        'the path of a profile of the model\'s layers, for "profile" and "auto"',
        'make one with "python -m ds_vpipe profile"',
    ),
    "memory_budget": (
        "an int > 0, or a list of one per stage, in bytes per device",
        "give bytes such as 16000000000, or remove the key for the memory of the GPU",
    ),
    "link_bandwidth": (
        "a number > 0, bytes per second between two stages",
        "give what one direction of a link carries, such as 10000000000",
    ),
    "gradient_clipping_scope": (
        '"stage", or "delayed_global" with sync_mode "asp"',
        'write "stage" to clip by the norm of each stage, or "delayed_global" to clip by that of all as far as known',
    ),
    **STALENESS_HELP,
    "peer_timeout_s": ("a number of seconds > 0", "give the longest wait for another stage, such as 300"),
    "timeline": ('an object {"enabled": true, "path": "..."}', "remove the key"),
    "timeline.enabled": ("true or false", "write true to record what every rank does"),
    "timeline.path": ("a path, as a string", 'give the name of a folder, or remove the key for "timeline"'),
}

# The same for one entry of a list.
_ENTRY_HELP: dict[str, tuple[str, str]] = {
    "memory_budget": ("an int > 0", "give bytes per device"),
    "partition": ("an int > 0", "give the number of layers of the stage"),
    "recompute_ratio": ("a number in [0, 1]", "give the fraction of the stage's layers to recompute, such as 0.5"),
    "stage_to_depth_map": (
        "an int >= 0, not above the one before, and 0 at the last stage",
        'correct the list, as in [3, 2, 1, 0], or write "default"',
    ),
}


def refusal_of(detail: ErrorDetails, known: Mapping[str, tuple[str, ...]], origin: Mapping[str, str]) -> Refusal:
    """Word one pydantic error.

    Args:
        detail: The error, whose context may come from a validator of :mod:`ds_vpipe.config`.
        known: The keys of each object; the block itself is ``""``.
        origin: The file that a key was read from, for keys that were.
    """
    context = detail.get("ctx", {})
    key = context.get("key") or ".".join(str(part) for part in detail["loc"])
    if detail["type"] in ("extra_forbidden", "invalid_key"):
        *parent, word = detail["loc"]
        keys = known[".".join(str(part) for part in parent)]
        hint = did_you_mean(word, keys)
        return Refusal(f"vpipe.{key}", detail["input"], ", ".join(keys), "rename or remove it", f"unknown key{hint}")

    value = context.get("value", detail["input"])
    allowed, remedy = (_ENTRY_HELP if context.get("path") else HELP)[key]
    reason = context.get("reason", "")
    name = f"vpipe.{key}{context.get('path', '')}"
    if isinstance(value, float) and not math.isfinite(value):
        reason = "it is not a finite number"
    elif not reason and isinstance(value, str):
        reason = did_you_mean(value, re.findall(r'"(\w+)"', allowed)).lstrip(", ")
    if key in origin:
        name = f"{name} (file {origin[key]}, key {key}{context.get('path', '')})"
    return Refusal(name, value, allowed, context.get("remedy") or remedy, reason)
