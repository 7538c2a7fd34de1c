"""Pipeline modules: partition, virtual stages, recomputation, split plain modules."""
