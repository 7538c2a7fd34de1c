"""Plain modules as lists of pieces, of which a stage keeps and runs a few: the process-free part of splitting."""
