"""What a localisation works with: the model, the file, the samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from gate.localisation.graph import FileGraph
from gate.localisation.sides import ModelSide
from gate.parity.statistics.output import Array
from gate.policy.policy import Policy
from gate.runtimes.runtime import Batch

Item = TypeVar("Item")
BUDGET = 1 << 30
"""Bytes of tensors that are held at a time on each side."""


@dataclass(frozen=True)
class Bench:
    """Both sides, and what they compute."""

    side: ModelSide
    graph: FileGraph
    batches: Sequence[Batch]
    """The first one is small: on it values are matched and the float64 reference runs."""
    names: tuple[tuple[str, str], ...]
    """(input of the file, name of the samples)."""
    policy: Policy
    budget: int = BUDGET

    @property
    def first(self) -> Bench:
        """The same with the first batch only."""
        return replace(self, batches=self.batches[:1])

    def feed(self, batch: Batch) -> Mapping[str, Array]:
        """The inputs of the file."""
        return {name: batch[sample] for name, sample in self.names}

    def parts(self, items: Sequence[Item], *, size: int) -> Iterator[Sequence[Item]]:
        """`items` of `size` bytes together, in parts that fit the budget."""
        number = max(1, -(-size // self.budget))
        step = max(1, -(-len(items) // number))
        for start in range(0, len(items), step):
            yield items[start : start + step]
