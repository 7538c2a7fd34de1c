"""What stages tell each other of their updates."""

from __future__ import annotations

from ds_vpipe.engine.updates.peer_updates import StageNews


def test_what_is_on_its_way_does_not_change() -> None:
    """A message is copied together some time after it was handed over, when the next update may have begun."""
    news = StageNews(3, 1)
    news.tell(overflow=False, norm=2.0)
    sent = news.table
    other = StageNews(3, 2)
    other.tell(overflow=True, norm=5.0)
    news.tell(overflow=True, norm=3.0)
    news.from_later(other.table)
    news.from_earlier(StageNews(3, 0).table + 1)
    assert sent.tolist() == [[0, 0], [0, 4], [0, 0]]
    assert news.table.tolist() == [[1, 1], [1, 0], [1, 0]]


def test_own_and_other_stages_are_told_apart() -> None:
    news, later = StageNews(2, 0), StageNews(2, 1)
    later.tell(overflow=False, norm=3.0)
    news.tell(overflow=False, norm=4.0)
    assert not news.new_overflow()
    news.from_later(later.table)
    assert news.squared_norm_elsewhere() == 9
    later.tell(overflow=True, norm=float("inf"))
    news.from_later(later.table)
    assert [news.new_overflow(), news.new_overflow()] == [True, False]
    assert news.squared_norm_elsewhere() == 0
