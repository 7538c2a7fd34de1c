"""Which split, recomputation and depths are fastest and fit."""
