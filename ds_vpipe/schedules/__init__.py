"""What every rank of a pipeline does, as pure data, and whether that is right."""
