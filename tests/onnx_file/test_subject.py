from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from gate import Digest
from gate.errors import OnnxFileError
from gate.onnx_file.reading import read_subject, verify_file
from gate.records.evidence import Subject, TensorSpec
from tests.export.graphs import create_adder, write_model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def test_subject_has_interface_opset_and_producer(path: Path) -> None:
    write_model(create_adder(), path)
    assert read_subject(path) == Subject(
        sha256=Digest.from_file(path),
        size_bytes=path.stat().st_size,
        opset=13,
        producer="by hand 1",
        inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", 4)),),
        outputs=(TensorSpec(name="y", dtype="float32", shape=("batch", 4)),),
    )


def test_axes_without_size_or_name(path: Path) -> None:
    assert read_subject(write_model(create_adder((None, "n", 4)), path)).inputs[0].shape == (
        "?",
        "n",
        4,
    )


def test_initializers_listed_as_inputs_are_not_inputs(path: Path) -> None:
    model = create_adder(ir_version=3, opset=9)
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4]))
    subject = read_subject(write_model(model, path))
    assert [spec.name for spec in subject.inputs] == ["x"]


def remove_graph(model: onnx.ModelProto) -> None:
    model.ClearField("graph")


def remove_opset(model: onnx.ModelProto) -> None:
    del model.opset_import[:]


def set_foreign_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].domain = "com.example"
    model.graph.node[0].domain = "com.example"


def remove_ir_version(model: onnx.ModelProto) -> None:
    model.ClearField("ir_version")


def truncate_weights(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].raw_data = b"\0" * 12


def remove_weights(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].ClearField("raw_data")


def set_unknown_operator(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "Adddd"


def set_dangling_name(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[1] = "nowhere"


def unsort_nodes(model: onnx.ModelProto) -> None:
    """Unsort the nodes, as float16 converters do; ONNX Runtime accepts such files."""
    first = model.graph.node[0]
    first.input[0], before = "cast", first.input[0]
    model.graph.node.append(helper.make_node("Identity", [before], ["cast"]))


def remove_input_rank(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.ClearField("shape")


def remove_output_rank(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.ClearField("shape")


def add_sequence_input(model: onnx.ModelProto) -> None:
    value = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)
    model.graph.input.append(value)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (remove_graph, "contains no graph"),
        (remove_opset, "opset_import"),
        (set_foreign_opset, "names no opset of the ONNX domain"),
        (remove_ir_version, "ir_version"),
        (truncate_weights, "too small for the declared shape"),
        (remove_weights, "not a valid ONNX model"),
        (set_unknown_operator, "Adddd"),
        (set_dangling_name, "nowhere"),
        (unsort_nodes, r"topological_sort\(\)"),
        (remove_input_rank, "'shape' of 'type' is required"),
        (add_sequence_input, "s is declared as sequence_type, expected a tensor"),
    ],
)
def test_invalid_model_is_refused(
    path: Path, spoil: Callable[[onnx.ModelProto], None], says: str
) -> None:
    model = create_adder()
    read_subject(write_model(model, path))
    spoil(model)
    with pytest.raises(OnnxFileError, match=says):
        read_subject(write_model(model, path))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"this is text", "not an ONNX model"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 100, "not an ONNX model|contains no graph"),
        (b"PK\x03\x04" + b"\0" * 100, "not an ONNX model|contains no graph"),
        (b"\0" * 100, "not an ONNX model|contains no graph"),
        (b'{"irVersion": "8"}', "not an ONNX model"),
    ],
)
def test_file_that_is_not_onnx_is_refused(path: Path, content: bytes, says: str) -> None:
    path.write_bytes(content)
    for read in (read_subject, lambda path: verify_file(path, opset=13)):
        with pytest.raises(OnnxFileError, match=says):
            read(path)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux")
def test_unreadable_file_is_refused(path: Path) -> None:
    path.symlink_to("/proc/self/mem")
    with pytest.raises(OnnxFileError, match="cannot read"):
        read_subject(path)


def test_each_truncation_is_refused(path: Path) -> None:
    data = write_model(create_adder(), path).read_bytes()
    for kept in range(len(data)):
        path.write_bytes(data[:kept])
        with pytest.raises(OnnxFileError):
            read_subject(path)
        with pytest.raises(OnnxFileError):
            verify_file(path, opset=13)


def contradict_shape(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 5


def contradict_dtype(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64


def set_impossible_operands(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 3


def contradict_computed_shape(model: onnx.ModelProto) -> None:
    """Declare zeros with the shape of x to be larger: only data propagation detects it."""
    del model.graph.node[:]
    model.graph.node.extend(
        [
            helper.make_node("Shape", ["x"], ["s"]),
            helper.make_node("ConstantOfShape", ["s"], ["y"]),
        ]
    )
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4]))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 5]))


def set_old_ir_version(model: onnx.ModelProto) -> None:
    model.ir_version = 4


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (contradict_shape, "Inference|inferred|differ"),
        (contradict_dtype, "elem type|type"),
        (set_impossible_operands, "broadcast|Incompatible|dimension"),
        (contradict_computed_shape, "contradict each other"),
        (set_old_ir_version, "IR version 4, expected 7"),
        (truncate_weights, "too small"),
        (set_dangling_name, "nowhere"),
    ],
)
def test_verification_checks_shapes_and_dtypes(
    path: Path, spoil: Callable[[onnx.ModelProto], None], says: str
) -> None:
    model = create_adder()
    spoil(model)
    with pytest.raises(OnnxFileError, match=says):
        verify_file(write_model(model, path), opset=13)


@pytest.mark.parametrize("opset", [12, 14])
def test_unexpected_opset_is_refused(path: Path, opset: int) -> None:
    write_model(create_adder(), path)
    with pytest.raises(OnnxFileError, match=f"opset 13, expected opset {opset}"):
        verify_file(path, opset=opset)


def test_newer_ir_version_is_refused(path: Path) -> None:
    write_model(create_adder(ir_version=onnx.IR_VERSION + 1), path)
    with pytest.raises(OnnxFileError, match="IR version"):
        verify_file(path, opset=13)
    with pytest.raises(OnnxFileError, match="ir_version"):
        read_subject(path)


def remove_output_type(model: onnx.ModelProto) -> None:
    model.graph.output[0].ClearField("type")


@pytest.mark.parametrize("spoil", [remove_output_rank, remove_output_type])
def test_error_of_the_checker_is_described(
    path: Path, spoil: Callable[[onnx.ModelProto], None]
) -> None:
    model = create_adder()
    complete = read_subject(write_model(model, path))
    spoil(model)
    described = read_subject(write_model(model, path))
    assert [(spec.name, spec.dtype, len(spec.shape)) for spec in described.outputs] == [
        (spec.name, spec.dtype, len(spec.shape)) for spec in complete.outputs
    ]
    assert described.inputs == complete.inputs
    assert described.checker
    assert complete.checker is None
