"""A quick look at an exported file: does it compute what the model does, at two batch sizes?

No judgement: parity is measured and decided elsewhere. This catches files that can't be right.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gate.errors import ExportError
from gate.export.example import Example
from gate.export.exporter import flat_tensors, private_copy
from gate.export.traced import Exported


def self_check(
    model: nn.Module, exported: Exported, example: Mapping[str, NDArray[Any]]
) -> dict[str, float]:
    """Largest absolute difference between `model` (eval, a copy) and the file on the CPU.

    Returns `max_abs_diff_export_batch` and, for a dynamic batch, `max_abs_diff_other_batch` (an
    odd number of samples, unlike the export batch), over all outputs, in float64. Raises
    ExportError if the file does not run, or returns other shapes or values that are not finite.
    """
    settings = exported.record.settings
    if not settings["export_params"]:
        raise ExportError(
            f"{exported.path} was exported without weights, so nothing can be checked. "
            "Set export.export_params: true."
        )
    names = tuple(spec.name for spec in exported.subject.inputs)
    bound = Example.bind(example, names)
    size = int(settings["batch_size"] or 1)
    sizes = {"max_abs_diff_export_batch": size}
    if settings["dynamic_batch"]:
        sizes["max_abs_diff_other_batch"] = size + 1 + size % 2
    session = _session(exported.path)
    reference = private_copy(model)
    reference.eval()  # not chained: models that override `train` often forget to return themselves
    return {
        name: _difference(reference, session, bound.batch(size)) for name, size in sizes.items()
    }


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # a failure is raised; it need not be printed as well
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ExportError(
            f"ONNX Runtime can't load {path}: {_first_line(error)}. "
            "Try a lower export.opset, or a newer onnxruntime."
        ) from error


def _difference(model: nn.Module, session: Any, batch: Example) -> float:
    with torch.no_grad():
        expected = [tensor.numpy() for tensor in flat_tensors(model(*batch.tensors()))]
    size = len(next(iter(batch.arrays.values())))
    try:
        returned = session.run(None, batch.arrays)
    except Exception as error:
        raise ExportError(
            f"the exported file fails with {size} samples: {_first_line(error)}. {_BAKED}"
        ) from error
    names = [output.name for output in session.get_outputs()]
    return max(
        _of_output(name, size, np.asarray(seen), want)
        for name, seen, want in zip(names, returned, expected, strict=True)
    )


_BAKED = (
    "Probably the trace fixed the batch size or a branch: use x.shape[0] instead of len(x), "
    "and no Python if on data; see the tracer warnings."
)


def _of_output(name: str, size: int, seen: NDArray[Any], want: NDArray[Any]) -> float:
    if seen.shape != want.shape:
        raise ExportError(
            f"with {size} samples the exported file returns {list(seen.shape)} for {name}, "
            f"the model {list(want.shape)}. {_BAKED}"
        )
    if not (np.isfinite(seen).all() and np.isfinite(want).all()):
        side = "the model" if not np.isfinite(want).all() else "the exported file"
        raise ExportError(
            f"with {size} samples {side} returns NaN or infinity for {name}, expected finite "
            "values. Check the checkpoint and the example."
        )
    difference = np.abs(seen.astype(np.float64) - want.astype(np.float64))
    return float(difference.max(initial=0.0))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0].rstrip(".")
