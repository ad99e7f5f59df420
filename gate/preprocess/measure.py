"""Parity of preprocessing as the policy asks for it, as evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from gate.errors import DataError, EvidenceError
from gate.policy.policy import PreprocessingPolicy
from gate.preprocess.answers import ModelFile
from gate.preprocess.compare import LineUp, compare
from gate.preprocess.pictures import Picture
from gate.preprocess.spec import PreprocessSpec
from gate.records.preprocessing import PreprocessingParity


def measure_preprocessing(
    spec: PreprocessSpec,
    pictures: Sequence[Picture],
    *,
    policy: PreprocessingPolicy,
    model: ModelFile | None = None,
    dumped: Mapping[str, NDArray[Any]] | None = None,
) -> PreprocessingParity:
    """Compare the policy's consumers with the training side on the pictures.

    `dumped`: tensors of consumers that the gate does not bring, as `LineUp` takes them. Raises
    DataError for consumers that are neither, and for tensors of one that the policy does not name;
    EvidenceError where answers are bounded and no model is given, and what `compare` raises.
    """
    if policy.max_flips is not None and model is None:
        raise EvidenceError(
            "the policy bounds preprocessing.max_flips, so the answers must be compared. Give the "
            "ONNX file as model."
        )
    unasked = sorted(set(dumped or ()) - set(policy.consumers))
    if unasked:
        raise DataError(
            f"tensors of {unasked[0]} are given, the policy asks for "
            f"{', '.join(policy.consumers)}. Name it in preprocessing.consumers, or leave them out."
        )
    line_up = LineUp(policy.consumers, dumped or {}, policy.training_side)
    compared_model = model if policy.max_flips is not None else None
    return compare(spec, pictures, line_up=line_up, model=compared_model).parity
