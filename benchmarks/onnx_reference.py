"""Count onnx's node tests for which the interpreter of reference files agrees with ONNX Runtime.

    python -m benchmarks.onnx_reference [--only SUBSTRING] [--json FILE]

Prints the tests that differ with the reason, and the share of those that ONNX Runtime runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from gate.reference.onnx_operators import from_numpy, to_numpy
from gate.reference.onnx_reference import OnnxReference, open_plain

TOLERANCE = 1e-4
"""Relative to the largest value. ONNX Runtime approximates exp, tanh and erf to about 1e-6."""

HALF_TOLERANCE = 2e-3
"""Tolerance of 16-bit outputs, relative to the largest value: four roundings of float16."""


def cases() -> Iterator[tuple[str, onnx.ModelProto, list[Any]]]:
    """Yield the name, the model and the inputs of the first data set of each node test."""
    from onnx.backend.test.loader import load_model_tests

    for case in load_model_tests(kind="node"):
        if case.model is not None and case.data_sets:
            yield case.name, case.model, list(case.data_sets[0][0])


def compare(model: onnx.ModelProto, inputs: list[Any]) -> tuple[str, str]:
    """Return `passed`, `differs`, `fails` or `not run by ONNX Runtime`, and the reason."""
    names = [value_info.name for value_info in model.graph.input]
    arrays = [_to_array(value) for value in inputs]
    feed = {name: value for name, value in zip(names, arrays, strict=False) if value is not None}
    try:
        expected = open_plain(model.SerializeToString()).run(None, feed)
    except Exception as error:
        return "not run by ONNX Runtime", str(error).splitlines()[0][:120]
    try:
        reference = OnnxReference(model)
        types = {e.name: e.type.tensor_type.elem_type for e in model.graph.input}
        values = [
            _to_tensor(value, types[name]) for name, value in zip(names, arrays, strict=False)
        ]
        with torch.no_grad():
            computed = reference.compute(values)
    except Exception as error:
        return "fails", str(error).splitlines()[0][:160]
    for name, computed_output, expected_output in zip(
        reference.outputs, computed, expected, strict=True
    ):
        difference = _describe_difference(computed_output, expected_output)
        if difference:
            return "differs", f"{name}: {difference}"
    return "passed", ""


def _to_array(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, onnx.SequenceProto):
        return numpy_helper.to_list(value)
    if isinstance(value, onnx.OptionalProto):
        return numpy_helper.to_optional(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


def _to_tensor(value: Any, elem_type: int) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        return [_to_tensor(item, elem_type) for item in value]
    array = np.asarray(value)
    return array.astype(object) if array.dtype.kind in "OUS" else from_numpy(array, elem_type)


def _describe_difference(computed: Any, expected: Any) -> str:  # noqa: PLR0911 - one per kind of value
    if expected is None or computed is None:
        return "" if computed is expected else f"{computed} for {expected}"
    if isinstance(expected, list):
        if len(computed) != len(expected):
            return f"{len(computed)} items for {len(expected)}"
        return next(filter(None, map(_describe_difference, computed, expected)), "")
    a, b = to_numpy(computed), np.asarray(expected)
    if b.dtype.kind in "OU":
        return "" if np.array_equal(a.astype(str), b.astype(str)) else f"{a} for {b}"[:90]
    if a.shape != b.shape:
        return f"shape {a.shape} for {b.shape}"
    if a.dtype != b.dtype and a.dtype.kind != "f":
        return f"dtype {a.dtype} for {b.dtype}"
    if b.dtype.kind in "biu":
        return "" if np.array_equal(a, b) else f"{int((a != b).sum())} of {a.size} differ"
    share = TOLERANCE if b.dtype.itemsize > 2 else HALF_TOLERANCE
    a, b = a.astype(np.float64), b.astype(np.float64)
    size = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    if np.allclose(a, b, rtol=0, atol=share * size, equal_nan=True):
        return ""
    return f"largest difference {np.abs(a - b).max():.3g} of {size:.3g}"


def main() -> None:
    """Compare all node tests, and print those that differ and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="Tests whose name has this text.")
    parser.add_argument("--json", type=Path, help="Where to write the results.")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results = {
        name: compare(model, inputs) for name, model, inputs in cases() if options.only in name
    }
    for name, (outcome, reason) in results.items():
        if outcome in ("fails", "differs"):
            sys.stdout.write(f"{outcome:8} {name}: {reason}\n")
    counts = Counter(outcome for outcome, _ in results.values())
    run = len(results) - counts["not run by ONNX Runtime"]
    sys.stdout.write(f"{counts['passed']} of {run} that ONNX Runtime runs; {dict(counts)}\n")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
