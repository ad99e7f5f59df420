"""Giving inputs and outputs names that the TorchScript-based exporter refuses or forgets.

It refuses plain numbers: detector backbones return `{"0": …, "1": …}`. They are exported under
other names, and renamed. It forgets the name of an output that a function of the file computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from gate.export.axes import Axes
from gate.onnxfile.walk import subgraphs

_STAND_IN = "parity_gate_value_"


def accepted(names: Sequence[str]) -> list[str]:
    """The names, with a stand-in for each that is a plain number."""
    return [f"{_STAND_IN}{name}" if name.isdecimal() else name for name in names]


def rename(path: Path, names: Sequence[str]) -> None:
    """Exchange the stand-ins of `names` in the file `path`. Raises OSError.

    What the exporter itself called so, deep in the graph, makes way.
    """
    wanted = [name for name in names if name.isdecimal()]
    if not wanted:
        return
    new = {f"{_STAND_IN}{name}": name for name in wanted}
    new |= {name: f"inner_{name}" for name in wanted}
    model = onnx.ModelProto.FromString(path.read_bytes())
    _rename(model.graph, new)
    path.write_bytes(model.SerializeToString(deterministic=True))


def rename_outputs(path: Path, names: Sequence[str]) -> None:
    """Give the outputs of the file `path` these names, by position, where it has others.

    Raises OSError. Another number of outputs is left to whoever verifies the file.
    """
    model = onnx.ModelProto.FromString(path.read_bytes())
    pairs = zip((value.name for value in model.graph.output), names, strict=False)
    given = {value.name for value in model.graph.input}
    new = {old: name for old, name in pairs if old != name and old not in given}
    if not new:
        return
    makes_way = {name: f"inner_{name}" for name in new.values() if name not in new}
    _rename(model.graph, makes_way | new)
    path.write_bytes(model.SerializeToString(deterministic=True))


def name_axes(path: Path, axes: Axes) -> None:
    """Label these axes of the outputs of the file `path`, where they have no fixed size.

    `dynamo` finds expressions for them (`2*height`), and takes no names. Raises OSError.
    """
    if not axes:
        return
    model = onnx.load(path, load_external_data=False)
    for value in model.graph.output:
        shape = value.type.tensor_type.shape.dim
        for axis, label in axes.get(value.name, {}).items():
            if axis < len(shape) and not shape[axis].HasField("dim_value"):
                shape[axis].dim_param = label
    path.write_bytes(model.SerializeToString(deterministic=True))


def _rename(graph: onnx.GraphProto, new: dict[str, str]) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = new.get(value.name, value.name)
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [new.get(name, name) for name in names]
        for inner in subgraphs(node):
            _rename(inner, new)
