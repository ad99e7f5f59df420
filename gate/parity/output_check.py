"""Whether a runtime returns the outputs of the model: in number, order, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Sequence

from gate.errors import OutputMismatch
from gate.parity.statistics.output import Array


class OutputCheck:
    """What one runtime returns against what the reference does; nothing is compared by value."""

    def __init__(self, runtime: str, names: Sequence[str]) -> None:
        """`names`: of the file's outputs, in its order."""
        self._runtime = runtime
        self.names = tuple(names)

    def check(self, reference: Sequence[Array], candidate: Sequence[Array]) -> None:
        """Raise OutputMismatch unless number, dtypes and shapes of the outputs are equal."""
        if not len(reference) == len(candidate) == len(self.names):
            raise OutputMismatch(
                f"{self._runtime} returned {len(candidate)} outputs, the file names "
                f"{list(self.names)}, and the model returns {len(reference)}. "
                "Export again with export.output_names as the model returns them, in its order."
            )
        for name, r, c in zip(self.names, reference, candidate, strict=True):
            self._check_one(name, r, c)

    def check_keys(self, keys: Sequence[str | None]) -> None:
        """Raise OutputMismatch where the file has the names that the model gives in another order,
        or only some of them.

        Some take the outputs of a file by name, some by position: both must get the right ones.
        Parts (`boxes.0`) may have other names beside a `scores` that kept its own, but not the
        name of another output. A number is no name: PyTorch's exporter numbers a constant output.
        """
        pairs = [(key, name) for key, name in zip(keys, self.names, strict=False) if key]
        renamed = [f"'{key}' is '{name}'" for key, name in pairs if key != name]
        taken = any(
            name in keys and name != key for key, name in zip(keys, self.names, strict=False)
        )
        whole = [(key, name) for key, name in pairs if "." not in key]
        kept = any(key in self.names for key, _ in whole)
        partly = kept and any(key != name and not name.isdecimal() for key, name in whole)
        if renamed and {key for key, _ in pairs} == {name for _, name in pairs}:
            raise OutputMismatch(
                f"{self._runtime} returned the outputs {list(self.names)}, the model returns "
                f"{list(keys)}: the same names in another order, so whoever takes them by position "
                "gets others. Export again with export.output_names in the model's order."
            )
        if partly or taken:
            raise OutputMismatch(
                f"{self._runtime} returned the outputs {list(self.names)}, and the model has "
                f"names of its own for some of them only: its {', '.join(renamed)}. Export again "
                "with export.output_names: null, or with other names for all."
            )

    def _check_one(self, name: str, r: Array, c: Array) -> None:
        if r.dtype == c.dtype and r.shape == c.shape:
            return
        if r.dtype == c.dtype and r.ndim and r.ndim == c.ndim and r.shape[1:] == c.shape[1:]:
            remedy = (
                "If the first axis is the batch, it was fixed at export: set export.dynamic_batch: "
                "true; if it depends on values, the file picks others (a threshold, a limit)."
            )
        elif r.dtype == c.dtype:
            remedy = "Export the same model again, with an example of the samples' shape."
        elif r.dtype == "float64":
            remedy = (
                "The model's forward makes it float64 by itself (a buffer or NumPy scalar of "
                "float64, .double()): cast it in forward, or keep float64 in the file."
            )
        elif r.dtype == "float32" and c.dtype == "float16":
            raise OutputMismatch(
                f"{self._runtime} returned float16 {c.shape} for output '{name}', and the model "
                "is judged as it computes in float32. Keep inputs and outputs float32 "
                "(keep_io_types=True), and judge by --precision reduced what is float16 on "
                "purpose."
            )
        else:
            remedy = "Export the model in float32, with the outputs that its forward returns."
        raise OutputMismatch(
            f"{self._runtime} returned {c.dtype} {c.shape} for output '{name}', "
            f"the model returns {r.dtype} {r.shape}. {remedy}"
        )
