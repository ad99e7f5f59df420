"""Can this file be right? The question by which a ladder steps over a rung that only seems to hold.

On the example the file must compute what the model computes, at every size that is to be dynamic.
On changed data it should: a difference there is a doubt, for which a later rung is preferred. The
bound is a hundredth of the largest value of the output: a thousand times the rounding of a deep
network in float32, so that no correct file is in doubt; whether the file is exact, the gate judges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from gate.errors import ExportError
from gate.export.answers import Array, File, difference, sizes
from gate.export.example import Example
from gate.export.request import Request

_SHARE = 1e-2
_TINY = 1e-6
"""For outputs that are zero: no more than the rounding of values of about 1."""
_SEED = 0

_CHANGES: dict[str, Callable[[Array], Array]] = {
    "negated": lambda x: -x,
    "four times as large": lambda x: 4 * x,
    "a tenth as large": lambda x: x / 10,
    "all zero": np.zeros_like,
    "shuffled": lambda x: np.random.default_rng(_SEED).permuted(x.reshape(-1)).reshape(x.shape),
}
"""What is done to inputs of floats; integers, which may be indices, are only shuffled."""


@dataclass(frozen=True)
class Objection:
    """What speaks against a file."""

    cause: str
    """As in "the file ..."."""
    kind: Literal["fails", "differs", "doubt"]
    """doubt: it differs on data that was made up."""


class Sanity:
    """The model's own answers, computed once for all rungs. Used inside of `neutral`."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._expected: dict[str, list[Array]] = {}

    def objection(self, path: Path) -> Objection | None:
        """The first one against the file `path`."""
        try:
            file = File(path)
            for title, batch in self._sizes():
                cause = self._compare(file, title, batch, exact_integers=True)
                if cause and self._repeatable(title, batch):
                    return Objection(cause, "differs")
        except ExportError as error:
            return Objection(f"can't be right: {str(error).rstrip('.')}", "fails")
        for title, batch in self._changed():
            try:
                cause = self._compare(file, title, batch, exact_integers=False)
            except ExportError as error:  # what the model itself can't compute proves nothing
                cause = f"can't be right: {error}" if title in self._expected else None
            if cause and self._repeatable(title, batch):
                return Objection(f"{cause}, where the inputs are {title}", "doubt")
        return None

    def _sizes(self) -> Iterator[tuple[str, Example]]:
        yield "as given", self._request.batch
        for label, batch in self._request.other_sizes.items():
            yield f"of another {label}", batch

    def _changed(self) -> Iterator[tuple[str, Example]]:
        arrays = self._request.batch.arrays
        for title, change in _CHANGES.items():
            kinds = "fiu" if title == "shuffled" else "f"
            made = {n: change(a).astype(a.dtype) if a.dtype.kind in kinds else a
                    for n, a in arrays.items()}  # fmt: skip
            if any(not np.array_equal(made[name], arrays[name]) for name in arrays):
                yield title, Example(made)

    def _compare(
        self, file: File, title: str, batch: Example, *, exact_integers: bool
    ) -> str | None:
        """How far the file is off, if it is too far."""
        if title not in self._expected:
            expected = self._request.answers(batch)
            if not exact_integers and not all(np.isfinite(one).all() for one in expected):
                return None
            self._expected[title] = expected
        expected = self._expected[title]
        floats = {
            name: want.dtype.kind == "f" or exact_integers
            for name, want in zip(file.outputs, expected, strict=True)
        }
        for name, (off, largest) in difference(file, batch, expected).items():
            if floats[name] and not off <= _SHARE * largest + _TINY:
                return f"differs by {off:.2g} from the model in {name}, at {sizes(batch)}"
        return None

    def _repeatable(self, title: str, batch: Example) -> bool:
        """False for a model that gives another answer each time: nothing can be compared."""
        again = self._request.answers(batch)
        expected = self._expected.get(title, again)
        return all(np.array_equal(one, other) for one, other in zip(expected, again, strict=True))
