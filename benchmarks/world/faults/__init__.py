"""All faults of the second corpus. Importing the modules registers the faults."""

from benchmarks.world.faults import layers, outputs, structure, unseen_inputs

__all__ = ["layers", "outputs", "structure", "unseen_inputs"]
