"""Files of a pipeline checkpoint, read and written by parameter."""
