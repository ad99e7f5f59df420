"""Run all measurements that need a CUDA device with one command; docs/cuda.md describes it."""
