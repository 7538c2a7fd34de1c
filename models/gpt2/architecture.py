"""Hugging Face's ``GPT2LMHeadModel`` in terms of the pipeline's layers."""

from transformers import GPT2Config, GPT2LMHeadModel

from ds_vpipe.models.architecture import Architecture, LayerNames
from ds_vpipe.models.gpt2.layers import gpt2_layers


def _names(config: GPT2Config, tied: bool) -> list[LayerNames]:
    words, positions = {"wte.": "transformer.wte."}, {"wpe.": "transformer.wpe."}
    norm = {"ln_f.": "transformer.ln_f."}
    blocks: list[LayerNames] = [{"block.": f"transformer.h.{index}."} for index in range(config.num_hidden_layers)]
    if tied:
        return [words, positions, *blocks, norm, words]
    return [words | positions, *blocks, norm | {"lm_head.": "lm_head."}]


GPT2 = Architecture(
    model=GPT2LMHeadModel,
    base="transformer.",
    layers=gpt2_layers,
    names=_names,
    tied={"lm_head.weight": "transformer.wte.weight"},
    optional=("lm_head.",),
)
