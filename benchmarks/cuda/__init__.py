"""Everything that only a CUDA device can show, in one command: see docs/cuda.md."""
