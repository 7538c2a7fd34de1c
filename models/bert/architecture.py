"""Hugging Face's ``BertForPreTraining`` in terms of the pipeline's layers."""

from typing import Any

from transformers import BertConfig, BertForPreTraining

from ds_vpipe.models.architecture import Architecture, LayerNames
from ds_vpipe.models.bert.layers import bert_layers
from ds_vpipe.models.bert.tied_layers import tied_bert_layers

HEADS = {
    "transform.": "cls.predictions.transform.",
    "pooler.": "bert.pooler.",
    "seq_relationship.": "cls.seq_relationship.",
}


def encoder_names(
    base: str, encoder_layers: int, heads: LayerNames, decoder: str, bias: str, tied: bool
) -> list[LayerNames]:
    """Names for the cut of :mod:`ds_vpipe.models.bert.layers`, or with a tied decoder for that of ``tied_layers``.

    Args:
        base: prefix of embeddings and encoder, such as ``"bert."``.
        encoder_layers: L.
        heads: names of the heads but for the decoder.
        decoder: prefix of the decoder.
        bias: of a tied decoder.
        tied: whether it is.
    """

    def sub_layer(index: int) -> LayerNames:
        place = f"{base}encoder.layer.{index // 2}."
        own = ("intermediate.", "output.") if index % 2 else ("attention.",)
        return {name: place + name for name in own}

    first = {"embeddings.": f"{base}embeddings.", **sub_layer(0)}
    middle = [sub_layer(index) for index in range(1, 2 * encoder_layers)]
    if not tied:
        return [first, *middle, {**heads, "decoder.": decoder}]
    words = {"word_embeddings.": f"{base}embeddings.word_embeddings."}
    return [words, first, *middle, heads, words, {"bias": bias}]


def _layers(config: BertConfig, seed: int, tied: bool) -> list[Any]:
    return (tied_bert_layers if tied else bert_layers)(config, seed)


def _names(config: BertConfig, tied: bool) -> list[LayerNames]:
    decoder = "cls.predictions.decoder."
    return encoder_names("bert.", config.num_hidden_layers, HEADS, decoder, "cls.predictions.bias", tied)


BERT = Architecture(
    model=BertForPreTraining,
    base="bert.",
    layers=_layers,
    names=_names,
    tied={"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"},
    same={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    older={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
    optional=("bert.pooler.", "cls."),
)
