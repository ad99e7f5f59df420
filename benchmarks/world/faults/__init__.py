"""All faults of the second corpus. Importing the modules registers the faults."""

from benchmarks.world.faults import (
    absolute_errors,
    columns,
    heads,
    layers,
    structure,
    unseen_inputs,
)

__all__ = ["absolute_errors", "columns", "heads", "layers", "structure", "unseen_inputs"]
