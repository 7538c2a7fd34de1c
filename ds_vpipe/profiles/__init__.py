"""What each layer of a model costs in seconds and bytes, measured or computed."""
