"""Count changed nodes that pass when compared with the original file.

    python -m benchmarks.onnx_mutations [--count 300] [--only SUBSTRING] [--json FILE]

Takes onnx's node tests, converts inputs after the first to weights, and changes one attribute, axis
or weight of the node. `gate check` compares each changed file with its original. If a file passes,
its outputs must also be bitwise equal on other inputs: then the change has no effect by definition
(a negative axis, a pad beyond the kernel).
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

import gate
from benchmarks.onnx_reference import cases
from gate.errors import GateError
from gate.reference.onnx_reference import open_plain

AXES = {"axis", "axes", "perm", "batch_axis", "time_axis", "batch_dims", "keepdims"}

REPEATS = 8
"""Number of calls of a file with fixed shapes."""

Inputs = dict[str, np.ndarray[Any, Any]]


def change_attribute(attribute: onnx.AttributeProto, by: float = 1.0) -> Any:
    """Return another value for an attribute, or None if attributes of its kind are not changed."""
    value: Any = helper.get_attribute_value(attribute)
    kind, changed_value = onnx.AttributeProto, None
    if attribute.type == kind.INT:
        changed_value = value + 1 if value < 1 else value - 1
    elif attribute.type == kind.FLOAT:
        changed_value = value * (1 + 0.5 * by) + 0.1 * by
    elif attribute.type == kind.FLOATS:
        changed_value = [item * (1 + 0.1 * by) + 0.01 * by for item in value]
    elif attribute.type == kind.STRINGS or attribute.name == "perm":
        changed_value = [*value[1:], *value[:1]]
    elif attribute.type == kind.INTS and value:
        changed_value = [value[0] + 1, *value[1:]]
    return changed_value


def change_weight(array: np.ndarray[Any, Any], by: float = 1.0) -> np.ndarray[Any, Any] | None:
    """Return the array with its largest element, or its first integer, changed."""
    changed = array.copy()
    if not changed.size or changed.dtype.kind not in "fiu":
        return None
    position = np.unravel_index(np.abs(changed.astype(np.float64)).argmax(), changed.shape)
    if changed.dtype.kind == "f":
        changed[position] = changed[position] * (1 + 0.5 * by) if changed[position] else by
    else:
        position = (0,) * changed.ndim
        changed[position] = (
            changed[position] - 1 if changed[position] > 0 else changed[position] + 1
        )
    return changed


def mutate(
    model: onnx.ModelProto, node_index: int, *, by: float = 1.0
) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yield copies of a model, each with one change of a node, and the kind of change.

    `place`: index of the node. `by`: relative size of a change of a float; 1 adds about half.
    """

    def copy() -> tuple[onnx.ModelProto, onnx.NodeProto]:
        model_copy = onnx.ModelProto()
        model_copy.CopyFrom(model)
        return model_copy, model_copy.graph.node[node_index]

    node = model.graph.node[node_index]
    weights = {initializer.name: initializer for initializer in model.graph.initializer}
    for index, attribute in enumerate(node.attribute):
        value = change_attribute(attribute, by)
        if value is not None:
            model_copy, node_copy = copy()
            node_copy.attribute[index].CopyFrom(helper.make_attribute(attribute.name, value))
            yield (
                ("axis" if attribute.name in AXES else "attribute") + f" {attribute.name}",
                model_copy,
            )
    for index, name in enumerate(node.input):
        array = numpy_helper.to_array(weights[name]) if name in weights else None
        changed = None if array is None else change_weight(array, by)
        if changed is not None:
            model_copy, node_copy = copy()
            node_copy.input[index] = f"{name} changed"
            model_copy.graph.initializer.append(numpy_helper.from_array(changed, f"{name} changed"))
            yield f"weight {index}", model_copy
    yield from rewire(model, node_index)


def rewire(model: onnx.ModelProto, node_index: int) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yield a copy with the first two inputs of the node swapped, and a copy without the node."""
    node = model.graph.node[node_index]
    weights = {initializer.name for initializer in model.graph.initializer}
    outputs = {output.name for output in model.graph.output}
    if len(node.input) > 1 and all(name and name not in weights for name in node.input[:2]):
        model_copy = onnx.ModelProto()
        model_copy.CopyFrom(model)
        node_copy = model_copy.graph.node[node_index]
        node_copy.input[0], node_copy.input[1] = node.input[1], node.input[0]
        yield "swapped inputs", model_copy
    if node.input and node.input[0] not in weights and not outputs & set(node.output):
        model_copy = onnx.ModelProto()
        model_copy.CopyFrom(model)
        for reader in model_copy.graph.node:
            for index, name in enumerate(reader.input):
                if name == node.output[0]:
                    reader.input[index] = node.input[0]
        del model_copy.graph.node[node_index]
        yield "dropped", model_copy


def convert_inputs_to_weights(
    model: onnx.ModelProto, inputs: list[Any]
) -> tuple[onnx.ModelProto, Inputs]:
    """Convert all inputs after the first to initializers, and draw samples of the first one.

    The samples are random variants of the test's input, concatenated along axis 0.
    """
    converted = onnx.ModelProto()
    converted.CopyFrom(model)
    names = [value_info.name for value_info in model.graph.input]
    for name, value in zip(names[1:], inputs[1:], strict=True):
        converted.graph.initializer.append(numpy_helper.from_array(value, name))
    del converted.graph.input[1:]
    return converted, {names[0]: draw_near(inputs[0], seed=0)}


def draw_near(array: np.ndarray[Any, Any], *, seed: int) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(REPEATS):
        row = random.permuted(array)
        if array.dtype.kind == "f":
            row = (row * (1 + 0.2 * random.standard_normal(array.shape))).astype(array.dtype)
        rows.append(row)
    return np.concatenate(rows)


def run_all(model: onnx.ModelProto, samples: Inputs, size: int) -> list[Any]:
    """Return the outputs of all calls. Raises the exceptions of ONNX Runtime."""
    session = open_plain(model.SerializeToString())
    outputs = []
    for start in range(0, len(next(iter(samples.values()))), size):
        outputs += session.run(None, {n: x[start : start + size] for n, x in samples.items()})
    return outputs


def can_run(model: onnx.ModelProto, samples: Inputs, size: int) -> bool:
    """Return whether ONNX Runtime can run a file, in a child process that may crash."""

    def compute() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            run_all(model, samples, size)
        except Exception:
            os._exit(1)
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=compute)
    child.start()
    child.join()
    return child.exitcode == 0


def are_equal(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(
        isinstance(a, np.ndarray)
        and isinstance(b, np.ndarray)
        and a.dtype == b.dtype
        and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        for a, b in zip(first, second, strict=True)
    )


def judge(old: onnx.ModelProto, new: onnx.ModelProto, samples: Inputs) -> tuple[str, str]:
    """Return `refused`, `not judged`, `same`, `passed` or `crashed`, and the reason."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{name}.onnx" for name in ("old", "new")]
        for path, model in zip(paths, (old, new), strict=True):
            onnx.save(model, path)
        try:
            result = gate.check(paths[1], paths[0], samples)  # type: ignore[arg-type]
        except GateError as error:
            return "not judged", f"{type(error).__name__}: {error}"[:300]
        except Exception:
            return "crashed", traceback.format_exc()[-800:]
    if not result.decision.passed:
        return "refused", result.decision.verdict.value
    name, array = next(iter(samples.items()))
    size = len(array) // REPEATS
    other_inputs = [{name: draw_near(array[:size], seed=seed)} for seed in (1, 2, 3)]
    same = all(are_equal(run_all(old, x, size), run_all(new, x, size)) for x in other_inputs)
    return ("same", "") if same else ("passed", str(result.decision.verdict.value))


def draw_candidates(
    only: str = "",
) -> Iterator[tuple[str, onnx.ModelProto, onnx.ModelProto, Inputs]]:
    """Yield a name, the original model, a changed model and samples.

    Uses node tests of one node, in an order that mixes operators, with the first change of each
    that ONNX Runtime runs.
    """
    tests = list(cases())
    for test_index in np.random.default_rng(0).permutation(len(tests)).tolist():
        name, model, inputs = tests[test_index]
        if only not in name or len(model.graph.node) != 1 or not inputs:
            continue
        if not all(isinstance(value, np.ndarray) and value.size for value in inputs):
            continue
        first = inputs[0]
        if not first.ndim or first.dtype.kind not in "fiub" or not np.isfinite(first).all():
            continue
        try:
            old, samples = convert_inputs_to_weights(model, inputs)
            size = len(first)
            run_all(old, samples, size)
        except Exception:
            continue  # ONNX Runtime does not run it, or not with initializers as weights.
        changes = list(mutate(old, 0))
        for choice in np.random.default_rng(test_index).permutation(len(changes)).tolist():
            kind, new = changes[choice]
            if can_run(new, samples, size):
                yield f"{name}: {kind}", old, new, samples
                break


def main() -> None:
    """Print the files that pass or cannot be judged, and the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=300, help="Changed files.")
    parser.add_argument("--only", default="", help="Tests whose name has this text.")
    parser.add_argument("--json", type=Path, help="Where to write the results.")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    results: dict[str, tuple[str, str]] = {}
    for name, old, new, samples in itertools.islice(draw_candidates(options.only), options.count):
        results[name] = outcome, why = judge(old, new, samples)
        if outcome != "refused":
            sys.stdout.write(f"{outcome:10} {name}: {why}\n")
            sys.stdout.flush()
    counts = Counter(outcome for outcome, _ in results.values())
    sys.stdout.write(f"{len(results)} changed files: {dict(counts)}\n")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
