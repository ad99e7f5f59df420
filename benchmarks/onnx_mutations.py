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
"""Calls of a file with fixed shapes."""

Inputs = dict[str, np.ndarray[Any, Any]]


def changed_attribute(attribute: onnx.AttributeProto, by: float = 1.0) -> Any:
    """Return another value for an attribute; None: of its kind none is changed."""
    value: Any = helper.get_attribute_value(attribute)
    kind, made = onnx.AttributeProto, None
    if attribute.type == kind.INT:
        made = value + 1 if value < 1 else value - 1
    elif attribute.type == kind.FLOAT:
        made = value * (1 + 0.5 * by) + 0.1 * by
    elif attribute.type == kind.FLOATS:
        made = [each * (1 + 0.1 * by) + 0.01 * by for each in value]
    elif attribute.type == kind.STRINGS or attribute.name == "perm":
        made = [*value[1:], *value[:1]]
    elif attribute.type == kind.INTS and value:
        made = [value[0] + 1, *value[1:]]
    return made


def changed_weight(array: np.ndarray[Any, Any], by: float = 1.0) -> np.ndarray[Any, Any] | None:
    """Return the array with its largest element, or its first integer, changed."""
    made = array.copy()
    if not made.size or made.dtype.kind not in "fiu":
        return None
    at = np.unravel_index(np.abs(made.astype(np.float64)).argmax(), made.shape)
    if made.dtype.kind == "f":
        made[at] = made[at] * (1 + 0.5 * by) if made[at] else by
    else:
        at = (0,) * made.ndim
        made[at] = made[at] - 1 if made[at] > 0 else made[at] + 1
    return made


def mutations(
    model: onnx.ModelProto, place: int, *, by: float = 1.0
) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yield copies of a model, each with one change of the node at `place`, and what was changed.

    `by`: the size of a change of a float, where 1 changes it by half.
    """

    def copy() -> tuple[onnx.ModelProto, onnx.NodeProto]:
        made = onnx.ModelProto()
        made.CopyFrom(model)
        return made, made.graph.node[place]

    node = model.graph.node[place]
    weights = {each.name: each for each in model.graph.initializer}
    for index, attribute in enumerate(node.attribute):
        value = changed_attribute(attribute, by)
        if value is not None:
            made, other = copy()
            other.attribute[index].CopyFrom(helper.make_attribute(attribute.name, value))
            yield ("axis" if attribute.name in AXES else "attribute") + f" {attribute.name}", made
    for index, name in enumerate(node.input):
        array = numpy_helper.to_array(weights[name]) if name in weights else None
        changed = None if array is None else changed_weight(array, by)
        if changed is not None:
            made, other = copy()
            other.input[index] = f"{name} changed"
            made.graph.initializer.append(numpy_helper.from_array(changed, f"{name} changed"))
            yield f"weight {index}", made
    yield from rewired(model, place)


def rewired(model: onnx.ModelProto, place: int) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yield copies with the first two inputs of the node swapped, and without the node."""
    node = model.graph.node[place]
    weights = {each.name for each in model.graph.initializer}
    outputs = {each.name for each in model.graph.output}
    if len(node.input) > 1 and all(name and name not in weights for name in node.input[:2]):
        made = onnx.ModelProto()
        made.CopyFrom(model)
        other = made.graph.node[place]
        other.input[0], other.input[1] = node.input[1], node.input[0]
        yield "swapped inputs", made
    if node.input and node.input[0] not in weights and not outputs & set(node.output):
        made = onnx.ModelProto()
        made.CopyFrom(model)
        for each in made.graph.node:
            for index, name in enumerate(each.input):
                if name == node.output[0]:
                    each.input[index] = node.input[0]
        del made.graph.node[place]
        yield "dropped", made


def with_weights(model: onnx.ModelProto, inputs: list[Any]) -> tuple[onnx.ModelProto, Inputs]:
    """Return the model with its inputs after the first as initializers, and samples of the first
    one: several random ones near that of the test, along axis 0."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    names = [each.name for each in model.graph.input]
    for name, value in zip(names[1:], inputs[1:], strict=True):
        made.graph.initializer.append(numpy_helper.from_array(value, name))
    del made.graph.input[1:]
    return made, {names[0]: near(inputs[0], seed=0)}


def near(array: np.ndarray[Any, Any], *, seed: int) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(REPEATS):
        row = random.permuted(array)
        if array.dtype.kind == "f":
            row = (row * (1 + 0.2 * random.standard_normal(array.shape))).astype(array.dtype)
        rows.append(row)
    return np.concatenate(rows)


def outputs_of(model: onnx.ModelProto, samples: Inputs, size: int) -> list[Any]:
    """The outputs of all calls. Raises what ONNX Runtime raises."""
    session = open_plain(model.SerializeToString())
    made = []
    for start in range(0, len(next(iter(samples.values()))), size):
        made += session.run(None, {n: x[start : start + size] for n, x in samples.items()})
    return made


def runs(model: onnx.ModelProto, samples: Inputs, size: int) -> bool:
    """Whether ONNX Runtime computes a file, in another process: some changes end the process."""

    def compute() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            outputs_of(model, samples, size)
        except Exception:
            os._exit(1)
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=compute)
    child.start()
    child.join()
    return child.exitcode == 0


def are_equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        isinstance(a, np.ndarray)
        and isinstance(b, np.ndarray)
        and a.dtype == b.dtype
        and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        for a, b in zip(one, other, strict=True)
    )


def judged(old: onnx.ModelProto, new: onnx.ModelProto, samples: Inputs) -> tuple[str, str]:
    """Return `refused`, `not judged`, `same`, `passed` or `crashed`, with the reason."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{name}.onnx" for name in ("old", "new")]
        for path, model in zip(paths, (old, new), strict=True):
            onnx.save(model, path)
        try:
            found = gate.check(paths[1], paths[0], samples)  # type: ignore[arg-type]
        except GateError as error:
            return "not judged", f"{type(error).__name__}: {error}"[:300]
        except Exception:
            return "crashed", traceback.format_exc()[-800:]
    if not found.decision.passed:
        return "refused", found.decision.verdict.value
    name, array = next(iter(samples.items()))
    size = len(array) // REPEATS
    others = [{name: near(array[:size], seed=seed)} for seed in (1, 2, 3)]
    same = all(are_equal(outputs_of(old, x, size), outputs_of(new, x, size)) for x in others)
    return ("same", "") if same else ("passed", str(found.decision.verdict.value))


def candidates(only: str = "") -> Iterator[tuple[str, onnx.ModelProto, onnx.ModelProto, Inputs]]:
    """Yield a name, the original, a changed model and samples, of node tests of one node, in an
    order that mixes operators: of each test one change that ONNX Runtime runs."""
    tests = list(cases())
    for at in np.random.default_rng(0).permutation(len(tests)).tolist():
        name, model, inputs = tests[at]
        if only not in name or len(model.graph.node) != 1 or not inputs:
            continue
        if not all(isinstance(value, np.ndarray) and value.size for value in inputs):
            continue
        first = inputs[0]
        if not first.ndim or first.dtype.kind not in "fiub" or not np.isfinite(first).all():
            continue
        try:
            old, samples = with_weights(model, inputs)
            size = len(first)
            outputs_of(old, samples, size)
        except Exception:
            continue  # ONNX Runtime runs it not, or not with weights
        changes = list(mutations(old, 0))
        for choice in np.random.default_rng(at).permutation(len(changes)).tolist():
            what, new = changes[choice]
            if runs(new, samples, size):
                yield f"{name}: {what}", old, new, samples
                break


def main() -> None:
    """Print what passes or can't be judged, and the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=300, help="Changed files.")
    parser.add_argument("--only", default="", help="Tests whose name has this text.")
    parser.add_argument("--json", type=Path, help="Where to write the results.")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    results: dict[str, tuple[str, str]] = {}
    for name, old, new, samples in itertools.islice(candidates(options.only), options.count):
        results[name] = outcome, why = judged(old, new, samples)
        if outcome != "refused":
            sys.stdout.write(f"{outcome:10} {name}: {why}\n")
            sys.stdout.flush()
    counts = Counter(outcome for outcome, _ in results.values())
    sys.stdout.write(f"{len(results)} changed files: {dict(counts)}\n")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
