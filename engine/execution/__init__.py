"""Execution of schedule actions on a stage."""
