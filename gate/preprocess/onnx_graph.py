"""Build the specification as an ONNX graph; prepend it to a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, compose, helper, numpy_helper, version_converter

from gate.errors import InputMismatch, OnnxFileError
from gate.onnx_file.reading import opset_of
from gate.onnx_file.sessions import open_on_cpu
from gate.preprocess.implementations import Implementation, Preprocess
from gate.preprocess.spec import PreprocessSpec, Resize, geometry
from gate.storage import files
from gate.storage.arrays import Pixels, Tensor

PICTURES = "pictures"
"""The graph's input: uint8 RGB (batch, height, width, 3)."""

TENSORS = "preprocessed"
"""The graph's output: the spec's layout and dtype, with a batch axis."""

MIN_OPSET = 18
"""The first opset whose Resize supports antialias."""

Coordinates = Literal["half_pixel", "asymmetric"]

_DTYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "uint8": TensorProto.UINT8,
}

_MODES = {"nearest": "nearest", "bilinear": "linear", "bicubic": "cubic"}

_ONNX_ERRORS = (ValueError, RuntimeError, TypeError, onnx.checker.ValidationError)


def build_graph(
    spec: PreprocessSpec, *, opset: int = MIN_OPSET, coordinates: Coordinates = "half_pixel"
) -> onnx.ModelProto:
    """Build a model that computes the spec, from `PICTURES` to `TENSORS`.

    `asymmetric`: without half-pixel centers and antialias, like Upsample, Resize before opset 11,
    and TensorFlow 1.
    """
    graph = _Graph(PICTURES)
    graph.then("Cast", to=TensorProto.FLOAT)
    graph.then("Transpose", perm=[0, 3, 1, 2])
    if spec.resize is not None:
        _resize(graph, spec.resize, coordinates)
    if spec.crop is not None:
        _crop(graph, spec.crop)
    _values(graph, spec)
    graph.then("Identity", output=TENSORS)
    # Different names for unknown axes: the same name would imply the same size.
    sides = [axis or f"side_{index}" for index, axis in enumerate(spec.shape, 1)]
    pictures: list[str | int] = ["batch", "height", "width", 3]
    graph_proto = helper.make_graph(
        graph.nodes,
        "preprocessing",
        [helper.make_tensor_value_info(PICTURES, TensorProto.UINT8, pictures)],
        [helper.make_tensor_value_info(TENSORS, _DTYPES[spec.dtype], ["batch", *sides])],
        graph.constants,
    )
    model = helper.make_model(graph_proto, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = helper.find_min_ir_version_for(list(model.opset_import))
    onnx.checker.check_model(model, full_check=True)
    return model


def prepend_graph(spec: PreprocessSpec, model: Path, output: Path) -> None:
    """Write the file `model` to `output` with the spec prepended to its only input.

    A model below opset 18 is converted to it, so the new file must be measured, too. Raises
    InputMismatch if the model's input differs from the spec's tensor, OnnxFileError if the file
    can't be read, converted or merged.
    """
    try:
        loaded = onnx.load(str(model))
    except Exception as error:
        raise OnnxFileError(f"cannot read {model} as ONNX: {error}. Export it again.") from error
    name = _only_input(spec, loaded, model)
    try:
        if opset_of(loaded) < MIN_OPSET:
            loaded = version_converter.convert_version(loaded, MIN_OPSET)
        front = build_graph(spec, opset=opset_of(loaded))
        front.ir_version = loaded.ir_version = max(front.ir_version, loaded.ir_version)
        joined = compose.merge_models(
            front, loaded, io_map=[(TENSORS, name)], prefix1="preprocess/", name=loaded.graph.name
        )
        _rename_input(joined, f"preprocess/{PICTURES}")
        onnx.checker.check_model(joined)
        files.write_bytes(output, joined.SerializeToString())
    except _ONNX_ERRORS as error:
        raise OnnxFileError(
            f"the preprocessing can't be prepended to {model}: {error} "
            f"Export the model with opset {MIN_OPSET} or later, to a single file below 2 GB."
        ) from error


class _Graph:
    """A chain of nodes: the first input of each is the output of the node before it."""

    def __init__(self, first: str) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.last = first

    def node(self, operator: str, inputs: list[str], output: str = "", **attributes: Any) -> str:
        """Add a node outside of the chain; return the name of its output."""
        name = output or f"{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], name=f"/{name}", **attributes))
        return name

    def then(self, operator: str, *further: str, output: str = "", **attributes: Any) -> None:
        """Append a node to the chain."""
        self.last = self.node(operator, [self.last, *further], output, **attributes)

    def constant(self, values: Any, dtype: type[np.generic]) -> str:
        """Add an initializer; return its name."""
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(values, dtype), name))
        return name

    def size(self) -> str:
        """Add a node for height and width of the chain's last output; return its name."""
        return self.node("Shape", [self.last], start=2, end=4)


def _resize(graph: _Graph, resize: Resize, coordinates: Coordinates) -> None:
    if resize.size is not None:
        size = graph.constant(resize.size, np.int64)
    else:
        side, now = graph.constant([resize.shortest_side], np.int64), graph.size()
        shorter = graph.node("ReduceMin", [now], keepdims=1)
        size = graph.node("Div", [graph.node("Mul", [now, side]), shorter])
    outer = graph.node("Shape", [graph.last], start=0, end=2)
    antialias = resize.antialias and coordinates == "half_pixel"
    graph.then(
        "Resize", "", "", graph.node("Concat", [outer, size], axis=0),
        mode=_MODES[resize.mode],
        antialias=int(antialias),
        coordinate_transformation_mode=coordinates,
        cubic_coeff_a=-0.5 if antialias else -0.75,
        exclude_outside=int(antialias),
        nearest_mode="round_prefer_ceil" if coordinates == "half_pixel" else "floor",
    )  # fmt: skip
    # Round to the values of uint8, like the other implementations.
    graph.then("Round")
    graph.then("Clip", graph.constant(0.0, np.float32), graph.constant(255.0, np.float32))


def _crop(graph: _Graph, crop: tuple[int, int]) -> None:
    sides = graph.constant(crop, np.int64)
    rest = graph.node("Cast", [graph.node("Sub", [graph.size(), sides])], to=TensorProto.FLOAT)
    # ONNX's Round rounds half to even, like Python's.
    half = graph.node("Round", [graph.node("Mul", [rest, graph.constant(0.5, np.float32)])])
    start = graph.node("Cast", [half], to=TensorProto.INT64)
    end = graph.node("Add", [start, sides])
    graph.then("Slice", start, end, graph.constant([2, 3], np.int64))
    # For a picture smaller than the crop, the start is negative, which Slice counts from the end.
    # The result is then too small for this Reshape, so the runtime fails. 0 keeps the batch axis.
    graph.then("Reshape", graph.constant([0, 3, *crop], np.int64))


def _values(graph: _Graph, spec: PreprocessSpec) -> None:
    if spec.channels == "bgr":
        graph.then("Gather", graph.constant([2, 1, 0], np.int64), axis=1)
    if spec.value_range != (0, 255):
        graph.then("Div", graph.constant(255.0, np.float32))
    if spec.value_range == (-1, 1):
        graph.then("Mul", graph.constant(2.0, np.float32))
        graph.then("Sub", graph.constant(1.0, np.float32))
    if spec.mean is not None and spec.std is not None:
        for operator, numbers in (("Sub", spec.mean), ("Div", spec.std)):
            graph.then(operator, graph.constant(np.reshape(numbers, (1, 3, 1, 1)), np.float32))
    if spec.layout == "nhwc":
        graph.then("Transpose", perm=[0, 2, 3, 1])
    if spec.dtype != "float32":
        graph.then("Cast", to=_DTYPES[spec.dtype])


def _only_input(spec: PreprocessSpec, model: onnx.ModelProto, path: Path) -> str:
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    if len(inputs) != 1:
        raise InputMismatch(
            f"{path} has {len(inputs)} inputs, expected one for the picture. "
            "Preprocess for such a model outside of the file."
        )
    tensor = inputs[0].type.tensor_type
    sizes = [axis.dim_value if axis.HasField("dim_value") else "any" for axis in tensor.shape.dim]
    names = {number: name for name, number in _DTYPES.items()}
    got = names.get(tensor.elem_type, TensorProto.DataType.Name(tensor.elem_type).lower())
    misfit = spec.tensor.misfit([(got, sizes)])
    if misfit is not None:
        raise InputMismatch(
            f"{misfit} as '{inputs[0].name}' ({path}). Use the spec that the model was trained "
            "with."
        )
    return str(inputs[0].name)


def _rename_input(model: onnx.ModelProto, name: str) -> None:
    """Rename the input to `PICTURES`, unless the model uses this name."""
    used = {tensor for node in model.graph.node for tensor in (*node.input, *node.output)}
    if PICTURES in used:
        return
    for value in model.graph.input:
        value.name = PICTURES if value.name == name else value.name
    for node in model.graph.node:
        for index, tensor in enumerate(node.input):
            node.input[index] = PICTURES if tensor == name else tensor


@contextmanager
def _opened(spec: PreprocessSpec, *, coordinates: Coordinates) -> Iterator[Preprocess]:
    session = open_on_cpu(build_graph(spec, coordinates=coordinates).SerializeToString())

    def preprocess(pixels: Pixels) -> Tensor:
        geometry(spec, *pixels.shape[:2])  # Raises for sizes that the graph can't handle.
        tensor: Tensor = session.run([TENSORS], {PICTURES: pixels[None]})[0][0]
        return tensor

    yield preprocess


def _incapable(spec: PreprocessSpec, *, coordinates: Coordinates) -> str | None:
    if coordinates == "asymmetric" and spec.resize is None:
        return "without a resize there are no coordinates"
    return None


def _version() -> str:
    from importlib.metadata import version

    import onnxruntime

    return f"onnxruntime {onnxruntime.__version__}, onnx {version('onnx')}"


def _implementation(coordinates: Coordinates) -> Implementation:
    return Implementation(
        partial(_incapable, coordinates=coordinates),
        partial(_opened, coordinates=coordinates),
        _version,
    )


IMPLEMENTATION = _implementation("half_pixel")

ASYMMETRIC = _implementation("asymmetric")
