"""The result of the matching: where the file is cut, and what is put in at the cuts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from gate.localisation.matching import Matching
from gate.parity.statistics.output import Array


@dataclass(frozen=True)
class Layout:
    """Which tensor of the file is which value of the model."""

    matching: Matching = field(default_factory=Matching)
    missing: Mapping[int, str] = field(default_factory=dict)
    """Values that no node computes, to the tensor that is read in their place."""

    absent: frozenset[int] = frozenset()
    """Values that the file does not have, and nothing in it reads."""

    @property
    def names(self) -> dict[int, str]:
        """Names of tensors by the numbers of values, in the order of the values."""
        return dict(sorted({**self.missing, **self.matching.names}.items()))

    @property
    def cuts(self) -> dict[str, np.dtype[np.generic]]:
        """The tensors at which the file is cut, with their dtypes."""
        return {tensor.name: tensor.sketch.dtype for tensor in self.matching.tensors.values()}

    @property
    def put_in(self) -> dict[str, int]:
        """Which value goes in at each cut: the last one that the tensor stands for."""
        return {name: number for number, name in self.names.items()}

    def references(self, cuts: Iterable[str], values: Mapping[int, Array]) -> dict[str, Array]:
        """What goes in at these cuts, in the file's dtypes."""
        numbers, dtypes = self.put_in, self.cuts
        return {cut: values[numbers[cut]].astype(dtypes[cut], copy=False) for cut in cuts}
