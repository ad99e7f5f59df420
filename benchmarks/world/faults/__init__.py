"""All faults of the second corpus. Importing them registers them."""

from benchmarks.world.faults import absolute, columns, guesses, layers, structure, unseen

__all__ = ["absolute", "columns", "guesses", "layers", "structure", "unseen"]
