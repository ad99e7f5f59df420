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
"""Of the largest value. ONNX Runtime approximates exp, tanh and erf to about 1e-6."""

HALF_TOLERANCE = 2e-3
"""Of outputs in 16 bits: four roundings of float16."""


def cases() -> Iterator[tuple[str, onnx.ModelProto, list[Any]]]:
    """Name, model and the inputs of the first data set of each node test."""
    from onnx.backend.test.loader import load_model_tests

    for case in load_model_tests(kind="node"):
        if case.model is not None and case.data_sets:
            yield case.name, case.model, list(case.data_sets[0][0])


def compare(model: onnx.ModelProto, inputs: list[Any]) -> tuple[str, str]:
    """Return `passed`, `differs`, `fails` or `not run by ONNX Runtime`, with the reason."""
    names = [each.name for each in model.graph.input]
    fed = [_array(value) for value in inputs]
    feed = {name: value for name, value in zip(names, fed, strict=False) if value is not None}
    try:
        expected = open_plain(model.SerializeToString()).run(None, feed)
    except Exception as error:
        return "not run by ONNX Runtime", str(error).splitlines()[0][:120]
    try:
        reference = OnnxReference(model)
        types = {e.name: e.type.tensor_type.elem_type for e in model.graph.input}
        values = [_value(value, types[name]) for name, value in zip(names, fed, strict=False)]
        with torch.no_grad():
            made = reference.compute(values)
    except Exception as error:
        return "fails", str(error).splitlines()[0][:160]
    for name, one, other in zip(reference.outputs, made, expected, strict=True):
        why = _difference(one, other)
        if why:
            return "differs", f"{name}: {why}"
    return "passed", ""


def _array(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, onnx.SequenceProto):
        return numpy_helper.to_list(value)
    if isinstance(value, onnx.OptionalProto):
        return numpy_helper.to_optional(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


def _value(value: Any, elem_type: int) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        return [_value(each, elem_type) for each in value]
    array = np.asarray(value)
    return array.astype(object) if array.dtype.kind in "OUS" else from_numpy(array, elem_type)


def _difference(one: Any, other: Any) -> str:  # noqa: PLR0911 - one a kind of value
    if other is None or one is None:
        return "" if one is other else f"{one} for {other}"
    if isinstance(other, list):
        if len(one) != len(other):
            return f"{len(one)} items for {len(other)}"
        return next(filter(None, map(_difference, one, other)), "")
    a, b = to_numpy(one), np.asarray(other)
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
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="Tests whose name has this text.")
    parser.add_argument("--json", type=Path, help="Where to write the results.")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results = {
        name: compare(model, inputs) for name, model, inputs in cases() if options.only in name
    }
    for name, (outcome, why) in results.items():
        if outcome in ("fails", "differs"):
            sys.stdout.write(f"{outcome:8} {name}: {why}\n")
    counts = Counter(outcome for outcome, _ in results.values())
    run = len(results) - counts["not run by ONNX Runtime"]
    sys.stdout.write(f"{counts['passed']} of {run} that ONNX Runtime runs; {dict(counts)}\n")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
