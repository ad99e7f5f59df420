"""A quick look at an exported file: does it compute what the model does, at two batch sizes, and at
another size of every dynamic axis?

No judgement: parity is measured and decided elsewhere. This catches files that can't be right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray
from torch import nn

from gate.errors import ExportError
from gate.export.answers import File, difference
from gate.export.example import Example
from gate.export.export import Exported
from gate.export.request import Request
from gate.export.strategies.exporter import export_copy, neutral
from gate.export.verify import foreign_objection


def self_check(
    model: nn.Module, exported: Exported, example: Mapping[str, NDArray[Any]]
) -> dict[str, float]:
    """Largest absolute difference between `model` (eval, a copy) and the file on the CPU.

    Returns `max_abs_diff_export_batch` and, for each dynamic axis, `max_abs_diff_other_<label>`
    (`batch`: an odd number of samples, unlike the export batch), over all outputs, in float64.
    Raises ExportError if the file does not run, or returns other shapes or values that are not
    finite. Empty for a file that is no plain ONNX because that was asked for: nothing runs it.
    """
    settings = exported.settings
    if not settings.export_params:
        raise ExportError(
            f"{exported.path} was exported without weights, so nothing can be checked. "
            "Set export.export_params: true."
        )
    if settings.operator_export_type != "ONNX" and foreign_objection(exported.path):
        return {}
    file = File(exported.path)
    names = tuple(spec.name for spec in exported.subject.inputs)
    outputs = tuple(spec.name for spec in exported.subject.outputs)
    copied = export_copy(model)
    named = settings.model_copy(update={"input_names": names, "output_names": outputs})
    with neutral(copied):
        request = Request.of(copied, Example.bind(example, names), named)
        batches = {"export_batch": request.batch}
        batches |= {f"other_{label}": other for label, other in request.other_sizes.items()}
        return {
            f"max_abs_diff_{name}": max(
                off for off, _ in difference(file, batch, request.answers(batch)).values()
            )
            for name, batch in batches.items()
        }
