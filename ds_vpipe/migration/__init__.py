"""From vPipe and PipeDream: their files read as they are, and turned into what DeepSpeed's launcher takes."""
