"""Run all measurements that need a CUDA device in one command: see docs/cuda.md."""
