"""The pre-training loss, and the means that validation makes of what it measures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_vpipe.models.bert import loss as module
from ds_vpipe.models.bert.data import IGNORED_LABEL, MicroBatch
from ds_vpipe.models.bert.loss import PretrainingLoss, validate
from ds_vpipe.models.bert.samples import Masking, RandomSamples, Sample, Samples, Vocabulary


def case() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    masked_lm = torch.tensor([[[2.0, 0.0, 0.0], [9.0, 0.0, 0.0]], [[0.0, 1.0, 0.0], [0.0, 0.0, 3.0]]])
    next_sentence = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    return (masked_lm, next_sentence), (torch.tensor([[0, IGNORED_LABEL], [2, 2]]), torch.tensor([0, 1]))


def expected_masked_lm() -> float:
    used = [([2.0, 0.0, 0.0], 0), ([0.0, 1.0, 0.0], 2), ([0.0, 0.0, 3.0], 2)]
    return sum(math.log(sum(map(math.exp, logits))) - logits[label] for logits, label in used) / 3


def test_unused_slots_do_not_count_and_both_parts_add_up() -> None:
    next_sentence = (math.log(math.e + 1) - 1 + math.log(2)) / 2
    assert PretrainingLoss()(*case()).item() == pytest.approx(expected_masked_lm() + next_sentence, rel=1e-5)


def test_measures_inside_the_context_and_after_an_error_the_loss_again() -> None:
    loss = PretrainingLoss()
    both = loss(*case()).item()
    with loss.measuring():
        masked_lm, next_sentence, hits, masked, next_hits = loss(*case()).tolist()
    assert masked_lm == pytest.approx(expected_masked_lm(), rel=1e-5)
    assert masked_lm + next_sentence == pytest.approx(both)
    assert (hits, masked, next_hits) == (2, 3, 0.5)
    assert loss(*case()).item() == both
    with pytest.raises(KeyError), loss.measuring():
        raise KeyError
    assert loss(*case()).item() == both


def test_half_precision_logits_are_reduced_in_single_precision() -> None:
    (masked_lm, next_sentence), labels = case()
    loss = PretrainingLoss()((masked_lm.bfloat16(), next_sentence.bfloat16()), labels)
    assert loss.dtype == torch.float32


def engine_of(size: int, replica: int = 0, replicas: int = 1) -> Any:
    """As much of the first stage's engine as a validation asks for."""
    grid = SimpleNamespace(
        get_data_parallel_rank=lambda: replica, get_data_parallel_world_size=lambda: replicas
    )  # fmt: skip
    return SimpleNamespace(
        is_first_stage=lambda: True, train_micro_batch_size_per_gpu=lambda: size, dp_world_size=replicas, grid=grid,
        global_rank=1, monitor=SimpleNamespace(enabled=True),
    )  # fmt: skip


def test_accuracies_are_shares_of_all_that_was_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(4)
    monkeypatch.setattr(module, "_evaluate", lambda *_: torch.tensor([3.0, 0.6, 3.5, 15.0, 0.5]))
    found = validate(engine, PretrainingLoss(), Samples(8))
    assert found["masked_lm_loss"] == pytest.approx(3.0)
    assert found["masked_lm_accuracy"] == pytest.approx(7 / 30)
    assert found["next_sentence_loss"] == pytest.approx(0.6)
    assert found["next_sentence_accuracy"] == pytest.approx(0.5)
    assert engine.monitor.enabled


@pytest.mark.parametrize(
    ("held_out", "size", "replicas", "micro_batches"),
    [(100, 16, 1, 6), (1000, 16, 1, 62), (100, 16, 2, 3), (5000, 16, 2, 32), (3000, 1500, 1, 1)],
)
def test_every_held_out_micro_batch_is_validated_once(
    held_out: int, size: int, replicas: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, int]] = []

    class Recorded(RandomSamples):
        def between(self, begin: int, end: int, seed: int | None) -> Iterator[Sample]:
            read.append((begin, end))
            return super().between(begin, begin + 1, seed)

    def evaluate(engine: Any, batches: Iterator[MicroBatch], number: int) -> Tensor:
        assert len(list(batches)) == number == micro_batches
        return torch.ones(5)

    monkeypatch.setattr(module, "_evaluate", evaluate)
    samples = Recorded(held_out, Masking(Vocabulary.numbered(50), 8, 1), 0)
    for replica in range(replicas):
        validate(engine_of(size, replica, replicas), PretrainingLoss(), samples)
    assert sorted(read) == [(begin, begin + size) for begin in range(0, micro_batches * replicas * size, size)]
