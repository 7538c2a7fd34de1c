"""The pre-training loss, and the means that validation makes of what it measures."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ds_vpipe.models.bert import loss as module
from ds_vpipe.models.bert.data import IGNORED_LABEL
from ds_vpipe.models.bert.loss import PretrainingLoss, validate
from ds_vpipe.models.bert.samples import Samples


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


def test_accuracies_are_shares_of_all_that_was_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimpleNamespace(
        is_first_stage=lambda: False, is_last_stage=lambda: False, train_batch_size=lambda: 4, micro_batches=1,
        global_rank=1, monitor=SimpleNamespace(enabled=True),
    )  # fmt: skip
    totals = iter([[2.0, 0.5, 1.0, 10.0, 0.25], [4.0, 0.7, 6.0, 20.0, 0.75]])
    monkeypatch.setattr(module, "_evaluate", lambda *_: torch.tensor(next(totals)))
    found = validate(engine, PretrainingLoss(), Samples(8))
    assert found["masked_lm_loss"] == pytest.approx(3.0)
    assert found["masked_lm_accuracy"] == pytest.approx(7 / 30)  # and not the mean of 1 / 10 and 6 / 20
    assert found["next_sentence_loss"] == pytest.approx(0.6)
    assert found["next_sentence_accuracy"] == pytest.approx(0.5)
    assert engine.monitor.enabled
