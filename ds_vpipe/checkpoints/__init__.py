"""What the files of a pipeline checkpoint hold, by parameter."""
