"""The pre-training loss."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ds_vpipe.models.bert.loss import PretrainingLoss
from ds_vpipe.models.bert.sample import IGNORED_LABEL


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


def test_models_without_next_sentence_logits() -> None:
    (masked_lm, _), labels = case()
    loss = PretrainingLoss()
    assert loss((masked_lm, None), labels).item() == pytest.approx(expected_masked_lm(), rel=1e-5)
    with loss.measuring():
        measured = loss((masked_lm, None), labels).tolist()
    assert measured[:1] + measured[2:4] == pytest.approx([expected_masked_lm(), 2, 3], rel=1e-5)
    assert math.isnan(measured[1])
    assert math.isnan(measured[4])


def test_half_precision_logits_are_reduced_in_single_precision() -> None:
    (masked_lm, next_sentence), labels = case()
    loss = PretrainingLoss()((masked_lm.bfloat16(), next_sentence.bfloat16()), labels)
    assert loss.dtype == torch.float32
