"""Parameter updates of a stage: reduction, clipping, tied weights, optimizers."""
