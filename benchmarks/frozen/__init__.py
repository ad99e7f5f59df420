"""Compares what two commits measure: `make frozen BASE=<commit>`."""
