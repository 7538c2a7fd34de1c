"""What has to be known of a Hugging Face model to train its weights in a pipeline and to give them back.

It is data: how the model is cut into pipeline layers, and what the parameters of each layer are called there.
:mod:`ds_vpipe.models.pretrained` reads weights by it, :mod:`ds_vpipe.models.export` writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

MODEL_CONFIG = "model_config"  # in checkpoints

LayerNames = Mapping[str, str]
"""Names within a pipeline layer to names in the Hugging Face model; those that end in a dot are prefixes of both."""


@dataclass(frozen=True)
class Architecture:
    """One Hugging Face model class as pipeline layers.

    Attributes:
        model: the class, which says what weights are exported as.
        base: prefix of the part without heads, which checkpoints of that part alone leave out.
        layers: specifications of the pipeline layers, from configuration, seed and whether the decoder is tied.
        names: of each of these layers, from configuration and whether the decoder is tied.
        tied: the decoder's weight and the embeddings that it is where ``tie_word_embeddings`` is set.
        same: other names of one tensor; checkpoints have either, or both.
        older: ends of names as older checkpoints have them.
        optional: prefixes of what a checkpoint may lack, and is then initialised.
    """

    model: type[PreTrainedModel]
    base: str
    layers: Callable[[Any, int, bool], list[Any]]
    names: Callable[[Any, bool], list[LayerNames]]
    tied: Mapping[str, str]
    same: Mapping[str, str] = field(default_factory=dict)
    older: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()

    @property
    def config_type(self) -> Any:
        """The class of the configuration."""
        return self.model.config_class

    @property
    def model_type(self) -> str:
        """As ``config.json`` names it."""
        return str(self.config_type.model_type)


def full_name(names: LayerNames, name: str) -> str | None:
    """What a layer's parameter is called in the Hugging Face model; None if ``names`` does not say it."""
    for own, theirs in names.items():
        if name == own or (own.endswith(".") and name.startswith(own)):
            return theirs + name[len(own) :]
    return None


def model_state(config: PreTrainedConfig) -> dict[str, Any]:
    """What to give to ``save_checkpoint(client_state=...)``, so that the checkpoint says which model it is of."""
    return {MODEL_CONFIG: config.to_dict()}
