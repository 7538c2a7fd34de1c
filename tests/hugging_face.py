"""Small random Hugging Face models in folders, and pipeline layers run one after the other in this process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn

from ds_vpipe.models.architecture import Architecture, model_state
from ds_vpipe.models.bert.architecture import BERT
from ds_vpipe.models.gpt2.architecture import GPT2
from ds_vpipe.models.roberta.architecture import ROBERTA

VOCABULARY, LENGTH = 83, 12
MODELS: dict[str, tuple[Architecture, dict[str, Any]]] = {
    "bert": (BERT, {"max_position_embeddings": 16, "intermediate_size": 48}),
    "roberta": (
        ROBERTA,
        {"max_position_embeddings": LENGTH + 2, "intermediate_size": 48, "type_vocab_size": 1, "pad_token_id": 1},
    ),
    "gpt2": (GPT2, {"n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}),
}


def config(kind: str, tied: bool, **changes: Any) -> Any:
    architecture, fields = MODELS[kind]
    common = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return architecture.model.config_class(**common, **fields, tie_word_embeddings=tied, **changes)


def save(kind: str, tied: bool, folder: Path, model: type[Any] | None = None, **options: Any) -> Any:
    """A model with every weight random, saved into ``folder``."""
    torch.manual_seed(0)
    made = (MODELS[kind][0].model if model is None else model)(config(kind, tied)).eval()
    for parameter in made.parameters():  # no zero biases, no unit scales: every weight must arrive
        nn.init.normal_(parameter, std=0.2)
    made.save_pretrained(folder, **options)
    return made


def bert_inputs(pad: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three sequences, two of them padded, with four masked positions each."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCABULARY, (3, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.tensor([LENGTH, 7, 9])[:, None]
    types = (torch.arange(LENGTH) > 4).long().expand(3, -1).contiguous()
    return ids.where(mask, pad), types, mask, torch.tensor([[1, 5, 11, 0], [2, 6, 0, 0], [1, 2, 3, 8]])


def at_masked(logits: Tensor, positions: Tensor) -> Tensor:
    return logits[torch.arange(len(positions))[:, None], positions]


def wanted(kind: str, model: Any) -> tuple[Tensor, Tensor | None]:
    """What the Hugging Face model gives for :func:`inputs`: logits, and next-sentence logits where it has them."""
    with torch.no_grad():
        if kind == "gpt2":
            return model(inputs(kind)).logits, None
        ids, types, mask, positions = inputs(kind)
        given = {"token_type_ids": types} if kind == "bert" else {}
        out = model(ids, attention_mask=mask.long(), **given)
        logits = out.prediction_logits if "prediction_logits" in out else out.logits
        return at_masked(logits, positions), out.get("seq_relationship_logits")


def inputs(kind: str) -> Any:
    return bert_inputs()[0] if kind == "gpt2" else bert_inputs(config(kind, True).pad_token_id)


def layers(specs: list[Any]) -> list[tuple[nn.Module, Callable[[Any], Any]]]:
    """Every layer with the function that runs it; tied ones are built once."""
    tied: dict[str, nn.Module] = {}
    built: list[tuple[nn.Module, Callable[[Any], Any]]] = []
    for spec in specs:
        if isinstance(spec, TiedLayerSpec):
            module = tied[spec.key] if spec.key in tied else tied.setdefault(spec.key, spec.build().eval())
            built.append((module, module if spec.forward_fn is None else partial(spec.forward_fn, module)))
        else:
            module = spec.build().eval()
            built.append((module, module))
    return built


def run(built: list[tuple[nn.Module, Callable[[Any], Any]]], value: Any) -> tuple[Tensor, Tensor | None]:
    """Logits, and next-sentence logits where the model has them."""
    with torch.no_grad():
        for _, forward in built:
            value = forward(value)
    return value if isinstance(value, tuple) else (value, None)


def assert_equal(found: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor | None]) -> None:
    """Logits to 1e-5, and next-sentence logits where they are expected."""
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    if expected[1] is not None:
        torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-5)


def save_checkpoint(built: list[tuple[nn.Module, Callable[[Any], Any]]], folder: Path, config: Any) -> None:
    """The files that DeepSpeed writes for a pipeline without an optimizer."""
    folder.mkdir(parents=True)
    for index, (module, forward) in enumerate(built):
        if module is forward:
            torch.save(module.state_dict(), folder / f"layer_{index:02d}-model_states.pt")
    torch.save({"optimizer": None, **model_state(config)}, folder / "mp_rank_00_model_states.pt")
