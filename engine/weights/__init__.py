"""Weight versions of a stage and the optimizer wrapper that stashes them."""
