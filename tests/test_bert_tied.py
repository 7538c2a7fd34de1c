"""BERT with its decoder tied to the word embeddings, against Hugging Face's model and against the replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cases
import pytest
import reference
import torch
from test_bert_layers import BATCH, LENGTH, SLOTS, inputs, small_config
from test_exactness import OPTIMIZERS, adamw, difference
from torch import Tensor, nn
from transformers import BertForPreTraining
from worlds import Worlds

from ds_vpipe.models.bert.layers import AttentionLayer, FeedForwardLayer
from ds_vpipe.models.bert.loss import PretrainingLoss
from ds_vpipe.models.bert.tied_layers import WordEmbeddings, decode, tied_bert_layers
from ds_vpipe.partition import uniform_partition
from ds_vpipe.schedules.schedule import default_depths


class Decoder(WordEmbeddings):
    """The tied layer in its second place."""

    def forward(self, value: Any) -> Any:
        return decode(self, value)


def built(layers: int = 2) -> list[nn.Module]:
    config = small_config(layers=layers)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    modules = [spec.build() for spec in tied_bert_layers(config)]
    modules[-2] = Decoder(config, 0)
    modules[-2].load_state_dict(modules[0].state_dict())
    return modules


def specs() -> list[Any]:
    config = small_config(layers=2)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return tied_bert_layers(config)


def test_layers_compute_what_hugging_face_computes() -> None:
    config = small_config()
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    wanted = BertForPreTraining(config).eval()
    nn.init.normal_(wanted.cls.predictions.decoder.bias)
    assert wanted.cls.predictions.decoder.weight is wanted.bert.embeddings.word_embeddings.weight
    modules = built(layers=3)
    others = {n: v for n, v in wanted.bert.embeddings.state_dict().items() if n != "word_embeddings.weight"}
    words: Any = modules[0]
    words.word_embeddings.load_state_dict(wanted.bert.embeddings.word_embeddings.state_dict())
    modules[-2].load_state_dict(words.state_dict())
    first: Any = modules[1]
    first.embeddings.load_state_dict(others)
    first.attention.load_state_dict(wanted.bert.encoder.layer[0].attention.state_dict())
    for index, module in enumerate(modules[2:-3], 1):
        layer = wanted.bert.encoder.layer[index // 2]
        if isinstance(module, AttentionLayer):
            module.attention.load_state_dict(layer.attention.state_dict())
        elif isinstance(module, FeedForwardLayer):
            module.intermediate.load_state_dict(layer.intermediate.state_dict())
            module.output.load_state_dict(layer.output.state_dict())
    heads: Any = modules[-3]
    heads.transform.load_state_dict(wanted.cls.predictions.transform.state_dict())
    heads.pooler.load_state_dict(wanted.bert.pooler.state_dict())
    heads.seq_relationship.load_state_dict(wanted.cls.seq_relationship.state_dict())
    modules[-1].load_state_dict({"bias": wanted.cls.predictions.decoder.bias.detach()})
    with torch.no_grad():
        words_logits, next_logits = nn.Sequential(*modules).eval()(inputs())
        ids, types, padding_mask, positions = inputs()
        found = wanted(input_ids=ids, token_type_ids=types, attention_mask=padding_mask)
    index = positions.unsqueeze(-1).expand(-1, -1, found.prediction_logits.size(-1))
    assert torch.allclose(words_logits, found.prediction_logits.gather(1, index), atol=1e-5)
    assert torch.allclose(next_logits, found.seq_relationship_logits, atol=1e-5)


def micro_batch(index: int, replica: int = 0) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1000 + index)

    def random(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    model_inputs = (random(80, BATCH, LENGTH), random(2, BATCH, LENGTH), mask, random(LENGTH, BATCH, SLOTS))
    return model_inputs, (random(80, BATCH, SLOTS), random(2, BATCH))


def data() -> Iterator[Any]:
    index = 0
    while True:
        yield micro_batch(index)
        index += 1


def train(micro_batches: int) -> dict[str, Tensor]:
    ds_config = cases.config(micro_batches, OPTIMIZERS["AdamW"][0], {"partition": "uniform"})
    ds_config["train_micro_batch_size_per_gpu"] = BATCH
    engine = cases.engine(ds_config, 2, specs=specs, loss_fn=PretrainingLoss())
    iterator = data()
    for _ in range(10):
        engine.train_batch(iterator)
    return cases.parameters(engine)


@pytest.mark.mp
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_asynchronous_training_against_the_replay(worlds: Worlds, micro_batches: int) -> None:
    layers = built()
    place = "word_embeddings.weight"
    wanted = reference.Replay(
        uniform_partition(len(layers), 2), default_depths(2), micro_batches, adamw,
        layers=layers, criterion=PretrainingLoss(), micro_batch=micro_batch,
        ties=[((0, place), (len(layers) - 2, place))],
    ).run(10)  # fmt: skip
    found: dict[str, Tensor] = {}
    for rank, position in zip(worlds.run(2, train, micro_batches), (0, len(layers) - 2), strict=True):
        found |= {name.replace("other.tied_modules.words", str(position)): value for name, value in rank.items()}
    assert difference(found, wanted.parameters()) <= 1e-5
