"""Small models of the architectures of Hugging Face's library, made by rules: class, sizes, inputs."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto

SAMPLES, LENGTH, LABELS, VOCABULARY, IMAGE, MOST_PARAMETERS = 2, 12, 3, 96, 64, 20_000_000

# Heads in the order in which a model type's first is taken, and the inputs of each.
HEADS: dict[str, tuple[str, ...]] = {
    "SEQ_TO_SEQ_CAUSAL_LM": ("text", "token labels"),
    "MASKED_LM": ("text", "token labels"),
    "CAUSAL_LM": ("text", "token labels"),
    "SEQUENCE_CLASSIFICATION": ("text", "class labels"),
    "TOKEN_CLASSIFICATION": ("text", "class labels of tokens"),
    "QUESTION_ANSWERING": ("text", "positions"),
    "IMAGE_CLASSIFICATION": ("image", "class labels"),
    "SEMANTIC_SEGMENTATION": ("image", "class labels of pixels"),
    "MASKED_IMAGE_MODELING": ("image", "masked patches"),
    "VIDEO_CLASSIFICATION": ("video", "class labels"),
    "CTC": ("audio", "token labels"),
    "AUDIO_CLASSIFICATION": ("audio", "class labels"),
    "SPEECH_SEQ_2_SEQ": ("audio", "token labels"),
    "ZERO_SHOT_IMAGE_CLASSIFICATION": ("text", "image", "return_loss"),
}

# Numbers of layers and sizes of heads, in the order in which they are tried until there is a loss: hybrids need several
# layers to have each kind of them.
VARIANTS = ((4, 16), (4, 8), (6, 16), (8, 16), (12, 16))
LAYERS = re.compile(r"(num_|n_)?(.*_)?(layers?|blocks|self_attends_per_block)|layers_num|depth")
HEAD_SIZE = re.compile(r"(.*_)?(head_dim|head_size|dim_head|d_head|d_kv|kv_channels|key_dim)")

# Sizes by the names of settings; the first pattern that fits decides, and nothing becomes larger.
SIZES = [
    (r"(.*_)?vocab_size(_.*)?|type_vocab_sizes", VOCABULARY),
    (r"(.*_)?(n_group|n_groups|topk_group)", 1),
    (r".*_per_tok(en)?|(.*_)?(top_?k|moe_k|moe_topk|topk.*)", 2),
    (r"(.*_)?(experts|num_experts|expert_num)(_.*)?|moe_num_.*", 4),
    (r"(num_)?(.*_)?(kv|key_value|key)(_attention)?_heads|multi_query_group_num|num_groups", 2),
    (r"(num_)?(.*_)?heads?(_(?!dim|size).*)?", 4),
    (r"rotary_dim", 8),
    (r"depths|num_block_repeats|stage_num.*|block_sizes|focal_levels", 2),
    (r"(moe|expert|shared).*(intermediate_size|hidden_size)", 16),
    (r"(.*_)?(intermediate_size|ffn_dim|ffn_size|ffn_hidden_size|d_ff|dff|dim_ff|d_inner|n_inner|mlp_dim)(_.*)?", 64),
    (r"(.*_)?(lora_rank|rank|state_size|d_state|d_rel)", 8),
    (r"max_.*(position|positions|length|embeddings).*|n_positions|n_ctx|max_seq_len|context_length", 64),
    (r"(.*_)?(image_size|input_size)", IMAGE),
    (r"(.*_)?patch_size", 8),
    (r"num_frames|frames_per_clip", 4),
    (r"window_size", 2),
    (
        r"(.*_)?(sliding_window|window_size|chunk_size|block_size|context_size|attention_window|local_attention)(_.*)?",
        8,
    ),
    (r"num_(mel_bins|conv_pos_embeddings|codevectors.*|negatives)|conv_kernel_size|(.*_)?depthwise_kernel_size", 16),
    (r"num_conv_pos_embedding_groups", 4),
    (r"conv_dim|tdnn_dim|(.*_)?conv_channels", 16),
    (
        r"(.*_)?(hidden_sizes?|d_model|n_embd|dim|embed_dims?|hidden_dim|embedding_size|emb_dim|embedding_dim|channels"
        r"|emb_size|embd_pdim|width|dims|hidden_channels|out_features|proj_size|d_embed|units|hidden_size_.*)",
        32,
    ),
]
# Of settings that have no default, or one that is no number.
OTHERS = {"vocab_size": VOCABULARY, "num_experts_per_tok": 2, "attention_types": [[["global", "local"], 2]]}
KEPT = re.compile(
    r"num_channels|in_chans|in_channels|out_channels|stem_channels|num_labels|.*_ids?|.*_index|out_indices|out_features"
    r"|.*kernel.*"
)
SPECIAL = re.compile(r".*_token_(id|index)|.*_idx")


class NotByRuleError(Exception):
    """An architecture that the rules make no small model of; says why."""


@dataclasses.dataclass
class Specimen:
    """A small model with a call of it.

    Attributes:
        model: in training mode.
        call: keyword arguments of its forward.
    """

    model: nn.Module
    call: dict[str, Any]


def architectures() -> dict[str, tuple[str, str]]:
    """Head and class of every model type that has one of :data:`HEADS`; of types with one class the shortest."""
    found: dict[str, tuple[str, str, str]] = {}
    for kind in sorted(CONFIG_MAPPING, key=lambda kind: (len(kind), kind)):
        for head in HEADS:
            names = getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES").get(kind)
            if names is not None:
                name = names if isinstance(names, str) else names[0]
                found.setdefault(name, (kind, head, name))
                break
    return {kind: (head, name) for kind, head, name in sorted(found.values())}


def specimen(kind: str, head: str, name: str, variant: tuple[int, int] = VARIANTS[0]) -> Specimen:
    """A small model with random weights and inputs, always the same.

    Args:
        kind: model type.
        head: of :data:`HEADS`.
        name: of the class.
        variant: of :data:`VARIANTS`.

    Raises:
        NotByRuleError: the rules do not make one whose loss is finite.
    """
    model_class = getattr(transformers, name)
    try:
        config = small(model_class.config_class or CONFIG_MAPPING[kind], *variant)
    except Exception as error:
        raise NotByRuleError(f"no small config: {one_line(error)}") from None
    torch.manual_seed(0)
    _guard_size(model_class, config)
    try:
        model = model_class._from_config(config)
    except ImportError as error:
        raise NotByRuleError(f"needs a package: {one_line(error)}") from None
    except Exception as error:
        raise NotByRuleError(f"cannot be built from a small config: {one_line(error)}") from None
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in model.parameters():  # no zero biases, no unit scales: every weight must arrive
            if parameter.dim() <= 1 and parameter.is_floating_point():
                nn.init.normal_(parameter.data, float(parameter.data.mean()), 0.1)
    return Specimen(model, inputs(model, head))


def small(kind: type[PreTrainedConfig], layers: int, head_size: int) -> PreTrainedConfig:
    """A configuration of the class with the sizes of :data:`SIZES`; other settings have their defaults."""
    settings: dict[str, Any] = {}
    default: Any = None
    for field in dataclasses.fields(kind):
        value = field.default if field.default is not dataclasses.MISSING else None
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        if field.name in kind.sub_configs:
            sub: Any = kind.sub_configs[field.name]
            if sub is AutoConfig:
                default = kind() if default is None else default
                sub = type(getattr(default, field.name))
            if issubclass(sub, PreTrainedConfig):
                settings[field.name] = small(sub, layers, head_size)
            continue
        new = _shrunk(field.name, value, kind, layers, head_size)
        if new is not value:
            settings[field.name] = new
    return kind(**settings | _special(kind))


def _special(kind: Any) -> dict[str, Any]:
    found = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "num_labels": LABELS}
    free = 3
    for name in sorted({field.name for field in dataclasses.fields(kind)} - set(found)):
        default = getattr(kind, name, None)
        if SPECIAL.fullmatch(name) and isinstance(default, int) and not isinstance(default, bool) and default > 0:
            found[name], free = free, free + 1
    return found


def _shrunk(name: str, value: Any, kind: Any, layers: int, head_size: int) -> Any:
    if KEPT.fullmatch(name):
        return value
    if name in OTHERS and type(value) is not int:
        return OTHERS[name]
    if name.endswith("key_value_heads") and value == getattr(kind, "num_attention_heads", None):
        name = "num_attention_heads"
    size = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
    size = layers if LAYERS.fullmatch(name) else head_size if HEAD_SIZE.fullmatch(name) else size
    if name == "head_dim" and value is None and head_size != VARIANTS[0][1]:
        return head_size
    if size is None:
        return value
    if isinstance(value, (list, tuple)) and value and all(type(each) is int for each in value):
        if max(value) <= size:
            return value
        if size < 16 or LAYERS.fullmatch(name):
            return type(value)(min(each, 2) for each in value)
        # Relations between stages of a pyramid stay; eight divides what heads and groups have to divide.
        return type(value)(max(8, each * 2 * size // max(value) // 8 * 8) for each in value)
    if type(value) is int and value > size:
        return size
    return value


def inputs(model: Any, head: str) -> dict[str, Any]:
    """Keyword arguments for a call with a loss, for the head's kind and as far as the forward takes them."""
    taken = inspect.signature(model.forward).parameters
    config = model.config
    generator = torch.Generator().manual_seed(1)

    def integers(high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    made: dict[str, Any] = {}
    for part in HEADS[head]:
        made |= _PARTS[part](config, taken, integers, normal)
    return {name: value for name, value in made.items() if name in taken or name == "labels"}


Maker = Callable[[Any, Any, Callable[..., Tensor], Callable[..., Tensor]], dict[str, Any]]


def _text(config: Any, taken: Any, integers: Any, normal: Any) -> dict[str, Any]:
    lengths = torch.tensor([LENGTH, LENGTH - 4])[:, None]
    mask = (torch.arange(LENGTH) < lengths).long()
    vocabulary = getattr(config.get_text_config(), "vocab_size", None) or VOCABULARY
    ids = integers(vocabulary, SAMPLES, LENGTH, low=vocabulary // 2)
    ids = torch.where(mask.bool(), ids, 0)
    ids[torch.arange(SAMPLES), lengths[:, 0] - 1] = 2
    return {"input_ids": ids, "attention_mask": mask}


def _image(config: Any, taken: Any, integers: Any, normal: Any) -> dict[str, Any]:
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", IMAGE)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return {"pixel_values": normal(SAMPLES, getattr(config, "num_channels", 3), height, width)}


def _video(config: Any, taken: Any, integers: Any, normal: Any) -> dict[str, Any]:
    frames = getattr(config, "num_frames", getattr(config, "frames_per_clip", 4))
    size = getattr(config, "image_size", getattr(config, "crop_size", IMAGE))
    return {
        name: normal(SAMPLES, frames, getattr(config, "num_channels", 3), size, size)
        for name in ("pixel_values", "pixel_values_videos")
    }


def _audio(config: Any, taken: Any, integers: Any, normal: Any) -> dict[str, Any]:
    bins = next((getattr(config, name) for name in _BINS if getattr(config, name, None)), 16)
    frames = 2 * getattr(config, "max_source_positions", 0) or 64
    features = normal(SAMPLES, bins, frames) if type(config).__name__ == "WhisperConfig" else normal(SAMPLES, 64, bins)
    return {"input_values": normal(SAMPLES, 4000), "input_features": features}


_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim")
_PARTS: dict[str, Maker] = {
    "text": _text,
    "image": _image,
    "video": _video,
    "audio": _audio,
    "token labels": lambda config, taken, integers, normal: {"labels": integers(28, SAMPLES, LENGTH, low=3)},
    "class labels": lambda config, taken, integers, normal: {"labels": integers(LABELS, SAMPLES)},
    "class labels of tokens": lambda config, taken, integers, normal: {"labels": integers(LABELS, SAMPLES, LENGTH)},
    "positions": lambda config, taken, integers, normal: {
        "start_positions": integers(4, SAMPLES),
        "end_positions": integers(8, SAMPLES, low=4),
    },
    "class labels of pixels": lambda config, taken, integers, normal: {
        "labels": integers(LABELS, SAMPLES, *_image(config, taken, integers, normal)["pixel_values"].shape[2:])
    },
    "masked patches": lambda config, taken, integers, normal: {
        "bool_masked_pos": integers(2, SAMPLES, (config.image_size // config.patch_size) ** 2).bool()
    },
    "return_loss": lambda config, taken, integers, normal: {"return_loss": True},
}


def _guard_size(model_class: Any, config: Any) -> None:
    try:
        with torch.device("meta"):
            shape = model_class(config)
    except Exception:
        return  # some constructors look at values; the real one says what is wrong
    size = sum(parameter.numel() for parameter in shape.parameters())
    if size > MOST_PARAMETERS:
        raise NotByRuleError(f"could not be shrunk: {size / 1e6:.0f} million parameters")


def one_line(error: BaseException) -> str:
    """Type and beginning of the message of an error."""
    text = " ".join(" ".join(str(error).split())[:160].split())
    return f"{type(error).__name__}: {text}"
