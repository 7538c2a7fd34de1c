"""Weight versions of a stage, and their stashing."""
