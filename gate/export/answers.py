"""What an exported file answers, in ONNX Runtime on the CPU, beside what the model answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.errors import ExportError, first_line
from gate.export.example import Example
from gate.onnxfile.session import open_on_cpu

Array = NDArray[Any]

_BAKED = (
    "Probably the trace fixed the batch size or a branch: use x.shape[0] instead of len(x), "
    "and no Python if on data; see the tracer warnings."
)


class File:
    """A file in a session. Raises ExportError where ONNX Runtime can't load it."""

    def __init__(self, path: Path) -> None:
        try:
            self._session = open_on_cpu(path)
        except Exception as error:
            raise ExportError(
                f"ONNX Runtime can't load {path.name}: {first_line(error).rstrip('.')}. "
                "Try a lower export.opset, or a newer onnxruntime."
            ) from error
        self.outputs: tuple[str, ...] = tuple(out.name for out in self._session.get_outputs())

    def answers(self, example: Example) -> list[Array]:
        """All outputs. Raises ExportError where the file does not compute them."""
        try:
            returned = self._session.run(None, example.arrays)
        except Exception as error:
            reason = first_line(error).rstrip(".")
            raise ExportError(
                f"the exported file fails with {sizes(example)}: {reason}. {_BAKED}"
            ) from error
        return [np.asarray(array) for array in returned]


def difference(
    file: File, example: Example, expected: Sequence[Array]
) -> dict[str, tuple[float, float]]:
    """By output: the largest absolute difference to `expected`, and the largest value there.

    In float64; both are 0 for an empty output. Raises ExportError for another shape, and for
    values that are not finite.
    """
    returned = file.answers(example)
    return {
        name: _of_output(name, example, got, want)
        for name, got, want in zip(file.outputs, returned, expected, strict=True)
    }


def sizes(example: Example) -> str:
    """`5 samples`, or all shapes where more than the number of samples tells them apart."""
    shapes = {name: list(array.shape) for name, array in example.arrays.items()}
    count = len(next(iter(example.arrays.values())))
    shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    return f"{count} sample{'' if count == 1 else 's'} ({shown})"


def _of_output(name: str, example: Example, got: Array, want: Array) -> tuple[float, float]:
    if got.shape != want.shape:
        raise ExportError(
            f"with {sizes(example)} the exported file returns {list(got.shape)} for {name}, "
            f"the model {list(want.shape)}. {_BAKED}"
        )
    if not (np.isfinite(got).all() and np.isfinite(want).all()):
        side = "the model" if not np.isfinite(want).all() else "the exported file"
        raise ExportError(
            f"with {sizes(example)} {side} returns NaN or infinity for {name}, expected finite "
            "values. Check the checkpoint and the example."
        )
    off = np.abs(got.astype(np.float64) - want.astype(np.float64))
    return float(off.max(initial=0.0)), float(np.abs(want.astype(np.float64)).max(initial=0.0))
