"""Simulated time and memory of pipelines, from costs that are planned, recorded or given."""
