"""Observers of a stage: statistics, recordings, memory, DeepSpeed tools."""
