"""What the repository's commands need: `python -m tools.notebooks --help`, from the root."""
