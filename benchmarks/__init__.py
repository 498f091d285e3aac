"""What was run for the chapters, one module per chapter: `python -m benchmarks.CHAPTER COMMAND`."""
