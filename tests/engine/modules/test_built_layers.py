"""What is noted of a layer when it is built, and compared when it moves."""

from __future__ import annotations

import io
from enum import IntEnum

import torch
from torch import nn

from ds_vpipe.engine.modules.built_layers import Built, settings_of, structure_of, take_settings


class Mode(IntEnum):
    """Numbers of a class that the process of another stage may not be able to import."""

    FAST = 1


class Kept(nn.Linear):
    """A layer with settings of many kinds."""

    calls = 0

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.mode, self.rate, self.size = Mode.FAST, 0.5, None


class Stated(Kept):
    """A layer whose rate is in its extra state."""

    def get_extra_state(self) -> float:
        return self.rate

    def set_extra_state(self, state: float) -> None:
        self.rate = state


def test_enums_are_no_settings() -> None:
    assert settings_of(Kept())["", "rate"] == 0.5
    assert ("", "mode") not in settings_of(Kept())


def test_only_what_was_there_when_it_was_built_can_have_changed() -> None:
    layer = Kept()
    built = Built.of(layer)
    assert built.changed(layer) == []
    layer.calls, layer.rate, layer.size, layer.mode = 3, 0.25, 7, 2  # type: ignore[assignment]
    layer.eval()
    assert sorted(built.changed(layer)) == [("", "calls"), ("", "rate")]
    assert Built.of(torch.relu).changed(torch.relu) == []


def test_a_size_is_not_taken_without_its_cache() -> None:
    """A layer may have run before the engine was built, and have both since then."""
    layer, fresh = Kept(), Kept()
    layer.size = 7  # type: ignore[assignment]
    built = Built.of(layer)
    layer.size = 8  # type: ignore[assignment]
    assert built.changed(layer) == [("", "size")]
    take_settings(fresh, 0, settings_of(layer), built.changed(layer))
    assert fresh.size is None


def test_extra_state_comes_by_itself() -> None:
    for kind, rate in ((Kept, 0.25), (Stated, 0.5)):
        layer, fresh = kind(), kind()
        built, layer.rate = Built.of(layer), 0.25
        take_settings(fresh, 0, settings_of(layer), built.changed(layer))
        assert fresh.rate == rate


def test_a_scripted_module_that_was_loaded_stays_the_same_when_it_runs() -> None:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), buffer)
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    before = structure_of(loaded)
    loaded(torch.ones(1, 2))
    assert structure_of(loaded) == before
    layer = nn.Linear(2, 2)
    before = structure_of(layer)
    layer.forward = torch.relu  # type: ignore[assignment]
    assert structure_of(layer) != before
