"""PEFT's models as pipelines: adapters are trained as by the reference, only they have versions, and they are saved."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from peft.tuners.lora import LoraLayer
from plain_reference import ScriptReplay
from split_models import SAMPLES, VOCABULARY, Stages, padding, pass_through, tokens
from test_exactness import difference
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from worlds import CaseFailed, Worlds

from ds_vpipe.models.hugging_face import from_pretrained
from ds_vpipe.splitting.meta_tensor import SplitError
from ds_vpipe.splitting.split import split_in_process

STAGES, PARTITION, ROUNDS, HALF = 2, [3, 3], 8, 4  # pieces: the front, four blocks, the tail
SGD = {"lr": 0.1, "momentum": 0.9}
LORA: dict[str, Any] = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
TEXT: dict[str, Any] = {"task_type": "CAUSAL_LM"}


def base(tied: bool = False, quantized: str = "") -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": VOCABULARY, "intermediate_size": 48, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied))
    if quantized:
        quantize(model, quantized)
    return model


def quantize(model: nn.Module, kind: str) -> None:
    """What transformers does to the blocks' linear layers with ``load_in_4bit`` and ``load_in_8bit``."""
    from bitsandbytes import nn as bnb

    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is not nn.Linear:
                continue
            sizes, weight = (child.in_features, child.out_features), child.weight.detach()
            if kind == "4bit":
                made: Any = bnb.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4")
                made.weight = bnb.Params4bit(weight, requires_grad=False, quant_type="nf4", module=made)
            else:
                made = bnb.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
                made.weight = bnb.Int8Params(weight, requires_grad=False)
            setattr(module, name, made.to("cpu"))  # which quantizes it


def adapted(config: PeftConfig | None = None, tied: bool = False, quantized: str = "") -> Any:
    """A model with adapters, which LoRA begins with zeros, other than zero."""
    model = get_peft_model(base(tied, quantized), config or LoraConfig(**LORA))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model


def call(number: int) -> dict[str, torch.Tensor]:
    ids = tokens(number)
    return {"input_ids": ids, "attention_mask": padding(), "labels": ids}


def json(micro_batches: int, **block: Any) -> dict[str, Any]:
    block = {"partition": PARTITION, **block}
    made = cases.config(micro_batches, {"type": "SGD", "params": SGD}, block, pipeline={"stages": STAGES})
    return {**made, "train_micro_batch_size_per_gpu": SAMPLES}


def started(model: nn.Module, ds_config: dict[str, Any]) -> Any:
    import ds_vpipe

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return ds_vpipe.initialize(model=model, model_parameters=trained, config=ds_config)[0]


def rounds(engine: Any, first: int, stop: int) -> None:
    for number in range(first, stop):
        engine.backward(engine(**call(number)))
        engine.step()


def trained_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def merged(reports: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: value for report in reports for name, value in report["trained"].items()}


def train(folder: Path, micro_batches: int, block: dict[str, Any], quantized: str) -> dict[str, Any]:
    """Train and save adapters in the midst of it and at the end; a second engine goes on from the midst."""
    model = adapted(quantized=quantized)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    engine = started(model, json(micro_batches, **block))
    frozen = {name: (p, p.data_ptr()) for name, p in model.named_parameters() if not p.requires_grad}
    rounds(engine, 0, HALF)
    versions = engine.stashing_optimizer.versions
    copies = [*versions._held.values(), *versions._spare]
    report = {
        "copied": sum(storage.nbytes() for copy in copies for storage in copy.storages),
        "bytes": sum(value.nbytes for value in trained_of(model).values()),
        "states": sum(state["momentum_buffer"].nbytes for state in engine.optimizer.state.values()),
    }
    engine.save_checkpoint(folder / "checkpoint", exclude_frozen_parameters=True)
    rounds(engine, HALF, ROUNDS)
    engine.drain()
    report["trained"] = trained_of(model)
    for name, (parameter, address) in frozen.items():
        assert parameter.data_ptr() == address, f"{name} has been copied"
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
    model.save_pretrained(folder / "adapter")
    cases.end(engine)
    model = adapted(quantized=quantized)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    engine = started(model, json(micro_batches, **block))
    engine.load_checkpoint(folder / "checkpoint", load_module_strict=False)
    rounds(engine, HALF, ROUNDS)
    engine.drain()
    assert difference(trained_of(model), report["trained"]) == 0
    if not quantized:
        report["merged"] = {name: value.clone() for name, value in model.merge_and_unload().state_dict().items()}
    cases.end(engine)
    return report


RUNS: dict[str, tuple[int, dict[str, Any], str]] = {
    "asp": (1, {}, ""),
    "asp, M = 2": (2, {}, ""),
    "bsp": (2, {"sync_mode": "bsp"}, ""),
    "on a base of 4 bits": (1, {"recompute_ratio": 1.0}, "4bit"),
}


def train_each(folder: Path) -> list[dict[str, Any]]:
    reports = []
    for name, given in RUNS.items():
        (folder / name).mkdir(exist_ok=True)
        reports.append(train(folder / name, *given))
    return reports


def replayed(
    micro_batches: int, depths: list[int], quantized: str, drained: bool = True, calls: list[Any] | None = None
) -> dict[str, torch.Tensor]:
    """What the reference trains, which knows two stages with two blocks each."""
    model = adapted(quantized=quantized)
    stage_of = {name: int(".layers.2." in name or ".layers.3." in name) for name, _ in model.named_parameters()}

    def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for _, parameter in named], **SGD)

    replay = ScriptReplay(model, stage_of, {}, micro_batches, 0.0, optimizer)
    replay.depths, replay.refills = depths, (0, HALF) if drained else (0,)
    replay.calls = [((), given) for given in calls or map(call, range(ROUNDS))]
    for update in range(ROUNDS // micro_batches):
        replay.train(update)
    return replay.named()


@pytest.mark.mp
def test_adapters_are_trained_saved_and_resumed(worlds: Worlds, tmp_path: Path) -> None:
    ranks = worlds.run(STAGES, train_each, tmp_path)
    for at, (name, (micro_batches, block, quantized)) in enumerate(RUNS.items()):
        reports = [rank[at] for rank in ranks]
        depths = [0, 0] if block.get("sync_mode") == "bsp" else [1, 0]
        wanted = replayed(micro_batches, depths, quantized)
        off = difference(merged(reports), wanted)
        assert off <= 1e-6, f"{name}: adapters off by {off:.1e}"
        for report, depth in zip(reports, depths, strict=True):
            assert report["copied"] == depth * report["bytes"], name
            assert report["states"] == report["bytes"], name
        # As one process reads it.
        folder = tmp_path / name / "adapter"
        assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in folder.iterdir()}
        loaded = PeftModel.from_pretrained(base(quantized=quantized), folder)
        whole = adapted(quantized=quantized)
        whole.load_state_dict(merged(reports), strict=False)
        with torch.no_grad():
            assert torch.equal(loaded.train()(**call(0)).logits, whole(**call(0)).logits), name
        if not quantized:
            plain = dict(loaded.merge_and_unload().state_dict())
            for report in reports:
                assert list(report["merged"]) == list(plain), name
                assert difference(report["merged"], plain) == 0, name
    assert difference(replayed(1, [0, 0], ""), replayed(1, [1, 0], "")) > 1e-4, "late gradients make a difference"


METHODS: dict[str, tuple[PeftConfig, bool]] = {
    "DoRA, biases": (LoraConfig(**LORA, use_dora=True, bias="lora_only"), False),
    "modules_to_save": (LoraConfig(**LORA, modules_to_save=["embed_tokens", "lm_head"]), False),
    "modules_to_save, tied": (LoraConfig(**LORA, modules_to_save=["embed_tokens"], ensure_weight_tying=True), True),
    "tokens, tied": (LoraConfig(**LORA, trainable_token_indices=[1, 2, 3]), True),
    "embeddings": (LoraConfig(**{**LORA, "target_modules": ["q_proj", "embed_tokens"]}), True),
    "only later layers": (LoraConfig(**LORA, layers_to_transform=[2, 3]), False),
    "VeRA": (VeraConfig(**{**LORA, "target_modules": ["q_proj"]}), False),
    "IA3": (IA3Config(**TEXT), False),
    "prompt": (PromptTuningConfig(**TEXT, num_virtual_tokens=3), False),
    "prefix": (PrefixTuningConfig(**TEXT, num_virtual_tokens=3), False),
}


def save_each(folder: Path) -> dict[str, Any]:
    """Train with each method and save as a script that writes on every rank; the whole state then."""
    found = {}
    for name, (config, tied) in METHODS.items():
        model = adapted(config, tied)
        engine = started(model, json(1))
        rounds(engine, 0, 3)
        if config.is_prompt_learning:  # PEFT asks the module for these, and no state dict
            first = engine.global_rank == 0
            with nullcontext() if first else pytest.raises(SplitError, match=r"is_main_process=rank == 0"):
                model.save_pretrained(folder / f"{name} everywhere")
            model.save_pretrained(folder / name, is_main_process=first)
        else:
            model.save_pretrained(folder / name)
            if name not in ("only later layers", "VeRA"):  # one stage has all; its buffers are needed, too
                model.save_pretrained(folder / f"{name} by parameters", state_dict=trained_of(model))
        found[name] = {key: value.clone() for key, value in model.state_dict().items()}
        if engine.global_rank == 0 and not config.is_prompt_learning:
            model.save_pretrained(folder / f"{name} by one rank", state_dict=found[name])
        cases.end(engine)
    return found


@pytest.mark.mp
def test_every_method_is_saved_as_peft_reads_it(worlds: Worlds, tmp_path: Path) -> None:
    states = worlds.run(STAGES, save_each, tmp_path)[0]
    for name, (config, tied) in METHODS.items():
        trained = adapted(config, tied)
        untouched = {key: value.clone() for key, value in trained.state_dict().items()}
        trained.load_state_dict(states[name])
        assert any(not torch.equal(value, untouched[key]) for key, value in states[name].items()), name
        for by in ("", " by one rank", " by parameters"):
            if not (tmp_path / f"{name}{by}").is_dir():
                continue
            loaded = PeftModel.from_pretrained(base(tied), tmp_path / f"{name}{by}")
            with torch.no_grad():
                assert torch.equal(loaded.eval()(**call(0)).logits, trained.eval()(**call(0)).logits), name + by


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_quantized_layers_are_split(kind: str) -> None:
    """Bit for bit, and what a stage has not, it does not keep."""
    model = adapted(quantized=kind)
    split = Stages(model, PARTITION)
    wanted, gradients = pass_through(model, (), call(0))
    loss = split.forward(**call(0))
    split.backward(loss)
    assert torch.equal(loss, wanted)
    assert difference(split.gradients(), gradients) == 0
    absent = split.models[0].model.base_model.model.model.layers[3].self_attn.q_proj.base_layer
    assert absent.weight.is_cpu
    assert not absent._parameters["weight"]
    assert sum(value.nbytes for value in split.models[0].model.parameters()) < 0.7 * sum(
        value.nbytes for value in model.parameters()
    )


def test_a_stage_reads_its_own_part_of_the_base(tmp_path: Path) -> None:
    """Adapters without values are refused: the model would initialise them at random, and they begin with zeros."""
    base().save_pretrained(tmp_path)
    model = get_peft_model(from_pretrained(tmp_path), LoraConfig(**LORA))
    with pytest.raises(SplitError, match="adapter on the meta device"):
        split_in_process(model, STAGES)
    for layer in model.modules():  # as docs/fine_tuning.md has it
        if isinstance(layer, LoraLayer):
            for name in layer.lora_A:
                layer.lora_A[name].to_empty(device="cpu")
                layer.lora_B[name].to_empty(device="cpu")
                layer.reset_lora_parameters(name, True)
    split = split_in_process(model, STAGES)
    split.keep(range(PARTITION[0]), lambda piece: int(piece >= PARTITION[0]))
    split.release()
    wanted = base().state_dict()
    found = dict(model.named_parameters())
    adapters = {name: found.pop(name) for name in list(found) if "lora" in name}
    assert all(bool(value.any()) == ("lora_A" in name) for name, value in adapters.items())
    assert sum("lora_A" in name for name in adapters) == 4
    for name, value in found.items():
        assert torch.equal(value, wanted[name.removeprefix("base_model.model.").replace(".base_layer", "")]), name
    assert len(found) == 1 + 2 * 9  # the embeddings and two blocks


class Front(nn.Module):
    """Embeddings, and the rotations that all blocks use."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embed, self.rotary = model.embed_tokens, model.rotary_emb

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.embed(ids)
        return hidden, *self.rotary(hidden, torch.arange(ids.shape[1])[None])


class Layer(nn.Module):
    """A block of the model, with its adapters."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *rotations = inputs
        return self.block(hidden, position_embeddings=tuple(rotations)), *rotations


class Tail(nn.Module):
    """Norm and head."""

    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.head(self.norm(inputs[0]))


def layers(model: Any) -> list[nn.Module]:
    inner = model.base_model.model
    return [Front(inner.model), *map(Layer, inner.model.layers), Tail(inner.model.norm, inner.lm_head)]


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def by_train_batch() -> dict[str, Any]:
    """Train a pipeline of the model's own layers; adapters of all stages."""
    import deepspeed

    import ds_vpipe

    net = deepspeed.pipe.PipelineModule(layers(adapted()), num_stages=STAGES, loss_fn=next_token_loss)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    ds_config = {name: value for name, value in json(1).items() if name != "pipeline"}
    engine = ds_vpipe.initialize(model=net, model_parameters=trained, config=ds_config)[0]
    data = iter([(tokens(number), tokens(number)) for number in range(ROUNDS)])
    for _ in range(ROUNDS):
        engine.train_batch(data)
    copies = engine.stashing_optimizer.versions
    held = [storage.nbytes() for copy in (*copies._held.values(), *copies._spare) for storage in copy.storages]
    found = {"held": sum(held), "bytes": sum(p.nbytes for p in trained)}
    found["trained"] = engine.full_state_dict(exclude_frozen_parameters=True)
    cases.end(engine)
    return found


@pytest.mark.mp
def test_layers_with_adapters_in_a_pipeline_module(worlds: Worlds) -> None:
    reports = worlds.run(STAGES, by_train_batch)
    assert [report["held"] for report in reports] == [reports[0]["bytes"], 0]
    model = adapted()
    wanted = replayed(
        1, [1, 0], "", drained=False, calls=[{"input_ids": tokens(n), "labels": tokens(n)} for n in range(ROUNDS)]
    )
    model.load_state_dict(wanted, strict=False)
    expected = {
        f"{number}.{name}": parameter.detach()
        for number, layer in enumerate(layers(model))
        for name, parameter in layer.named_parameters()
        if parameter.requires_grad
    }
    assert difference(reports[0]["trained"], expected) <= 1e-6
    assert difference(reports[1]["trained"], expected) <= 1e-6


def refuse() -> None:
    rounds(started(adapted(AdaLoraConfig(**LORA, total_step=9)), json(1)), 0, 1)


@pytest.mark.mp
def test_adalora_is_refused_on_every_rank(worlds: Worlds) -> None:
    """Its loss looks at the adapters of all layers; the line names what to use."""
    with pytest.raises(CaseFailed) as failed:
        worlds.run(STAGES, refuse)
    assert len(failed.value.errors) == STAGES
    assert all("write LoraConfig, with rank_pattern" in text for text in failed.value.errors.values())
