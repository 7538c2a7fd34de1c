"""Mitigations of stale gradients around any torch optimizer, and a replay in one process."""
