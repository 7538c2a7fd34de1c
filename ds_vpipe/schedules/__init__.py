"""Programs of a pipeline's ranks, as pure data, and their checks."""
