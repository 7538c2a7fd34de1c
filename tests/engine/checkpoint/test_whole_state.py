"""Saving a plain model that was split, as scripts do it: files hold the whole model, or a line says why not."""

from __future__ import annotations

import copy
import pickle
import resource
import subprocess
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import pytest
import torch
from forked import Forked
from safetensors.torch import load_model, save_model
from split_models import bert, gpt2, tokens
from test_exactness import difference
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers import BertForMaskedLM, GPT2LMHeadModel
from worlds import CaseFailed, Worlds, free_port

from ds_vpipe.engine.loop.script_end import serve_at_end
from ds_vpipe.errors import VPipeError

STAGES, ROUNDS = 2, 5
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lora_a = nn.Linear(8, 8), nn.Linear(8, 2, bias=False)
        self.lora_b = nn.Linear(2, 8, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.linear.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.linear(hidden) + self.lora_b(self.lora_a(hidden))))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Adapted(nn.Module):
    """A user's model with frozen weights, adapters, a tied head that is registered first, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 13)
        self.embedding = nn.Embedding(13, 8)
        self.head.weight = self.embedding.weight
        self.encoder = Encoder()
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("seen", torch.zeros(3), persistent=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.encoder(self.embedding(ids) * self.scale))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 13, (4, 6), generator=generator), torch.randint(0, 13, (4, 6), generator=generator)


def config(**extra: Any) -> dict[str, Any]:
    made = cases.config(1, SGD, {"peer_timeout_s": 30}, pipeline={"stages": STAGES})
    return {**made, "train_micro_batch_size_per_gpu": 4, **extra}


def built(model: nn.Module, **extra: Any) -> Any:
    import ds_vpipe

    given: dict[str, Any] = {"model_parameters": [p for p in model.parameters() if p.requires_grad]}
    if isinstance(model, Adapted):
        given["training_data"] = [(ids, labels) for ids, labels in zip(*batch(0), strict=True)]
    return ds_vpipe.initialize(model=model, config=config(**extra), **given)[0]


def adapted() -> Adapted:
    torch.manual_seed(0)
    return Adapted()


def train(engine: Any, rounds: int = ROUNDS, first: int = 0) -> None:
    for number in range(first, first + rounds):
        engine.backward(engine(*batch(number)))
        engine.step()


def own(engine: Any) -> dict[str, torch.Tensor]:
    """What the stage itself has, with the names in the model: all stages have all buffers, pieces have their own."""
    buffers = {name.partition(".")[2]: value for name, value in engine.module.named_buffers()}
    found = {**dict(engine.module.user_module.named_parameters(remove_duplicate=False)), **buffers}
    return {name: value.detach().clone() for name, value in found.items()}


def peft_like(model: nn.Module, folder: Path) -> None:
    """What PEFT's ``save_pretrained`` does: it asks the model and writes the adapter's entries on every rank."""
    from safetensors.torch import save_file

    adapter = {name: value.contiguous() for name, value in model.state_dict().items() if "lora_" in name}
    save_file(adapter, folder / "adapter.safetensors", metadata={"format": "pt"})


def saved(folder: Path) -> dict[str, Any]:
    """Train, save in many ways on all ranks, and train on."""
    model = adapted()
    engine = built(model)
    train(engine)
    whole = {name: value.clone() for name, value in model.state_dict().items()}  # in the midst of training
    rank = engine.global_rank
    state = model.state_dict()
    shared = state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    torch.save(model.state_dict(), folder / "model.pt")
    torch.save({"model": engine.module.state_dict(), "step": 5}, folder / f"{rank}.pt")
    save_model(model, str(folder / "model.safetensors"))
    peft_like(model, folder)
    torch.save(model.encoder.state_dict(prefix="e."), folder / "encoder.pt")
    assert engine.save_16bit_model(folder, "weights.bin")
    assert engine.save_16bit_model(folder, "trained.bin", exclude_frozen_parameters=True)
    first_only = engine.full_state_dict(rank0_only=True)
    assert (first_only.keys() == whole.keys()) if rank == 0 else not first_only
    consolidated = engine._consolidated_16bit_state_dict()
    assert (consolidated is None) == (rank != 0)
    with pytest.raises(VPipeError, match="for 'the model' for rank 0 alone, 'the model' on different ranks"):
        engine.full_state_dict(rank0_only=rank == 0)
    full = engine.full_state_dict()
    here = own(engine)
    for value in {id(value): value for value in full.values()}.values():
        value.add_(1)  # a copy is the script's
    assert difference(own(engine), here) == 0
    wrapper = nn.ModuleDict({"policy": model})
    assert list(wrapper.state_dict()) == [f"policy.{name}" for name in whole]
    engine.save_checkpoint(folder / "checkpoint")
    train(engine, 3, ROUNDS)
    engine.drain()
    return {"whole": whole, "own": here, "shared": shared, "end": own(engine), "full": full}


@pytest.mark.mp
def test_every_rank_saves_the_whole_model(worlds: Worlds, tmp_path: Path) -> None:
    ranks = worlds.run(STAGES, saved, tmp_path)
    reference = adapted()
    wanted = {name: value for rank in reversed(ranks) for name, value in rank["own"].items()}
    del wanted["seen"]
    for rank in ranks:
        assert list(rank["whole"]) == list(reference.state_dict())
        assert difference(rank["whole"], wanted) == 0
        assert difference({n: v - 1 for n, v in rank["full"].items()}, wanted) <= 1e-5
        assert rank["shared"]
    assert torch.equal(wanted["head.weight"], wanted["embedding.weight"])
    assert not torch.equal(wanted["head.weight"], reference.head.weight), "it has been trained"
    for name in ("model.pt", "weights.bin"):
        assert difference(torch.load(tmp_path / name), wanted) == 0, name
    for rank in range(STAGES):
        assert difference(torch.load(tmp_path / f"{rank}.pt")["model"], wanted) == 0
    load_model(reference, str(tmp_path / "model.safetensors"))
    assert difference(dict(reference.state_dict()), wanted) == 0
    from safetensors.torch import load_file

    adapter = load_file(tmp_path / "adapter.safetensors")
    assert difference(adapter, {name: value for name, value in wanted.items() if "lora_" in name}) == 0
    encoder = torch.load(tmp_path / "encoder.pt")
    assert list(encoder) == [f"e.{name}" for name in reference.encoder.state_dict()]
    assert difference(encoder, {f"e.{n[8:]}": v for n, v in wanted.items() if n.startswith("encoder.")}) == 0
    trained = {name for name, p in reference.named_parameters(remove_duplicate=False) if p.requires_grad}
    buffers = {name for name, _ in reference.named_buffers()} - {"seen"}
    assert torch.load(tmp_path / "trained.bin").keys() == trained | buffers
    # Layers' files of a checkpoint have their own weights only, and no other run changes by what was saved.
    files = sorted(tmp_path.glob("checkpoint/*/layer_*-model_states.pt"))
    assert "encoder.blocks.0.linear.weight" not in torch.load(files[0])
    apart = worlds.run(STAGES, trained_only)
    assert difference(merged(ranks, "end"), merged(apart, "end")) == 0


def merged(ranks: list[Any], key: str) -> dict[str, torch.Tensor]:
    return {name: value for rank in reversed(ranks) for name, value in rank[key].items()}


def trained_only() -> dict[str, Any]:
    model = adapted()
    engine = built(model)
    train(engine)
    engine.drain()
    train(engine, 3, ROUNDS)
    engine.drain()
    return {"end": own(engine)}


def full_disk(folder: Path) -> list[str]:
    engine = built(adapted())
    train(engine)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(VPipeError):
            engine.save_16bit_model(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    torch.distributed.barrier()
    return [path.name for path in folder.iterdir()]


@pytest.mark.mp
def test_a_full_disk_keeps_no_part_of_a_model(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(STAGES, full_disk, tmp_path) == [[], []]


def of_hugging_face(folder: Path) -> dict[str, Any]:
    found = {}
    for name, make, kind in (("bert", bert, BertForMaskedLM), ("gpt2", gpt2, GPT2LMHeadModel)):
        model = make(kind)
        kept = list(model.named_parameters())
        alive = sum(parameter.numel() for _, parameter in kept)
        extra = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
        engine = built(model, **(extra if name == "gpt2" else {}))
        here = sum(parameter.numel() for _, parameter in kept if not parameter.is_meta)
        assert here <= 0.8 * alive, "a list of parameters keeps only the stage's"
        assert [tuple(p.shape) for _, p in kept] == [tuple(p.shape) for p in make(kind).parameters()]
        for number in range(2):
            engine.backward(engine(input_ids=tokens(number), labels=tokens(number + 9)).loss)
            engine.step()
        model.save_pretrained(folder / name)
        engine.module.save_pretrained(folder / f"{name}-module")
        torch.save(model.state_dict(), folder / f"{name}.pt")
        found[name] = own(engine)
    return found


@pytest.mark.mp
def test_hugging_face_models_are_read_back(worlds: Worlds, tmp_path: Path) -> None:
    ranks = worlds.run(STAGES, of_hugging_face, tmp_path)
    for name, kind, dtype in (("bert", BertForMaskedLM, torch.float32), ("gpt2", GPT2LMHeadModel, torch.bfloat16)):
        wanted = merged(ranks, name)
        for folder in (name, f"{name}-module"):
            again, report = kind.from_pretrained(tmp_path / folder, output_loading_info=True, dtype="auto")
            assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
            found = dict(again.state_dict())
            assert {value.dtype for value in found.values()} == {dtype}
            assert difference(found, {key: wanted[key] for key in found}) == 0
        found = torch.load(tmp_path / f"{name}.pt")
        assert found.keys() == again.state_dict().keys()
        assert difference(found, {key: wanted[key] for key in found}) == 0
        assert (tmp_path / f"{name}.pt").stat().st_size < 3e5, "no flat buffers are saved with it"


def averages() -> dict[str, Any]:
    """Averages of weights in a copy, kept by writing into its state dict; swapped in, evaluated, and out again."""
    model = adapted()
    engine = built(model)
    average, swa = copy.deepcopy(model), AveragedModel(engine.module)
    train(engine, 3)
    with torch.no_grad():
        for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            mean.copy_(0.5 * (mean + value))
    states = copy.deepcopy(average.state_dict())
    kept = copy.deepcopy(model.state_dict())
    swa.update_parameters(engine.module)
    swa.update_parameters(engine)  # by the order of parameters and buffers, as before
    means = copy.deepcopy(swa.module.state_dict())
    model.load_state_dict(states)
    loaded = copy.deepcopy(engine.module.state_dict())
    engine.module.load_state_dict(kept)
    train(engine, 2, 3)
    with pytest.raises(RuntimeError, match=r"torch\.save\(model\.state_dict\(\), PATH\)"):
        pickle.dumps(model)
    end = copy.deepcopy(model.state_dict())
    return {"states": states, "means": means, "loaded": loaded, "kept": kept, "end": end}


def no_averages() -> dict[str, Any]:
    model = adapted()
    engine = built(model)
    train(engine, 3)
    engine.drain()
    train(engine, 2, 3)
    return {"end": copy.deepcopy(model.state_dict())}


@pytest.mark.mp
def test_copies_and_loading(worlds: Worlds) -> None:
    first, last = worlds.run(STAGES, averages)
    wanted = adapted()
    for mean, value in zip(wanted.state_dict().values(), first["kept"].values(), strict=True):
        if mean.is_floating_point():
            mean.copy_(0.5 * (mean + value))
    floating = {name: value for name, value in wanted.state_dict().items() if value.is_floating_point()}
    assert difference({name: first["states"][name] for name in floating}, floating) == 0
    assert difference(dict(first["states"]), dict(last["states"])) == 0
    assert difference(dict(first["means"]), dict(first["kept"])) == 0
    assert difference(dict(first["loaded"]), dict(first["states"])) == 0
    assert difference(dict(last["end"]), dict(worlds.run(STAGES, no_averages)[0]["end"])) == 0


def normed() -> Adapted:
    model = adapted()
    for block in model.encoder.blocks:
        nn.utils.parametrizations.weight_norm(block.lora_b)
    return model


def rebuild(model: Any) -> None:
    """What scripts do before they save: merge adapters into the layers below them, drop norms, keep a teacher."""
    model.teacher = copy.deepcopy(model.encoder)
    for block in model.encoder.blocks:
        block.renamed = nn.Sequential(block.norm)
        del block.norm
        nn.utils.parametrize.remove_parametrizations(block.lora_b, "weight")


def refusals(calls: list[Callable[[], Any]]) -> list[str]:
    """The lines that calls end with."""
    lines = []
    for call in calls:
        with pytest.raises(VPipeError) as refused:
            call()
        lines.append(str(refused.value))
    return lines


def rebuilt(folder: Path) -> dict[str, Any]:
    """A model whose modules and parameters are changed after ``initialize()``."""
    model = normed()
    engine = built(model)
    train(engine)
    before = copy.deepcopy(model.state_dict())
    average = copy.deepcopy(model)
    average.load_state_dict(copy.deepcopy(before), assign=True)  # its weights are its own
    lines = refusals([lambda: model.load_state_dict(before, assign=True)])
    part = copy.deepcopy(model.encoder.state_dict())
    lines += refusals([lambda: model.encoder.load_state_dict(part, assign=True)])
    model.load_state_dict(dict(before))  # as the line says
    train(engine, 2, ROUNDS)
    before = copy.deepcopy(model.state_dict())
    rebuild(model)
    state = copy.deepcopy(model.state_dict())
    full = copy.deepcopy(engine.full_state_dict())
    model.head.bias = nn.Parameter(torch.zeros(13))
    calls = [lambda: engine(*batch(0)), model.state_dict, lambda: engine.save_checkpoint(folder)]
    model.train()
    lines += refusals(calls)
    model.eval()
    return {"before": before, "state": state, "full": full, "lines": lines + refusals(calls[:1])}


@pytest.mark.mp
def test_modules_and_parameters_that_change_after_initialize(worlds: Worlds, tmp_path: Path) -> None:
    ranks = worlds.run(STAGES, rebuilt, tmp_path)
    plain = normed()
    plain.load_state_dict(ranks[0]["before"])
    rebuild(plain)
    wanted = dict(plain.state_dict())
    for rank in ranks:
        for found in (rank["state"], rank["full"]):
            assert list(found) == list(wanted)
            assert difference(dict(found), wanted) == 0
        loaded, lines = rank["lines"][:2], rank["lines"][2:]
        assert all("got assign=True, " in line for line in loaded), loaded
        assert all("head.bias: got another parameter" in line for line in lines), lines
        assert not any("\n" in line for line in rank["lines"])
    assert not list(tmp_path.iterdir())


def writes() -> None:
    model = adapted()
    engine = built(model, bf16={"enabled": True}, zero_optimization={"stage": 1}, zero_allow_untested_optimizer=True)
    state = model.state_dict()
    with torch.no_grad():
        for value in state.values():
            value.zero_()
    engine(*batch(0))


@pytest.mark.mp
def test_writing_into_a_copy_as_if_it_were_the_model_is_refused(worlds: Worlds) -> None:
    with pytest.raises(CaseFailed) as failed:
        worlds.run(STAGES, writes)
    assert all("got a state_dict() that was written into" in text for text in failed.value.errors.values())
    assert all("\n" not in text for text in failed.value.errors.values())


def one_rank_saves(which: int, rest: bool, folder: Path) -> None:
    model = adapted()
    engine = built(model)
    train(engine)
    if rest:
        engine.drain()
    if engine.global_rank == which:
        torch.save(model.state_dict(), folder / "model.pt")
    train(engine, 3, ROUNDS)


@pytest.mark.mp
@pytest.mark.parametrize(("which", "rest"), [(0, False), (0, True), (1, False)])
def test_one_rank_saves_and_the_others_train_on(worlds: Worlds, tmp_path: Path, which: int, rest: bool) -> None:
    """They meet where neither expects the other: both say so, long before the limit of 30 s."""
    begin = time.monotonic()
    with pytest.raises(CaseFailed) as failed:
        worlds.run(STAGES, one_rank_saves, which, rest, tmp_path)
    assert time.monotonic() - begin < 25
    assert not list(tmp_path.iterdir())
    line = failed.value.errors[which]
    assert f"Adapted.state_dict(): called on rank {which}, but not on rank {1 - which}" in line
    assert "engine.full_state_dict()" in line
    assert "\n" not in line


SCRIPT = """
import sys
from pathlib import Path

import test_whole_state as cases
import torch

import deepspeed
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # nothing is built for this
deepspeed.init_distributed(dist_backend="gloo")
model = cases.adapted()
engine = cases.built(model)
cases.train(engine)
if torch.distributed.get_rank() == 0:
    torch.save(model.state_dict(), "model.pt")
    torch.save(model.encoder.state_dict(), "encoder.pt")
"""


def waits_alone() -> str:
    """The first rank saves, the other one waits for it in a barrier that is not the pipeline's."""
    model = adapted()
    engine = built(model, vpipe={"peer_timeout_s": 4})
    engine.drain()
    line = ""
    if engine.global_rank == 0:
        with (
            mock.patch("ds_vpipe.engine.checkpoint.whole_state._PATIENCE_S", 0.2),
            mock.patch("ds_vpipe.engine.checkpoint.whole_state.logger.warning") as warning,
            pytest.raises(VPipeError) as raised,
        ):
            model.state_dict()
        line = f"{warning.call_args.args[0]}|{raised.value}"
    torch.distributed.barrier()
    return line


@pytest.mark.mp
def test_waiting_has_a_name_and_a_limit(worlds: Worlds) -> None:
    warning, _, refusal = worlds.run(STAGES, waits_alone)[0].partition("|")
    assert "Adapted.state_dict(): waits on rank 0 for rank 1; call state_dict() or" in warning
    assert refusal.startswith("Adapted.state_dict(): called on rank 0, but not on rank 1")
    assert "\n" not in refusal


def keys_after(calls: int) -> int:
    """Keys that so many whole states leave in the store."""
    model = adapted()
    engine = built(model)
    engine.drain()
    for _ in range(calls):
        model.state_dict()
    torch.distributed.barrier()
    store = torch.distributed.distributed_c10d._get_default_store()
    name = engine.stage.consensus.pipeline.name
    rank = torch.distributed.get_rank()
    return sum(store.check([f"ds_vpipe/{name}/whole_state/{number}/{rank}"]) for number in range(calls + 1))


@pytest.mark.mp
def test_calls_leave_no_more_and_more_keys(worlds: Worlds) -> None:
    assert worlds.run(STAGES, keys_after, 5) == [2] * STAGES


def launch(forked: Forked, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    (folder / "train.py").write_text(SCRIPT)
    world = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    line = ["-m", "ds_vpipe.run", "train.py"]
    return forked.run(folder, [(line, {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(STAGES)])


def ended(folder: Path | None, rest: bool) -> dict[str, Any]:
    """The end of a script as it comes for an engine that is at rest or not, and the first rank's last lines before."""
    model = adapted()
    engine = built(model)
    train(engine)
    if rest:
        engine.drain()
    if folder is not None and engine.global_rank == 0:
        torch.save(model.state_dict(), folder / "model.pt")
        torch.save(model.encoder.state_dict(), folder / "encoder.pt")
    if engine.script_end.idle:
        serve_at_end(weakref.ref(engine.script_end))
    else:
        engine.script_end.at_end()
    return {"own": own(engine)}


@pytest.mark.mp
@pytest.mark.parametrize("where", ["rest", "flight", "launched"])
def test_first_rank_saves_in_the_last_lines(
    request: pytest.FixtureRequest, worlds: Worlds, tmp_path: Path, where: str
) -> None:
    """The other one, whose script has ended, serves it."""
    if where == "launched":
        for done in launch(request.getfixturevalue("forked"), tmp_path):
            assert done.returncode == 0, done.stdout
    wanted = merged(worlds.run(STAGES, ended, None if where == "launched" else tmp_path, where == "rest"), "own")
    found = torch.load(tmp_path / "model.pt")
    assert list(found) == list(adapted().state_dict())
    assert difference(found, {name: wanted[name] for name in found}) == 0
    assert list(torch.load(tmp_path / "encoder.pt")) == list(adapted().encoder.state_dict())


def copy_on_one_rank(both: bool) -> str:
    """The first rank's last lines save an average; the other's script has ended, or saves the model instead."""
    model = adapted()
    engine = built(model)
    average = copy.deepcopy(model)
    train(engine)
    if both or engine.global_rank == 0:
        with pytest.raises(VPipeError) as refused:
            (average if engine.global_rank == 0 else model).state_dict()
        serve_at_end(weakref.ref(engine.script_end))
    else:
        engine.script_end.at_end()
    return str(refused.value) if engine.global_rank == 0 else ""


@pytest.mark.mp
@pytest.mark.parametrize("both", [False, True])
def test_a_copy_is_not_completed_from_the_model(worlds: Worlds, both: bool) -> None:
    """Its parts are other values than the model's: one file would hold averages and trained weights."""
    line = worlds.run(STAGES, copy_on_one_rank, both)[0]
    allowed = "allowed is the same on every rank" if both else "call state_dict() of the copy on every rank"
    assert line.startswith("Adapted.state_dict(): ")
    assert allowed in line
    assert "\n" not in line
