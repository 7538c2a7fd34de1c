"""Groups of an engine are built from the store by their members alone."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import deepspeed
import pytest
import split_models
import torch
import toy
from torch import distributed as dist
from torch import nn
from worlds import CaseFailed, Worlds

from ds_vpipe.engine.links.groups import Groups, Peer, check_local_device, failed_wait
from ds_vpipe.engine.links.pickled import as_bytes, from_bytes
from ds_vpipe.engine.modules.split_module import pipeline_from_module
from ds_vpipe.errors import PipelinePeerError, VPipeConfigError
from ds_vpipe.models.start import start_process_group

pytestmark = pytest.mark.mp

SGD = {"type": "SGD", "params": {"lr": 0.1}}
DEEPSPEED, TORCH = (str(Path(package.__file__).parent) for package in (deepspeed, torch))
# Over the device's backend, by all ranks in the same order: see engine/links/groups.py.
ALLOWED = {"_index_tied_modules"}


@pytest.mark.parametrize("text", ["Timed out", "Operation timed out!", "Socket Timeout"])
def test_every_backends_word_for_a_timeout_names_the_limit(text: str) -> None:
    found = failed_wait(Peer(0, 0), None, "full_state_dict()", RuntimeError(text), 5.0)
    limit = "nothing came within 5 s; see that rank's log, or raise vpipe.peer_timeout_s if a step may take that long"
    assert str(found) == f"stage 0 (rank 0) waited for full_state_dict(): {limit}"


def makers(build: Any) -> set[str]:
    """Functions other than DeepSpeed's own that make groups with torch while ``build`` runs."""
    from torch.distributed import distributed_c10d as c10d

    found, original = set[str](), c10d._new_process_group_helper

    def watched(*args: Any, **kwargs: Any) -> Any:
        frame: Any = sys._getframe(1)
        while frame.f_code.co_filename.startswith(TORCH):
            frame = frame.f_back
        if not frame.f_code.co_filename.startswith(DEEPSPEED):
            found.add(frame.f_code.co_name)
        return original(*args, **kwargs)

    with mock.patch.object(c10d, "_new_process_group_helper", watched):
        build()
    return found


def engines() -> list[set[str]]:
    def build(stages: int, vpipe: dict[str, Any], **module: Any) -> Any:
        return lambda: cases.engine(cases.config(2, SGD, vpipe), stages, **module).destroy()

    def loop() -> None:
        import ds_vpipe

        ds_config = cases.config(2, SGD, {}, pipeline={"stages": 2})
        ds_vpipe.initialize(model=split_models.bert(), config=ds_config)[0].destroy()

    found = []
    for one in (
        build(4, {}, specs=toy.tied_specs),
        build(2, {}),
        build(4, {"sync_mode": "bsp"}, specs=toy.tied_specs),
        build(2, {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2}),
        build(2, {"partition": [4, 6]}, specs=toy.words_tied_specs),
        loop,
    ):
        found.append(makers(one))
        cases.close_groups()
    return found


def test_no_group_of_ours_is_made_by_torch(worlds: Worlds) -> None:
    """Where the default group is bound to a device, that would split its communicator on ranks that are no members."""
    for found in worlds.run(4, engines):
        assert set.union(*found) <= ALLOWED, found


def run_loops() -> int:
    """Threads of this process that wait for gloo's messages."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread of another test has just ended
            found += (task / "comm").read_text() == "pt_gloo_runloop\n"
    return found


def made_by_an_engine(link: str) -> tuple[int, int]:
    """Groups of ours that a stage has, and their threads."""
    from ds_vpipe.engine.links import groups

    original, made = groups.ProcessGroupGloo, []

    def counted(*arguments: Any) -> Any:
        before = run_loops()
        made.append(original(*arguments))
        threads.append(run_loops() - before)
        return made[-1]

    threads: list[int] = []
    counted.create_default_device = original.create_default_device  # type: ignore[attr-defined]
    with mock.patch.object(groups, "ProcessGroupGloo", counted):
        cases.engine(cases.config(2, SGD, {"link": link}), 3).destroy()
    return len(made), sum(threads)


@pytest.mark.parametrize(("link", "of_a_neighbour"), [("shared", 0), ("ipc", 0), ("host", 2), ("nccl", 2)])
def test_a_stage_has_a_group_for_each_direction_at_most_and_a_thread_for_each_group(
    worlds: Worlds, link: str, of_a_neighbour: int
) -> None:
    together = 2  # of the pipeline, and of all ranks
    for (groups, threads), neighbours in zip(worlds.run(3, made_by_an_engine, link), (1, 2, 1), strict=True):
        assert groups == together + of_a_neighbour * neighbours
        assert threads <= groups


def build_watched() -> list[str]:
    """What an engine does before it has links: devices taken, collectives of ours, numbers sent to neighbours."""
    import torch.distributed as dist
    from deepspeed.runtime.pipe import p2p

    seen, accelerator = list[str](), deepspeed.get_accelerator()

    def noted(name: str, function: Any) -> Any:
        return lambda *args, **kwargs: seen.append(name) or function(*args, **kwargs)

    with contextlib.ExitStack() as patched:
        for place, name in (
            (accelerator, "set_device"),
            (dist, "all_gather_object"),
            (p2p, "send"),
            (p2p, "recv"),
        ):
            patched.enter_context(mock.patch.object(place, name, noted(name, getattr(place, name))))
        cases.engine(cases.config(1, SGD, {"partition": [4, 6]}), 2).destroy()
        p2p.send(torch.zeros(1), 1) if dist.get_rank() == 0 else p2p.recv(torch.zeros(1), 0)  # and they are back
    return seen


def test_device_is_taken_first_and_deepspeed_sends_nothing_to_neighbours(worlds: Worlds) -> None:
    for rank, seen in enumerate(worlds.run(2, build_watched)):
        assert seen.index("set_device") < seen.index("all_gather_object")
        assert [name for name in seen if name in ("send", "recv")] == [["send"], ["recv"]][rank]


@pytest.mark.parametrize("text", ["Failed to recv, got 0 bytes. Connection was likely closed.", "Broken pipe"])
def test_a_rank_that_comes_when_the_first_has_ended(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has gone with it; torch ends in a stack of its own."""

    class Gone:
        def add(self, *_: Any) -> int:
            raise dist.DistNetworkError(text)

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", Gone)
    with pytest.raises(PipelinePeerError) as failed:
        Groups(Peer(1, 3), 10.0)
    assert str(failed.value) == (
        "stage 1 (rank 3) waited for the store of the default process group: the rank that has it is gone "
        "(connection closed); see that rank's log for the cause"
    )


def store_gone() -> tuple[int, str]:
    """How often a store is asked after it has gone."""
    groups = Groups(Peer(0, 0), 10.0)
    groups.failures.stop()
    gone = mock.Mock(side_effect=dist.DistNetworkError("Broken pipe"))
    groups._beside = mock.Mock(check=gone, set=gone)
    for ask in (
        lambda: groups.get_from_any_thread("key"),
        lambda: groups.get_from_any_thread("key"),
        lambda: groups.put_from_any_thread("key", ""),
    ):
        with pytest.raises(RuntimeError) as failed:
            ask()
    return gone.call_count, str(failed.value)


def test_a_store_that_has_gone_is_asked_once(worlds: Worlds) -> None:
    """Torch prints a stack each time."""
    assert worlds.run(1, store_gone) == [(1, "the store of the default process group is gone")]


def with_experts() -> None:
    from deepspeed.moe.layer import MoE

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = MoE(toy.CLASSES, torch.nn.Linear(toy.CLASSES, toy.CLASSES), num_experts=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.moe(x)[0]

    cases.engine(cases.config(1, SGD, {}), 2, specs=lambda: [*toy.layer_specs(), deepspeed.pipe.LayerSpec(Experts)])


def test_experts_on_one_stage_are_refused_on_all(worlds: Worlds) -> None:
    with pytest.raises(CaseFailed) as failed:
        worlds.run(2, with_experts)
    for rank in (0, 1):
        text = failed.value.errors[rank]
        assert text.startswith(
            'VPipeConfigError: vpipe.sync_mode: got "asp" for a model with DeepSpeed\'s MoE layers'
        ), text


def test_other_ranks_get_tensors_of_an_accelerator_in_host_memory() -> None:
    """They have none of the same number."""
    trained = torch.nn.Parameter(torch.arange(3.0))
    with mock.patch("torch.serialization.location_tag", return_value="cuda:1"):
        sent = as_bytes([{"state": [Peer(0, 0), torch.arange(3.0)]}, trained, torch.ones(2, requires_grad=True)])
    found = from_bytes(sent)
    state = found[0]["state"][1]
    assert torch.equal(state, torch.arange(3.0))
    assert [one.requires_grad for one in (state, *found[1:])] == [False, True, True]
    assert [one.device.type for one in (state, *found[1:])] == ["cpu"] * 3


def test_a_process_that_sees_too_few_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = mock.Mock(**{"device_name.return_value": "cuda", "device_count.return_value": 1})
    monkeypatch.setattr("ds_vpipe.engine.links.groups.get_accelerator", lambda: accelerator)
    monkeypatch.setenv("LOCAL_RANK", "0")
    check_local_device()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for start in (check_local_device, start_process_group, lambda: pipeline_from_module(nn.Linear(1, 1), {}, None)):
        with pytest.raises(VPipeConfigError, match="LOCAL_RANK: got 1 in a process that sees 1 devices, allowed are"):
            start()


def test_a_part_of_a_vector_travels_without_the_rest() -> None:
    """As a weight's master and moments do that lie in those of its whole group."""
    vector = torch.arange(1_000_000.0)
    sent = as_bytes([(vector[5:10], {"step": 3})])
    assert len(sent) < 5_000
    ((found, state),) = from_bytes(sent)
    assert found.tolist() == [5, 6, 7, 8, 9]
    assert state == {"step": 3}
