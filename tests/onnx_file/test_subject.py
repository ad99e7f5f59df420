from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from gate.errors import OnnxFileError
from gate.onnx_file.reading import read_subject, verify_file
from gate.records.evidence import Subject, TensorSpec
from gate.storage.digest import Digest
from tests.export.graphs import adder, put


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def test_subject_has_interface_opset_and_producer(path: Path) -> None:
    put(adder(), path)
    assert read_subject(path) == Subject(
        sha256=Digest.from_file(path),
        size_bytes=path.stat().st_size,
        opset=13,
        producer="by hand 1",
        inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", 4)),),
        outputs=(TensorSpec(name="y", dtype="float32", shape=("batch", 4)),),
    )


@pytest.mark.parametrize(
    ("elem_type", "dtype"),
    [
        (TensorProto.FLOAT16, "float16"),
        (TensorProto.DOUBLE, "float64"),
        (TensorProto.INT64, "int64"),
        (TensorProto.BFLOAT16, "bfloat16"),
    ],
)
def test_dtypes_have_numpy_names(path: Path, elem_type: int, dtype: str) -> None:
    assert read_subject(put(adder(elem_type=elem_type), path)).inputs[0].dtype == dtype


def test_axes_without_size_or_name(path: Path) -> None:
    assert read_subject(put(adder((None, "n", 4)), path)).inputs[0].shape == ("?", "n", 4)


def test_initializers_listed_as_inputs_are_not_inputs(path: Path) -> None:
    model = adder(ir_version=3, opset=9)
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4]))
    subject = read_subject(put(model, path))
    assert [spec.name for spec in subject.inputs] == ["x"]


def no_graph(model: onnx.ModelProto) -> None:
    model.ClearField("graph")


def no_opset(model: onnx.ModelProto) -> None:
    del model.opset_import[:]


def foreign_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].domain = "com.example"
    model.graph.node[0].domain = "com.example"


def no_ir_version(model: onnx.ModelProto) -> None:
    model.ClearField("ir_version")


def short_weights(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].raw_data = b"\0" * 12


def no_weights(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].ClearField("raw_data")


def unknown_operator(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "Adddd"


def dangling_name(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[1] = "nowhere"


def unsorted(model: onnx.ModelProto) -> None:
    """As converters to float16 leave it, and ONNX Runtime takes it."""
    first = model.graph.node[0]
    first.input[0], before = "cast", first.input[0]
    model.graph.node.append(helper.make_node("Identity", [before], ["cast"]))


def input_without_rank(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.ClearField("shape")


def output_without_rank(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.ClearField("shape")


def sequence_input(model: onnx.ModelProto) -> None:
    value = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)
    model.graph.input.append(value)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (no_graph, "contains no graph"),
        (no_opset, "opset_import"),
        (foreign_opset, "names no opset of the ONNX domain"),
        (no_ir_version, "ir_version"),
        (short_weights, "too small for the declared shape"),
        (no_weights, "not a valid ONNX model"),
        (unknown_operator, "Adddd"),
        (dangling_name, "nowhere"),
        (unsorted, r"topological_sort\(\)"),
        (input_without_rank, "'shape' of 'type' is required"),
        (sequence_input, "s is declared as sequence_type, expected a tensor"),
    ],
)
def test_invalid_model_is_refused(
    path: Path, spoil: Callable[[onnx.ModelProto], None], says: str
) -> None:
    model = adder()
    read_subject(put(model, path))
    spoil(model)
    with pytest.raises(OnnxFileError, match=says):
        read_subject(put(model, path))


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


def test_path_that_is_not_a_file_is_refused(path: Path) -> None:
    with pytest.raises(OnnxFileError, match="is missing"):
        read_subject(path)
    with pytest.raises(OnnxFileError, match="is a folder"):
        read_subject(path.parent)
    os.mkfifo(path)
    with pytest.raises(OnnxFileError, match="is not a file"):
        read_subject(path)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux")
def test_unreadable_file_is_refused(path: Path) -> None:
    path.symlink_to("/proc/self/mem")
    with pytest.raises(OnnxFileError, match="cannot read"):
        read_subject(path)


def test_string_dtype(path: Path) -> None:
    model = adder()
    model.graph.input.append(helper.make_tensor_value_info("t", TensorProto.STRING, [1]))
    assert read_subject(put(model, path)).inputs[1].dtype == "string"


def test_each_truncation_is_refused(path: Path) -> None:
    data = put(adder(), path).read_bytes()
    for kept in range(len(data)):
        path.write_bytes(data[:kept])
        with pytest.raises(OnnxFileError):
            read_subject(path)
        with pytest.raises(OnnxFileError):
            verify_file(path, opset=13)


def test_valid_file_is_verified(path: Path) -> None:
    verify_file(put(adder(), path), opset=13)


def contradicting_shapes(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 5


def contradicting_dtypes(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64


def impossible_operands(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 3


def contradiction_through_data(model: onnx.ModelProto) -> None:
    """Seen only by following the values of a shape: zeros of the shape of x, declared larger."""
    del model.graph.node[:]
    model.graph.node.extend(
        [
            helper.make_node("Shape", ["x"], ["s"]),
            helper.make_node("ConstantOfShape", ["s"], ["y"]),
        ]
    )
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4]))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 5]))


def old_ir_version(model: onnx.ModelProto) -> None:
    model.ir_version = 4


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (contradicting_shapes, "Inference|inferred|differ"),
        (contradicting_dtypes, "elem type|type"),
        (impossible_operands, "broadcast|Incompatible|dimension"),
        (contradiction_through_data, "contradict each other"),
        (old_ir_version, "IR version 4, expected 7"),
        (short_weights, "too small"),
        (dangling_name, "nowhere"),
    ],
)
def test_verification_checks_shapes_and_dtypes(
    path: Path, spoil: Callable[[onnx.ModelProto], None], says: str
) -> None:
    model = adder()
    spoil(model)
    with pytest.raises(OnnxFileError, match=says):
        verify_file(put(model, path), opset=13)


@pytest.mark.parametrize("opset", [12, 14])
def test_unexpected_opset_is_refused(path: Path, opset: int) -> None:
    put(adder(), path)
    with pytest.raises(OnnxFileError, match=f"opset 13, expected opset {opset}"):
        verify_file(path, opset=opset)


def test_newer_ir_version_is_refused(path: Path) -> None:
    put(adder(ir_version=onnx.IR_VERSION + 1), path)
    with pytest.raises(OnnxFileError, match="IR version"):
        verify_file(path, opset=13)
    with pytest.raises(OnnxFileError, match="ir_version"):
        read_subject(path)


def output_without_type(model: onnx.ModelProto) -> None:
    model.graph.output[0].ClearField("type")


@pytest.mark.parametrize("spoil", [output_without_rank, output_without_type])
def test_error_of_the_checker_is_described(
    path: Path, spoil: Callable[[onnx.ModelProto], None]
) -> None:
    model = adder()
    complete = read_subject(put(model, path))
    spoil(model)
    described = read_subject(put(model, path))
    assert [(spec.name, spec.dtype, len(spec.shape)) for spec in described.outputs] == [
        (spec.name, spec.dtype, len(spec.shape)) for spec in complete.outputs
    ]
    assert described.inputs == complete.inputs
    assert described.checker
    assert complete.checker is None


def test_dimension_minus_one_is_dynamic(path: Path) -> None:
    model = adder()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = -1
    described = read_subject(put(model, path))
    assert {spec.shape[0] for spec in (*described.inputs, *described.outputs)} == {"?"}
