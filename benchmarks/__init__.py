"""What was run for the chapters, a module for each: `python -m benchmarks.CHAPTER COMMAND`."""
