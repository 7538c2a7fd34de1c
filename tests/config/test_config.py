"""The ``"vpipe"`` block: what is accepted, and how everything else is refused."""

from __future__ import annotations

import base64
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from ds_vpipe.__main__ import main
from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson, load_deepspeed_json
from ds_vpipe.config.keys import all_keys
from ds_vpipe.config.unsupported import refuse_unsupported
from ds_vpipe.errors import VPipeConfigError, VPipeError, show

NAN = float("nan")
INTERLEAVED = {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2}
KEYS = "sync_mode, schedule, virtual_stages, weight_sync"
PARTITION = '"uniform", "parameters", "type:REGEX"'


def message_of(error: pytest.ExceptionInfo[VPipeConfigError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    assert "allowed: " in message
    return message


# block, key as named in the message, value as shown, part of what is allowed, other parts of the message
WRONG: list[tuple[object, str, object, str, str]] = [
    (None, "vpipe", None, "an object", "remove the key"),
    ("asp", "vpipe", "asp", "an object", "{}"),
    ([], "vpipe", [], "an object", ""),
    ({"sync_mod": "asp"}, "vpipe.sync_mod", "asp", KEYS, 'did you mean "sync_mode"?'),
    ({"recompute_ration": 0.5}, "vpipe.recompute_ration", 0.5, KEYS, 'did you mean "recompute_ratio"?'),
    ({"zzz": 1}, "vpipe.zzz", 1, KEYS, "unknown key;"),
    ({"a.b": 1}, "vpipe.a.b", 1, KEYS, "unknown key"),
    ({"line\nbreak": 1}, "vpipe.line break", 1, KEYS, "unknown key"),
    ({"sync_mode": "ASP"}, "vpipe.sync_mode", "ASP", '"asp" or "bsp"', 'did you mean "asp"?'),
    ({"sync_mode": 1}, "vpipe.sync_mode", 1, '"asp" or "bsp"', ""),
    ({"sync_mode": None}, "vpipe.sync_mode", None, '"asp" or "bsp"', ""),
    ({"schedule": "gpipe"}, "vpipe.schedule", "gpipe", '"1f1b"', 'sync_mode is "asp"'),
    ({"schedule": "interleaved"}, "vpipe.schedule", "interleaved", '"1f1b"', 'sync_mode is "asp"'),
    (
        {"sync_mode": "bsp", "schedule": "interleaved"},
        "vpipe.virtual_stages",
        1,
        "an int >= 2",
        'schedule is "interleaved"',
    ),
    ({"virtual_stages": 2}, "vpipe.virtual_stages", 2, "else 1", 'sync_mode is "asp"'),
    ({"sync_mode": "bsp", "virtual_stages": 2}, "vpipe.virtual_stages", 2, "else 1", "remove the key"),
    ({"virtual_stages": 0}, "vpipe.virtual_stages", 0, "an int >= 2", ""),
    ({"schedule": "1F1B"}, "vpipe.schedule", "1F1B", '"1f1b"', "did you mean"),
    ({"weight_sync": "vertica"}, "vpipe.weight_sync", "vertica", '"stash", "vertical" or "none"', 'mean "vertical"?'),
    ({"weight_sync": False}, "vpipe.weight_sync", False, '"stash", "vertical" or "none"', ""),
    ({"sync_mode": "bsp", "weight_sync": "stash"}, "vpipe.weight_sync", "stash", '"asp" only', 'sync_mode is "bsp"'),
    ({"partition": []}, "vpipe.partition", [], PARTITION, ""),
    ({"partition": 4}, "vpipe.partition", 4, PARTITION, ""),
    ({"partition": {"a": 1}}, "vpipe.partition", {"a": 1}, PARTITION, ""),
    ({"partition": [12, "13"]}, "vpipe.partition[1]", "13", "an int > 0", ""),
    ({"partition": [12, 0]}, "vpipe.partition[1]", 0, "an int > 0", ""),
    ({"partition": [12.0, 1]}, "vpipe.partition[0]", 12.0, "an int > 0", ""),
    ({"partition": [True, 1]}, "vpipe.partition[0]", True, "an int > 0", ""),
    ({"partition": "Uniform"}, "vpipe.partition", "Uniform", PARTITION, 'did you mean "uniform"?'),
    ({"partition": "best"}, "vpipe.partition", "best", PARTITION, ""),
    ({"partition": "profile"}, "vpipe.profile", None, "the path of a profile", "partition is 'profile'"),
    ({"partition": "type:("}, "vpipe.partition", "type:(", PARTITION, "REGEX does not compile"),
    ({"partition": "type:"}, "vpipe.partition", "type:", PARTITION, "REGEX is empty"),
    ({"recompute_ratio": 1.3}, "vpipe.recompute_ratio", 1.3, "a number in [0, 1]", ""),
    ({"recompute_ratio": [0, 1.3]}, "vpipe.recompute_ratio[1]", 1.3, "a number in [0, 1]", ""),
    ({"recompute_ratio": [0, "1"]}, "vpipe.recompute_ratio[1]", "1", "a number in [0, 1]", ""),
    ({"recompute_ratio": -0.1}, "vpipe.recompute_ratio", -0.1, "a number in [0, 1]", ""),
    ({"recompute_ratio": NAN}, "vpipe.recompute_ratio", NAN, "a number in [0, 1]", "not a finite number"),
    ({"recompute_ratio": True}, "vpipe.recompute_ratio", True, "a number in [0, 1]", ""),
    ({"recompute_ratio": []}, "vpipe.recompute_ratio", [], "a number in [0, 1]", ""),
    ({"recompute_ratio": None}, "vpipe.recompute_ratio", None, "a number in [0, 1]", ""),
    ({"swap_ratio": [0, 1.5]}, "vpipe.swap_ratio[1]", 1.5, "a number in [0, 1]", ""),
    ({"swap_ratio": -1}, "vpipe.swap_ratio", -1, "a number in [0, 1]", ""),
    ({"swap_ratio": "half"}, "vpipe.swap_ratio", "half", "a number in [0, 1]", ""),
    ({"recompute_ratio": "auto"}, "vpipe.profile", None, "the path of a profile", "recompute_ratio is 'auto'"),
    ({"memory_budget": 0}, "vpipe.memory_budget", 0, "an int > 0", "in bytes"),
    ({"memory_budget": [8, -1]}, "vpipe.memory_budget[1]", -1, "an int > 0", ""),
    ({"memory_budget": "8GB"}, "vpipe.memory_budget", "8GB", "an int > 0", ""),
    ({"stage_to_depth_map": [1, 2, 0]}, "vpipe.stage_to_depth_map[1]", 2, "not above the one before", "rises from 1"),
    ({"stage_to_depth_map": [2, 1]}, "vpipe.stage_to_depth_map[1]", 1, "0 at the last stage", "nothing to run ahead"),
    ({"stage_to_depth_map": [-1, 0]}, "vpipe.stage_to_depth_map[0]", -1, "an int >= 0", ""),
    ({"stage_to_depth_map": [1.0, 0]}, "vpipe.stage_to_depth_map[0]", 1.0, "an int >= 0", ""),
    ({"stage_to_depth_map": 3}, "vpipe.stage_to_depth_map", 3, '"default"', ""),
    ({"stage_to_depth_map": "auto"}, "vpipe.profile", None, "the path of a profile", "stage_to_depth_map is 'auto'"),
    ({"replan": {"every": 5}, "swap_ratio": [0, 0.5]}, "vpipe.replan.every", 5, "an int >= 0", "swapped layers do not"),
    ({"timeline": {"path": ""}}, "vpipe.timeline.path", "", "a path", ""),
    ({"profile": ""}, "vpipe.profile", "", "the path of a profile", ""),
    ({"replan": {"moves": "live"}}, "vpipe.replan.moves", "live", '"live" or "drain"', "replan has no every"),
    ({"replan": {"dry_run": True}}, "vpipe.replan.dry_run", True, "true or false", "replan has no every"),
    ({"replan": {"every": 5, "max_staleness": 2}}, "vpipe.replan.max_staleness", 2, "an int >= 1", "do not follow"),
    *(
        ({"recovery": {"every": 2}, **block}, "vpipe.recovery.every", 2, "an int >= 0", f"remove {key}")
        for key, block in (
            ("replan", {"replan": {"every": 5}}),
            ("record", {"record": "record"}),
            ("virtual_stages", {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2}),
            ("weight_sync", {"weight_sync": "none"}),
            ("gradient_clipping_scope", {"gradient_clipping_scope": "delayed_global"}),
        )
    ),
    ({"recovery": {"every": -1}}, "vpipe.recovery.every", -1, "an int >= 0", ""),
    (
        {"sync_mode": "bsp", "stage_to_depth_map": [1, 0]},
        "vpipe.stage_to_depth_map",
        [1, 0],
        '"asp" only',
        'sync_mode is "bsp"',
    ),
    (
        {"sync_mode": "bsp", "gradient_clipping_scope": "delayed_global"},
        "vpipe.gradient_clipping_scope",
        "delayed_global",
        'with sync_mode "asp"',
        'sync_mode is "bsp"',
    ),
    ({"gradient_clipping_scope": 1.0}, "vpipe.gradient_clipping_scope", 1.0, '"stage"', ""),
    ({"peer_timeout_s": 0}, "vpipe.peer_timeout_s", 0, "a number of seconds, 0.001 to 1e9", ""),
    ({"peer_timeout_s": "300"}, "vpipe.peer_timeout_s", "300", "a number of seconds, 0.001 to 1e9", ""),
    ({"peer_timeout_s": True}, "vpipe.peer_timeout_s", True, "a number of seconds, 0.001 to 1e9", ""),
    (
        {"peer_timeout_s": float("inf")},
        "vpipe.peer_timeout_s",
        float("inf"),
        "a number of seconds, 0.001 to 1e9",
        "not a finite",
    ),
    ({"peer_timeout_s": 1e10}, "vpipe.peer_timeout_s", 1e10, "a number of seconds, 0.001 to 1e9", ""),
    ({"peer_timeout_s": 1e-4}, "vpipe.peer_timeout_s", 1e-4, "a number of seconds, 0.001 to 1e9", ""),
    ({"partition": "type:" + "(a" * 5000}, "vpipe.partition", "type:" + "(a" * 5000, PARTITION, "does not compile"),
    ({"partition": "type:a{" + "9" * 30 + "}"}, "vpipe.partition", "type:a{" + "9" * 30 + "}", PARTITION, "compile"),
    ({"timeline": True}, "vpipe.timeline", True, "an object", ""),
    ({"timeline": {"enabled": 0}}, "vpipe.timeline.enabled", 0, "true or false", ""),
    ({"timeline": {"enable": False}}, "vpipe.timeline.enable", False, "enabled, path", 'did you mean "enabled"?'),
    ({"timeline": {"path": 3}}, "vpipe.timeline.path", 3, "a path", ""),
    ({"staleness": 3}, "vpipe.staleness", 3, "an object with nadam", ""),
    (
        {"staleness": {"nadm": True}},
        "vpipe.staleness.nadm",
        True,
        "nadam, synchronous_updates",
        'did you mean "nadam"?',
    ),
    (
        {"staleness": {"error_feedback": True}},
        "vpipe.staleness.error_feedback",
        True,
        "nadam, synchronous_updates",
        "",
    ),
    ({"staleness": {"nadam": "yes"}}, "vpipe.staleness.nadam", "yes", "true, false or an object", ""),
    ({"staleness": {"nadam": {"beta": 1}}}, "vpipe.staleness.nadam.beta", 1, "betas", 'did you mean "betas"?'),
    ({"staleness": {"nadam": {"betas": [0.9]}}}, "vpipe.staleness.nadam.betas", [0.9], "two numbers in [0, 1)", ""),
    ({"staleness": {"nadam": {"betas": [1, 0.9]}}}, "vpipe.staleness.nadam.betas", [1, 0.9], "two numbers", ""),
    (
        {"staleness": {"synchronous_updates": -1}},
        "vpipe.staleness.synchronous_updates",
        -1,
        "an int >= 0",
        "such as 1000",
    ),
    (
        {"staleness": {"delay_warmup_updates": -1}},
        "vpipe.staleness.delay_warmup_updates",
        -1,
        "an int >= 0",
        "remove the key",
    ),
    ({"staleness": {"synchronous_updates": True}}, "vpipe.staleness.synchronous_updates", True, "an int >= 0", ""),
    ({"staleness": {"synchronous_updates": 0.2}}, "vpipe.staleness.synchronous_updates", 0.2, "an int >= 0", ""),
    (
        {"staleness": {"nadam": {"momentum_decay": NAN}}},
        "vpipe.staleness.nadam.momentum_decay",
        NAN,
        "a number >= 0",
        "not a finite number",
    ),
    (
        {"sync_mode": "bsp", "staleness": {"nadam": {}}},
        "vpipe.staleness",
        {"nadam": {}},
        'with sync_mode "asp" only',
        "remove the key",
    ),
]


@pytest.mark.parametrize(("block", "key", "value", "allowed", "more"), WRONG, ids=[show(case[0]) for case in WRONG])
def test_wrong_block_is_refused_in_one_line(block: object, key: str, value: object, allowed: str, more: str) -> None:
    with pytest.raises(VPipeConfigError) as error:
        VPipeConfig.parse(block)
    message = message_of(error)
    assert message.startswith(f"{key}: got {show(value)}; ")
    assert allowed in message.partition("allowed: ")[2]
    assert more in message


ODD = [
    *(None, True, False, 0, 1, 2, -1, 10**30, 10**400, 0.0, 0.5, 1.0, -0.5, 1e308, 5e-324, NAN, float("inf")),
    *("", "auto", "profile", "uniform", "type:(", "type:a", "no.json", "a\0", "\n", "\ud800", "asp", "bsp", "true"),
    *(
        [],
        {},
        [1],
        [1, 1],
        [True, 0],
        [1.0, 0],
        [10**400, 0],
        [0.5, NAN],
        [[1]],
        {"every": True},
        {"nadam": {}},
        {"a": 1},
    ),
]
KEYS = st.sampled_from([name for name, _ in all_keys(VPipeConfig)]) | st.sampled_from(
    ["", "a.b", "\ud800", "sync-mode"]
)


@given(st.lists(st.tuples(KEYS, st.sampled_from(ODD)), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 9))
@example([("swap_ratio", "\ud800")], 2, 4)  # half a character, which JSON has and Rust has not
@example([("\ud800", 1)], 2, 4)
def test_any_block_is_read_or_refused_in_one_line(pairs: list[tuple[str, object]], stages: int, layers: int) -> None:
    block: dict[str, Any] = {}
    for name, value in pairs:
        *parents, last = name.split(".")
        inner = block
        for parent in parents:
            inner[parent] = inner = dict(inner[parent]) if isinstance(inner.get(parent), dict) else {}
        inner[last] = value
    try:
        config = VPipeConfig.parse(block)
        config.check_sizes(stages, layers)
        assert config.pipeline(stages, 2).num_stages == stages
        assert VPipeConfig.parse(config.to_dict()) == config
    except VPipeConfigError as error:
        line = str(error).encode()
    else:
        line = b"it is read"
    assert line.splitlines() == [line]


def test_values_that_cannot_be_printed_are_shown() -> None:
    for value in (10**5000, functools.reduce(lambda inner, _: [inner], range(100_000), [])):
        assert "too large to show" in show(value)


def test_several_wrong_keys_are_counted() -> None:
    with pytest.raises(VPipeConfigError) as error:
        VPipeConfig.parse({"sync_mod": "asp", "recompute_ratio": 2, "partition": [0]})
    assert message_of(error).endswith("(and 2 more)")


def test_config_errors_are_value_errors_of_this_package() -> None:
    assert issubclass(VPipeConfigError, ValueError)
    assert issubclass(VPipeConfigError, VPipeError)


def test_long_values_are_cut() -> None:
    with pytest.raises(VPipeConfigError) as error:
        VPipeConfig.parse({"partition": "x" * 5000})
    assert len(message_of(error)) < 600


def test_defaults() -> None:
    config = VPipeConfig.parse({})
    assert (config.sync_mode, config.schedule, config.weight_sync) == ("asp", "1f1b", "stash")
    assert config.partition is None
    assert config.peer_timeout_s == 300
    pipeline = config.pipeline(num_stages=4, micro_batches=1)
    assert pipeline.partition is None
    assert pipeline.recompute_ratio == (0, 0, 0, 0)
    assert pipeline.depths == (3, 2, 1, 0)


GOOD: list[dict[str, Any]] = [
    {},
    {
        "sync_mode": "asp",
        "schedule": "1f1b",
        "weight_sync": "stash",
        "partition": [12, 13, 13, 11],
        "recompute_ratio": [0.3, 0, 0, 0],
        "stage_to_depth_map": "default",
        "gradient_clipping_scope": "stage",
        "peer_timeout_s": 300,
        "timeline": {"enabled": False, "path": "timeline.json"},
    },
    {"sync_mode": "bsp", "schedule": "1f1b", "partition": "uniform"},
    {"weight_sync": "vertical", "stage_to_depth_map": [6, 4, 2, 0], "recompute_ratio": 1},
    {"weight_sync": "none", "partition": "type:Block|Head", "peer_timeout_s": 0.5},
    {"partition": None, "stage_to_depth_map": [1, 1, 1, 0], "gradient_clipping_scope": "delayed_global"},
    {"partition": "parameters", "recompute_ratio": 0.25, "timeline": {}},
    {"staleness": {"nadam": {"betas": [0.98, 0.99]}, "delay_warmup_updates": 9}},
    {"staleness": {"synchronous_updates": 5, "nadam": None}},
]


@pytest.mark.parametrize("block", GOOD, ids=show)
def test_round_trip(block: dict[str, Any]) -> None:
    config = VPipeConfig.parse(block)
    written = json.loads(json.dumps(config.to_dict()))
    assert written == block
    assert VPipeConfig.parse(written) == config
    assert hash(VPipeConfig.parse(written)) == hash(config)


def test_config_cannot_be_changed() -> None:
    config = VPipeConfig.parse({})
    with pytest.raises(ValidationError, match="frozen"):
        config.sync_mode = "bsp"  # type: ignore[misc]


def test_pipeline_spreads_a_number_and_keeps_lists() -> None:
    pipeline = VPipeConfig.parse(
        {"partition": [12, 13, 13, 11], "recompute_ratio": 0.5, "stage_to_depth_map": [6, 4, 2, 0]}
    ).pipeline(4, 1)
    assert pipeline.partition == (12, 13, 13, 11)
    assert pipeline.recompute_ratio == (0.5,) * 4
    assert pipeline.depths == (6, 4, 2, 0)
    left = VPipeConfig.parse({"partition": "uniform", "recompute_ratio": "auto", "profile": "x"}).pipeline(1, 1)
    assert (left.partition, left.recompute_ratio) == (None, None)
    follows = VPipeConfig.parse({"stage_to_depth_map": "auto", "replan": {"every": 5, "max_staleness": 4}})
    assert not follows.leaves_to_planner  # it begins with the default
    assert follows.pipeline(3, 1).depths == (2, 1, 0)


@pytest.mark.parametrize(
    ("block", "num_stages", "num_layers", "parts"),
    [
        ({"partition": [12, 13, 13, 10]}, 4, 49, ["vpipe.partition", "sum to 48", "sum to 49", "add 1"]),
        ({"partition": [13, 13, 13, 12]}, 4, 49, ["vpipe.partition", "sum to 51", "sum to 49", "remove 2"]),
        ({"partition": [24, 25]}, 4, 49, ["vpipe.partition", "[24, 25]", "2 entries", "4 for 4 stages"]),
        ({"recompute_ratio": [0.5]}, 2, 49, ["vpipe.recompute_ratio", "[0.5]", "1 entries", "2 for 2 stages"]),
        ({"swap_ratio": [0.5]}, 2, 49, ["vpipe.swap_ratio", "[0.5]", "1 entries", "2 for 2 stages"]),
        ({"memory_budget": [1, 2]}, 4, 49, ["vpipe.memory_budget", "[1, 2]", "2 entries", "4 for 4 stages"]),
        ({"stage_to_depth_map": [2, 1, 0]}, 4, 49, ["vpipe.stage_to_depth_map", "[2, 1, 0]", "3 entries"]),
        ({"partition": "uniform"}, 4, 3, ["number of stages", "got 4", "the model has 3 layers"]),
        ({"partition": [1], "recompute_ratio": [0]}, 2, 2, ["vpipe.partition", "(and 1 more)"]),
        (
            {**INTERLEAVED, "partition": [25, 24]},
            2,
            49,
            ["vpipe.partition", "per virtual stage, 4 for 2 stages", "2 entries"],
        ),
        (INTERLEAVED, 2, 3, ["number of stages, virtual ones counted", "got 4", "the model has 3 layers"]),
    ],
)
def test_sizes_that_do_not_fit(block: dict[str, Any], num_stages: int, num_layers: int, parts: list[str]) -> None:
    with pytest.raises(VPipeConfigError) as error:
        VPipeConfig.parse(block).check_sizes(num_stages, num_layers)
    message = message_of(error)
    assert [part for part in parts if part not in message] == []


# --- partition files ---


@pytest.fixture
def split_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "split.json"


def test_partition_file(split_file: Path) -> None:
    split_file.write_text('{"partition": [12, 13, 13, 11], "recompute_ratio": [0.3, 0, 0, 0]}')
    for name in ("split.json", str(split_file)):
        config = VPipeConfig.parse({"partition": name})
        assert config.partition == (12, 13, 13, 11)
        assert config.recompute_ratio == (0.3, 0, 0, 0)
        assert VPipeConfig.parse(config.to_dict()) == config


def test_partition_file_without_ratio_keeps_that_of_the_block(split_file: Path) -> None:
    split_file.write_text('{"partition": [1, 2]}')
    assert VPipeConfig.parse({"partition": "split.json", "recompute_ratio": 0.5}).recompute_ratio == 0.5


@pytest.mark.parametrize("ratio", [0.5, [0.5, 0.5]])
def test_partition_file_may_repeat_the_ratio_of_the_block(split_file: Path, ratio: object) -> None:
    split_file.write_text('{"partition": [1, 2], "recompute_ratio": [0.5, 0.5]}')
    assert VPipeConfig.parse({"partition": "split.json", "recompute_ratio": ratio}).partition == (1, 2)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ["cannot be read", "No such file"]),
        ("{broken", ["is not JSON"]),
        ('{"partition": [1], "partition": [2]}', ["is not JSON", 'key "partition" is given twice']),
        (b"\xff\xfe\x00", ["is not JSON"]),
        ("[1, 2]", ["holds no object"]),
        ("{}", ['no key "partition"']),
        ('{"partition": [1], "recompute": [0]}', ['unknown key "recompute"', 'did you mean "recompute_ratio"?']),
        ('{"partition": "uniform"}', ["key partition", '"uniform"', "a list of layer counts"]),
        ('{"partition": [1, -1]}', ["key partition[1]", "got -1"]),
        ('{"partition": [1, 1], "recompute_ratio": [0, 7]}', ["key recompute_ratio[1]", "got 7"]),
    ],
)
def test_wrong_partition_file(split_file: Path, content: str | bytes | None, parts: list[str]) -> None:
    if isinstance(content, bytes):
        split_file.write_bytes(content)
    elif content is not None:
        split_file.write_text(content)
    with pytest.raises(VPipeConfigError) as error:
        VPipeConfig.parse({"partition": "split.json"})
    message = message_of(error)
    assert "split.json" in message
    assert [part for part in parts if part not in message] == []


def test_partition_file_and_block_disagree(split_file: Path) -> None:
    split_file.write_text('{"partition": [1, 2], "recompute_ratio": [0.5, 0]}')
    with pytest.raises(VPipeConfigError) as error:
        VPipeConfig.parse({"partition": "split.json", "recompute_ratio": 0.5})
    message = message_of(error)
    assert message.startswith("vpipe.recompute_ratio: got 0.5; ")
    assert "[0.5, 0]" in message


# --- the block inside the DeepSpeed JSON ---


def test_block_of() -> None:
    assert DeepSpeedJson({"train_batch_size": 8}).block is None
    assert DeepSpeedJson({"vpipe": {"sync_mode": "asp"}}).block == {"sync_mode": "asp"}
    assert DeepSpeedJson({2: 3, True: 4}).block is None, "keys that are no strings, as of a YAML file"  # type: ignore[dict-item]


@pytest.mark.parametrize("ds_config", [{"vpipe": None}, {"vpipe": "asp"}, {"vPipe": {}}, {"v_pipe": {}}])
def test_block_of_refuses(ds_config: dict[str, Any]) -> None:
    with pytest.raises(VPipeConfigError) as error:
        _ = DeepSpeedJson(ds_config).block
    assert '"vpipe"' in message_of(error)


ZERO_1 = {"zero_optimization": {"stage": 1}}
CHECKPOINTS = {"pipeline": {"activation_checkpoint_interval": 1}}
RANDOM_LTD = {"data_routing": {"random_ltd": {"enabled": True}}}
CURRICULUM = {"data_sampling": {"curriculum_learning": {"enabled": True}}}

# DeepSpeed JSON, vpipe block, key, value, part of the rest of the message
UNSUPPORTED: list[tuple[dict[str, Any], dict[str, Any], str, object, str]] = [
    ({"zero_optimization": {"stage": 2}}, {}, "zero_optimization.stage", 2, "use stage 1"),
    ({"zero_optimization": {"stage": 3}}, {"sync_mode": "bsp"}, "zero_optimization.stage", 3, "use stage 1"),
    (
        {"zero_optimization": {"stage": 1, "offload_param": {"device": "nvme"}}},
        {"sync_mode": "bsp"},
        "zero_optimization.offload_param.device",
        "nvme",
        "remove offload_param",
    ),
    (
        {"zero_optimization": {"stage": 1, "cpu_offload_param": True}},
        {},
        "zero_optimization.cpu_offload_param",
        True,
        "remove the key",
    ),
    ({"zero_optimization": {"zenflow": {}}}, {}, "zero_optimization.zenflow", {}, "remove the key"),
    ({"zero_optimization": {"cpu_offload": True}}, {}, "zero_optimization.cpu_offload", True, 'write "stage": 1'),
    (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
        {"sync_mode": "bsp"},
        "zero_optimization.offload_optimizer.device",
        "nvme",
        'write "cpu"',
    ),
    (
        {"zero_optimization": {"stage": 1, "cpu_offload": True}},
        {"replan": {"every": 5}},
        "zero_optimization.cpu_offload",
        True,
        "no offload next to replan",
    ),
    (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        {},
        "bf16.bf16_master_weights_and_grads",
        True,
        "states back in 16 bits",
    ),
    (
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        {"sync_mode": "bsp"},
        "fp16.fp16_master_weights_and_grads",
        True,
        "states back in 16 bits",
    ),
    (
        {"pipeline": {"activation_checkpoint_interval": 1}},
        {"replan": {"every": 5}},
        "pipeline.activation_checkpoint_interval",
        1,
        "0 next to replan",
    ),
    (
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 1}},
        {"replan": {"every": 5}},
        "torch_autocast.enabled",
        True,
        "or remove vpipe.replan",
    ),
    (
        {"optimizer": {"type": "Adagrad", "params": {}}, "zero_optimization": {"stage": 1}},
        {"replan": {"every": 5}},
        "zero_optimization.stage",
        1,
        "use stage 0",
    ),
    (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
        {"replan": {"every": 5}},
        "zero_optimization.offload_optimizer.device",
        "cpu",
        "no offload next to replan",
    ),
    (
        {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        {},
        "data_types.grad_accum_dtype",
        "fp32",
        'allowed: "fp16"',
    ),
    (
        {"zero_optimization": {"stage": 1, "compute_grad_norm": False}},
        {"gradient_clipping_scope": "delayed_global"},
        "zero_optimization.compute_grad_norm",
        False,
        "clips by norms",
    ),
    (
        {"bfloat16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        {"sync_mode": "bsp"},
        "data_types.grad_accum_dtype",
        "fp32",
        "only with ZeRO-1",
    ),
    (
        {
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
            "data_types": {"grad_accum_dtype": "fp32"},
        },
        {"sync_mode": "bsp"},
        "data_types.grad_accum_dtype",
        "fp32",
        "only without offload",
    ),
    (
        {
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "data_types": {"grad_accum_dtype": "fp32"},
        },
        {"gradient_clipping_scope": "delayed_global"},
        "data_types.grad_accum_dtype",
        "fp32",
        'write "stage" for vpipe.gradient_clipping_scope',
    ),
    ({"torch_autocast": {"enabled": True}}, {}, "torch_autocast.dtype", None, '"bfloat16"'),
    (
        {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        {},
        "torch_autocast.dtype",
        "float16",
        '"fp16": {"enabled": true}',
    ),
    ({"wall_clock_breakdown": True}, {}, "steps_per_print", None, "prints every steps_per_print steps"),
    (
        {"activation_checkpointing": {"contiguous_memory_optimization": True}},
        {},
        "activation_checkpointing.contiguous_memory_optimization",
        True,
        "several in flight",
    ),
    ({"elasticity": {"enabled": True}}, {}, "elasticity.enabled", True, "allowed: no such key; remove elasticity"),
    ({"autotuning": {"enabled": True}}, {}, "autotuning.enabled", True, "remove autotuning"),
    (
        {"expert_parallel": {"enabled": True}},
        {},
        "expert_parallel.enabled",
        True,
        'remove expert_parallel, or write "bsp" for vpipe.sync_mode',
    ),
    ({"hybrid_engine": {"enabled": True}}, {}, "hybrid_engine.enabled", True, "remove hybrid_engine"),
    ({"tensor_parallel": {"autotp_size": 2}}, {}, "tensor_parallel.autotp_size", 2, "remove the key"),
    ({"sequence_parallel_size": 2}, {"sync_mode": "bsp"}, "sequence_parallel_size", 2, "remove the key"),
    (
        {"data_efficiency": {"enabled": True}},
        {},
        "data_efficiency.enabled",
        True,
        'remove data_efficiency, or write "bsp" for vpipe.sync_mode',
    ),
    (
        {"data_efficiency": CURRICULUM},
        {},
        "data_efficiency.data_sampling.curriculum_learning.enabled",
        True,
        "remove curriculum_learning",
    ),
    (
        {"data_efficiency": CURRICULUM},
        {"sync_mode": "bsp"},
        "data_efficiency.data_sampling.curriculum_learning.enabled",
        True,
        "remove curriculum_learning",
    ),
    (
        {"data_efficiency": RANDOM_LTD},
        {"sync_mode": "bsp"},
        "data_efficiency.data_routing.random_ltd.enabled",
        True,
        "remove random_ltd",
    ),
    ({"curriculum_learning": {"enabled": True}}, {}, "curriculum_learning.enabled", True, "no such key; remove"),
    ({"pipeline": {"pipe_partitioned": True}}, {}, "pipeline.pipe_partitioned", True, "write false"),
    ({"pipeline": {"grad_partitioned": True}}, {}, "pipeline.grad_partitioned", True, "write false"),
    (CHECKPOINTS, INTERLEAVED, "pipeline.activation_checkpoint_interval", 1, "virtual_stages"),
    (CHECKPOINTS, {"recompute_ratio": [0, 0.1]}, "pipeline.activation_checkpoint_interval", 1, "recompute_ratio"),
    (CHECKPOINTS, {"swap_ratio": [0, 0.1]}, "pipeline.activation_checkpoint_interval", 1, "swap_ratio"),
    (
        CHECKPOINTS,
        {"partition": "profile", "profile": "p.json"},
        "pipeline.activation_checkpoint_interval",
        1,
        "the planner does not know",
    ),
    ({"checkpoint": {"load_universal": True}}, {}, "checkpoint.load_universal", True, "load an ordinary checkpoint"),
    ({"checkpoint": {"writer": {"decoupled": True}}}, {}, "checkpoint.writer.decoupled", True, "write false"),
    (
        {"zero_optimization": {"stage": 1}, "optimizer": {"type": "SOAP"}},
        {},
        "zero_optimization.stage",
        1,
        "use stage 0",
    ),
    ({"optimizer": {"type": "muon"}}, {}, "optimizer.type", "muon", 'write "SOAP"'),
    (
        {"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}},
        {"sync_mode": "bsp"},
        "optimizer.params.amsgrad",
        True,
        'add "torch_adam": true',
    ),
    (
        {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}},
        {},
        "zero_optimization.elastic_checkpoint",
        True,
        "remove the key",
    ),
    (
        {"checkpoint": {"use_node_local_storage": True}},
        {},
        "checkpoint.use_node_local_storage",
        True,
        "write false or remove the key, or save_on_each_node",
    ),
    ({"datastates_ckpt": {}}, {}, "datastates_ckpt", {}, "remove the key"),
    ({"managed_gradient_accumulation": False}, {}, "managed_gradient_accumulation", False, "write true"),
    ({"pipeline": {"stages": 4}}, {}, "pipeline.stages", 4, "allowed: 2"),
    ({"pipeline": {"stages": True}}, {}, "pipeline.stages", True, "allowed: an int >= 1"),
]


@pytest.mark.parametrize(("ds_config", "block", "key", "value", "more"), UNSUPPORTED)
def test_unsupported_deepspeed_settings(
    ds_config: dict[str, Any], block: dict[str, Any], key: str, value: object, more: str
) -> None:
    with pytest.raises(VPipeConfigError) as error:
        refuse_unsupported(DeepSpeedJson(ds_config), VPipeConfig.parse(block), num_stages=2)
    message = message_of(error)
    assert message.startswith(f"{key}: got {show(value)}; ")
    assert more in message


def test_several_unsupported_settings_are_counted() -> None:
    with pytest.raises(VPipeConfigError) as error:
        refuse_unsupported(
            DeepSpeedJson({"amp": {"enabled": True}, "autotuning": {"enabled": True}}), VPipeConfig.parse({}), 2
        )
    assert message_of(error).endswith("(and 1 more)")


def test_a_setting_that_several_rules_refuse_counts_once() -> None:
    ds_config, block = {"pipeline": {"activation_checkpoint_interval": 1}}, {"recompute_ratio": 0.5, "swap_ratio": 0.5}
    with pytest.raises(VPipeConfigError) as error:
        refuse_unsupported(DeepSpeedJson(ds_config), VPipeConfig.parse(block), 2)
    assert "0 next to recompute_ratio" in message_of(error)
    assert "more)" not in message_of(error)


@pytest.mark.parametrize(
    ("ds_config", "block", "num_stages"),
    [
        ({}, {}, 4),
        ({"bf16": {"enabled": True}, **ZERO_1}, {}, 4),
        ({"optimizer": {"type": "Muon"}}, {"sync_mode": "bsp"}, 4),
        ({"optimizer": {"type": "Muon"}}, {}, 1),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": False}}}, {}, 4),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True, "torch_adam": True}}}, {}, 4),
        ({"bf16": {"enabled": True}}, {}, 4),
        ({"fp16": {"enabled": True}}, {"gradient_clipping_scope": "delayed_global"}, 4),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {}, 4),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": False}, "zero_optimization": {"stage": 0}}, {}, 4),
        ({"zero_optimization": True, "bf16": {"enabled": True}}, {}, 4),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}}}, {"replan": {"every": 5}}, 4),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, {}, 4),
        ({"zero_optimization": {"stage": 1, "cpu_offload": True, "overlap_comm": True}}, {"link": "nccl"}, 4),
        ({"wall_clock_breakdown": True, "steps_per_print": 10, "flops_profiler": {"enabled": True}}, {}, 4),
        ({"activation_checkpointing": {"contiguous_memory_optimization": True}}, {}, 1),
        ({"pipeline": {"pipe_partitioned": False, "stages": "auto"}}, {}, 4),
        ({"pipeline": {"stages": 4}}, {}, 4),
        (CHECKPOINTS, {}, 4),
        ({"data_efficiency": {"enabled": True}}, {"sync_mode": "bsp"}, 4),
        ({"data_efficiency": RANDOM_LTD}, {"sync_mode": "bsp"}, 1),
        ({"tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 1}, {}, 4),
        ({"zero_optimization": "auto", "pipeline": "auto", "tensor_parallel": "auto", "fp16": "auto"}, {}, 4),
        ({"zero_optimization": {"stage": "auto"}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, {}, 4),
        ({"sequence_parallel_size": float("inf"), "bf16": None, "wall_clock_breakdown": "auto"}, {}, 4),
        ({"zero_optimization": {name: {"device": "auto"} for name in ("offload_optimizer", "offload_param")}}, {}, 4),
    ],
)
def test_supported_deepspeed_settings(ds_config: dict[str, Any], block: dict[str, Any], num_stages: int) -> None:
    refuse_unsupported(DeepSpeedJson(ds_config), VPipeConfig.parse(block), num_stages)


def test_config_needs_neither_torch_nor_deepspeed(tmp_path: Path) -> None:
    # Loaded by path, because importing the package itself may bring in more.
    root = Path(__file__).resolve().parents[2]
    code = (
        "import sys, types; package = types.ModuleType('ds_vpipe'); "
        f"package.__path__ = [{str(root / 'ds_vpipe')!r}]; sys.modules['ds_vpipe'] = package; "
        "import ds_vpipe.config.unsupported, ds_vpipe.partition; "
        "sys.exit(' '.join(name for name in ('torch', 'deepspeed', 'numpy') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stderr.strip() == ""


# --- the descriptions of the keys ---


def test_every_key_has_its_texts_and_a_sound_example() -> None:
    for name, field in all_keys(VPipeConfig):
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        assert extra["allowed"], name
        assert field.description, name
        example = (field.examples or [None])[0]
        block: Any = {name.rpartition(".")[2]: example}
        for parent in reversed(name.split(".")[:-1]):
            block = {parent: block}
        if name in ("virtual_stages", "profile", "link_bandwidth"):  # with others
            block |= {**INTERLEAVED, "profile": "profile.json"} if name == "virtual_stages" else {}
        if name.startswith("replan."):
            block["replan"].setdefault("every", 50)
        if name == "replan.max_staleness":
            block["stage_to_depth_map"] = "auto"
        VPipeConfig.parse(block)


def test_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--markdown"]) == 0
    page = Path(__file__).parent
    while not (page / "docs").is_dir():
        page = page.parent
    assert (page / "docs" / "configuration.md").read_text(encoding="utf-8") == capsys.readouterr().out


def test_one_key_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "timeline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    sections = ["## `timeline`", "### `timeline.enabled`", "### `timeline.path`"]
    assert [line for line in lines if line.startswith("#")] == sections
    assert main(["config", "timelin"]) == 2
    assert "allowed: sync_mode, schedule" in capsys.readouterr().err


@pytest.mark.parametrize("content", [[], 5, object()])
def test_configurations_that_are_no_path_and_no_dict(content: Any) -> None:
    with pytest.raises(VPipeConfigError) as refused:
        load_deepspeed_json(content)
    assert str(refused.value).startswith(f'config: got "{type(content).__name__}"; allowed: a dict, or the path of ')


@pytest.mark.parametrize(
    ("text", "why"), [('{"x": 1, "x": 2}', 'it is not JSON: key "x" is given twice'), ("[1]", "it holds no object")]
)
def test_configurations_in_base64_that_hold_no_object(text: str, why: str) -> None:
    with pytest.raises(VPipeConfigError) as refused:
        load_deepspeed_json(base64.urlsafe_b64encode(text.encode()).decode())
    assert str(refused.value) == f"config in base64: got {show(text)}; {why}; allowed: a JSON object; correct it"
