"""What a difference does to a model's answers: flips of the top-1 class, and moved confidence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.errors import EvidenceError, InputMismatch, OnnxFileError
from gate.onnxfile.session import open_on_cpu
from gate.preprocess.tensor import Tensor
from gate.records.preprocessing import Decisions
from gate.storage.digest import Digest

_SHOWN = 100
Probabilities = NDArray[np.float64]


@dataclass(frozen=True)
class ModelFile:
    """An ONNX classifier, and its digest as evidence counts it: with its external data."""

    path: Path
    sha256: Digest


class Classifier:
    """An ONNX classifier in ONNX Runtime on the CPU, optimised, one picture at a time."""

    def __init__(self, path: Path) -> None:
        """Raises OnnxFileError where the file can't be opened, InputMismatch where it has several
        inputs or gives no logits of shape (batch, classes >= 2)."""
        try:
            self._session: Any = open_on_cpu(path)
        except Exception as error:
            raise OnnxFileError(f"ONNX Runtime can't open {path}: {error} Export again.") from error
        inputs = self._session.get_inputs()
        logits = [out.name for out in self._session.get_outputs() if _classes(out.shape)]
        if len(inputs) != 1 or not logits:
            raise InputMismatch(
                f"{path} has {len(inputs)} inputs and {len(logits)} outputs of shape (batch, "
                "classes); expected one picture in and logits out."
            )
        self._path, self._input, self._logits = path, inputs[0].name, logits[0]

    def __call__(self, tensor: Tensor) -> Probabilities:
        """Softmax of the logits for one picture's tensor, shape (classes,), float64.

        Raises InputMismatch where the model does not take the tensor, EvidenceError where its
        logits are not finite.
        """
        try:
            logits = self._session.run([self._logits], {self._input: tensor[None]})[0]
        except Exception as error:
            raise InputMismatch(
                f"{self._path} does not take {tensor.dtype} {[1, *tensor.shape]}: {error} "
                "Give the spec that the model was trained with."
            ) from error
        values = np.asarray(logits[0], dtype=np.float64)
        if not np.isfinite(values).all():
            raise EvidenceError(
                f"{self._path} gives NaN or infinite logits, so no answer can be compared. "
                "Run gate check on it first."
            )
        weights = np.exp(values - values.max())
        probabilities: Probabilities = weights / weights.sum()
        return probabilities


class Answers:
    """Counts flips and moved confidence between a consumer's and the reference's tensors."""

    def __init__(self) -> None:
        self._moved: list[float] = []
        self._flipped: list[str] = []

    def update(self, name: str, got: Probabilities, wanted: Probabilities) -> None:
        """Take in one picture."""
        self._moved.append(abs(float(got.max()) - float(wanted.max())))
        if int(got.argmax()) != int(wanted.argmax()):
            self._flipped.append(name)

    def compute(self) -> Decisions | None:
        """The record; None where no picture was taken in."""
        if not self._moved:
            return None
        return Decisions(
            images=len(self._moved),
            flips=len(self._flipped),
            flipped=tuple(self._flipped[:_SHOWN]),
            confidence_diff_max=max(self._moved),
            confidence_diff_mean=sum(self._moved) / len(self._moved),
        )


def _classes(shape: list[Any]) -> bool:
    return len(shape) == 2 and (not isinstance(shape[1], int) or shape[1] >= 2)
