"""All faults. Importing the modules fills `benchmarks.corpus.entry.FAULTS`."""

from benchmarks.corpus.faults import (
    checkpoints,
    files,
    indexing,
    inputs,
    normalisation,
    numbers,
    outputs,
    resize,
    runtime,
    shapes,
    structure,
    weights,
)

__all__ = [
    "checkpoints",
    "files",
    "indexing",
    "inputs",
    "normalisation",
    "numbers",
    "outputs",
    "resize",
    "runtime",
    "shapes",
    "structure",
    "weights",
]
