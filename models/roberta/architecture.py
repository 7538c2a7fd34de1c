"""Hugging Face's ``RobertaForMaskedLM`` in terms of the pipeline's layers."""

from typing import Any

from transformers import RobertaConfig, RobertaForMaskedLM

from ds_vpipe.models.architecture import Architecture, LayerNames
from ds_vpipe.models.bert.architecture import encoder_names
from ds_vpipe.models.roberta.layers import roberta_layers, tied_roberta_layers

HEADS = {"dense.": "lm_head.dense.", "layer_norm.": "lm_head.layer_norm."}


def _layers(config: RobertaConfig, seed: int, tied: bool) -> list[Any]:
    return (tied_roberta_layers if tied else roberta_layers)(config, seed)


def _names(config: RobertaConfig, tied: bool) -> list[LayerNames]:
    return encoder_names("roberta.", config.num_hidden_layers, HEADS, "lm_head.decoder.", "lm_head.bias", tied)


ROBERTA = Architecture(
    model=RobertaForMaskedLM,
    base="roberta.",
    layers=_layers,
    names=_names,
    tied={"lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight"},
    same={"lm_head.decoder.bias": "lm_head.bias"},
    optional=("lm_head.",),
)
