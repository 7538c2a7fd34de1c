"""BERT as ``2L + 1`` pipeline layers, built from Hugging Face's own modules.

Layer 0 is the embeddings and the first attention sub-layer, then feed-forward and attention sub-layers alternate, and
the last layer holds both heads. Every layer ends at a residual addition (but for the heads), so one hidden-state
tensor crosses each boundary. The cut is that of the published vPipe, PipeDream and GPipe splits for BERT-Large
(49 layers) and the 48-layer BERT (97 layers).

What travels, with B sequences per micro-batch, sequence length S, P prediction slots, hidden size H, vocabulary V:

=============  ====================================================================================================
into layer 0   ``input_ids`` int64 [B, S], ``token_type_ids`` int64 [B, S], ``padding_mask`` bool [B, S] (true =
               token), ``masked_positions`` int64 [B, P] (unused slots: 0)
boundary       ``hidden`` float [B, S, H], ``padding_mask`` bool [B, S], ``masked_positions`` int64 [B, P]
out of last    ``masked_lm_logits`` float [B, P, V], ``next_sentence_logits`` float [B, 2]
=============  ====================================================================================================

Computing logits at the P masked positions only, instead of all S, makes the last stage S / P times cheaper in both
memory and time. The decoder is the word embeddings where ``tie_word_embeddings`` of the configuration says so, which is
Hugging Face's default: both ends of the pipeline then are ``TiedLayerSpec``, and the first stage owns the weight.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from transformers import BertConfig
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.bert.modeling_bert import (
    BertAttention,
    BertEmbeddings,
    BertIntermediate,
    BertOutput,
    BertPooler,
    BertPredictionHeadTransform,
)

from ds_vpipe.models.hugging_face import StoredWeights

WORDS = "embeddings.word_embeddings.weight"  # the tied weight, in the first layer and in the last

DEFAULT_ATTENTION = "sdpa"

ModelInput = tuple[Tensor, Tensor, Tensor, Tensor]
Boundary = tuple[Tensor, Tensor, Tensor]
ModelOutput = tuple[Tensor, Tensor]


class BertLayer(nn.Module):
    """A pipeline layer, initialised from a seed of its own.

    Args:
        config: of the model.
        seed: initial weights depend on it alone, and so neither on the partition nor on the number of stages.
        names: prefixes of the layer's parameters, with what Hugging Face calls them.
        weights: overwrite the initial ones.
    """

    def __init__(
        self, config: BertConfig, seed: int, names: Mapping[str, str], weights: StoredWeights | None = None
    ) -> None:
        super().__init__()
        self.config = config
        # Layers are built on the CPU; devices=[] keeps fork_rng from touching every GPU of the machine.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.build(config)
            initialise(self, config)
        if weights is not None:
            for name, tensor in self.state_dict(keep_vars=True).items():
                weights.fill(hugging_face_name(names, name), tensor)

    def build(self, config: BertConfig) -> None:
        """Make the modules."""
        raise NotImplementedError

    def attend(self, attention: nn.Module, inputs: Boundary) -> Boundary:
        """Attend, add and normalise: boundary to boundary."""
        hidden, padding_mask, masked_positions = inputs
        # Only [B, S] booleans cross stage boundaries; each attention layer expands them in the form its implementation
        # wants. Leaving the mask out where nothing is padded would need a device-to-host sync per layer: never skip it.
        mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=hidden, attention_mask=padding_mask, allow_is_bidirectional_skip=False
        )
        return attention(hidden, mask)[0], padding_mask, masked_positions


class EmbeddingAttentionLayer(BertLayer):
    """Pipeline layer 0: embeddings and the first attention sub-layer."""

    def build(self, config: BertConfig) -> None:
        self.embeddings = BertEmbeddings(config)
        self.attention = BertAttention(config)

    def forward(self, inputs: ModelInput) -> Boundary:
        input_ids, token_type_ids, padding_mask, masked_positions = inputs
        hidden = self.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)
        return self.attend(self.attention, (hidden, padding_mask, masked_positions))


class AttentionLayer(BertLayer):
    """Pipeline layers 2, 4, ...: the attention sub-layer of one encoder layer."""

    def build(self, config: BertConfig) -> None:
        self.attention = BertAttention(config)

    def forward(self, inputs: Boundary) -> Boundary:
        return self.attend(self.attention, inputs)


class FeedForwardLayer(BertLayer):
    """Pipeline layers 1, 3, ...: the feed-forward sub-layer of one encoder layer."""

    def build(self, config: BertConfig) -> None:
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config)

    def forward(self, inputs: Boundary) -> Boundary:
        hidden, padding_mask, masked_positions = inputs
        return self.output(self.intermediate(hidden), hidden), padding_mask, masked_positions


class HeadsLayer(BertLayer):
    """Last pipeline layer: masked-LM logits at the masked positions and next-sentence logits from the first token.

    Its decoder is the word embeddings, under the name that they have in layer 0, if the configuration ties them.
    """

    def build(self, config: BertConfig) -> None:
        self.transform = BertPredictionHeadTransform(config)
        if config.tie_word_embeddings:
            words = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
            self.embeddings = nn.ModuleDict({"word_embeddings": words})
            self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        else:
            self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.pooler = BertPooler(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def forward(self, inputs: Boundary) -> ModelOutput:
        hidden, _, masked_positions = inputs
        masked = hidden.gather(1, masked_positions.unsqueeze(-1).expand(-1, -1, hidden.size(-1)))
        vectors, next_sentence = self.transform(masked), self.seq_relationship(self.pooler(hidden))
        if not self.config.tie_word_embeddings:
            return self.decoder(vectors), next_sentence
        words: Any = self.embeddings["word_embeddings"]
        return nn.functional.linear(vectors, words.weight, self.bias), next_sentence


def bert_layers(config: BertConfig, seed: int = 0, weights: StoredWeights | None = None) -> list[LayerSpec]:
    """The ``2L + 1`` layer specifications of a BERT for pre-training.

    Layer i is initialised from ``seed + i``, by the rank that it belongs to.
    """
    # Hugging Face's models set the default when they are built. Layers built alone would attend without any mask.
    if config._attn_implementation is None:
        config._attn_implementation = DEFAULT_ATTENTION
    tied, last = config.tie_word_embeddings, 2 * config.num_hidden_layers
    inner = [FeedForwardLayer if index % 2 else AttentionLayer for index in range(1, last)]
    kinds = [EmbeddingAttentionLayer, *inner, HeadsLayer]
    specs: list[LayerSpec] = []
    for index, (kind, names) in enumerate(zip(kinds, layer_names(config), strict=True)):
        given = (config, seed + index, names, weights)
        ends = tied and index in (0, last)
        specs.append(TiedLayerSpec("words", kind, *given, tied_weight_attr=WORDS) if ends else LayerSpec(kind, *given))
    return specs


def layer_names(config: BertConfig) -> Sequence[Mapping[str, str]]:
    """For every layer, prefixes of its parameters with what ``BertForPreTraining`` calls them."""

    def sub_layer(index: int) -> dict[str, str]:
        place = f"bert.encoder.layer.{index // 2}."
        return {name: place + name for name in (("intermediate.", "output.") if index % 2 else ("attention.",))}

    heads = {"transform.": "cls.predictions.transform.", "pooler.": "bert.pooler.",
             "seq_relationship.": "cls.seq_relationship."}  # fmt: skip
    if config.tie_word_embeddings:
        heads |= {"embeddings.": "bert.embeddings.", "bias": "cls.predictions.bias"}
    else:
        heads |= {"decoder.": "cls.predictions.decoder."}
    inner = [sub_layer(index) for index in range(1, 2 * config.num_hidden_layers)]
    return [{"embeddings.": "bert.embeddings.", **sub_layer(0)}, *inner, heads]


def hugging_face_name(names: Mapping[str, str], name: str) -> str:
    """The name in ``BertForPreTraining`` of a layer's parameter.

    Raises:
        LookupError: ``names`` do not say it.
    """
    own = next((prefix for prefix in names if name.startswith(prefix)), None)
    if own is None:
        raise LookupError(f"parameter {name} of a layer with {', '.join(names)}")
    return names[own] + name.removeprefix(own)


@torch.no_grad()
def initialise(layer: nn.Module, config: BertConfig) -> None:
    """BERT's initialisation: normal weights of deviation ``initializer_range``, zero biases, unit LayerNorm scales."""
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=config.initializer_range)
            module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(std=config.initializer_range)
            if module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()
