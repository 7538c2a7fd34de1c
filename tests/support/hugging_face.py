"""Small random Hugging Face models in folders, and BERT's pipeline layers run one after the other in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    PretrainedConfig,
    RobertaConfig,
    RobertaForMaskedLM,
)

from ds_vpipe.models.bert.layers import WORDS
from ds_vpipe.models.hugging_face import model_state

VOCABULARY, LENGTH = 83, 12
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, tuple[type[Any], type[PretrainedConfig], dict[str, Any]]] = {
    "bert": (
        BertForPreTraining,
        BertConfig,
        {"max_position_embeddings": 16, "intermediate_size": 48, **_NO_DROPOUT},
    ),
    "roberta": (
        RobertaForMaskedLM,
        RobertaConfig,
        {"max_position_embeddings": LENGTH + 2, "intermediate_size": 48, "pad_token_id": 1, **_NO_DROPOUT},
    ),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config,
        {
            "n_positions": 16,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
}


def config(kind: str, tied: bool, **changes: Any) -> Any:
    _, make, fields = MODELS[kind]
    common = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return make(**common, **fields, tie_word_embeddings=tied, **changes)


def save(kind: str, tied: bool, folder: Path, model: type[Any] | None = None, **options: Any) -> Any:
    """A model with every weight random, saved into ``folder``."""
    torch.manual_seed(0)
    made = (MODELS[kind][0] if model is None else model)(config(kind, tied)).eval()
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


def call(kind: str) -> dict[str, Tensor]:
    """Arguments of the Hugging Face model, with labels."""
    ids, types, mask, positions = bert_inputs(pad=1 if kind == "roberta" else 0)
    if kind == "gpt2":
        return {"input_ids": ids, "labels": ids}
    labels = torch.full_like(ids, -100).scatter(1, positions, ids.gather(1, positions))
    given = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
    return given | ({"token_type_ids": types, "next_sentence_label": torch.tensor([0, 1, 0])} if kind == "bert" else {})


def wanted(model: Any) -> tuple[Tensor, Tensor | None]:
    """What a Hugging Face BERT gives for :func:`bert_inputs`: logits, and next-sentence logits where it has them."""
    ids, types, mask, positions = bert_inputs()
    with torch.no_grad():
        out = model(ids, attention_mask=mask.long(), token_type_ids=types)
    logits = out.prediction_logits if "prediction_logits" in out else out.logits
    return logits[torch.arange(len(positions))[:, None], positions], out.get("seq_relationship_logits")


def layers(specs: list[Any]) -> list[nn.Module]:
    """BERT's layers, with their tie."""
    built: list[nn.Module] = [spec.build().eval() for spec in specs]
    if isinstance(specs[-1], TiedLayerSpec):
        embeddings: Any = built[-1].get_submodule(WORDS.rpartition(".")[0])
        embeddings.weight = built[0].get_parameter(WORDS)
    return built


def run(built: list[nn.Module], value: Any) -> Any:
    """Logits and next-sentence logits."""
    with torch.no_grad():
        return nn.Sequential(*built)(value)


def assert_equal(found: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor | None]) -> None:
    """Logits to 1e-5, and next-sentence logits where they are expected."""
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    if expected[1] is not None:
        torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-5)


def save_checkpoint(built: list[nn.Module], folder: Path, config: Any) -> None:
    """The files that DeepSpeed writes for a pipeline without an optimizer."""
    folder.mkdir(parents=True)
    for index, module in enumerate(built):
        torch.save(module.state_dict(), folder / f"layer_{index:02d}-model_states.pt")
    torch.save({"optimizer": None, **model_state(config)}, folder / "mp_rank_00_model_states.pt")
