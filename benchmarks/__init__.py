"""Speed beside other libraries, and the chapters' long runs: `python -m benchmarks.vision`."""
