"""Checkpoints of a pipeline: saving, loading, reshaping, whole-model state."""
