"""Overflows and norms of other stages' updates."""

from __future__ import annotations

from ds_vpipe.engine.updates.peer_updates import PeerUpdates


def update(peers: PeerUpdates, norm: float, overflow: bool = False) -> bool:
    peers.own_norm = norm
    return peers.after_update(overflow)


def test_what_is_on_its_way_does_not_change() -> None:
    """A message is copied together some time after it was handed over, when the next update may have begun."""
    peers = PeerUpdates(3, 1)
    update(peers, 2.0)
    sent = peers.table
    other = PeerUpdates(3, 2)
    update(other, 5.0, overflow=True)
    update(peers, 3.0, overflow=True)
    peers.from_later(other.table)
    peers.from_earlier(PeerUpdates(3, 0).table + 1)
    assert sent.tolist() == [[0, 0], [0, 4], [0, 0]]
    assert peers.table.tolist() == [[1, 1], [1, 0], [1, 0]]


def test_own_and_other_stages_are_told_apart() -> None:
    peers, later = PeerUpdates(2, 0), PeerUpdates(2, 1)
    assert not update(later, 3.0)
    assert not update(peers, 4.0)
    peers.from_later(later.table)
    assert peers.squared_norm_elsewhere() == 9
    assert update(later, float("inf"), overflow=True)
    peers.from_later(later.table)
    assert [update(peers, 4.0), update(peers, 4.0)] == [True, False]
    assert peers.squared_norm_elsewhere() == 0


def test_a_table_that_is_restored_or_forgotten_has_no_news() -> None:
    """Else an overflow would count twice, or not at all."""
    peers, resumed = PeerUpdates(3, 1), PeerUpdates(3, 1)
    assert [peers.after_update(True), peers.after_update(False)] == [True, False]
    resumed.restore(peers.state())
    assert [resumed.after_update(False), resumed.after_update(True)] == [False, True]
    peers.forget()
    assert peers.after_update(True)
