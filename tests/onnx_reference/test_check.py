"""`gate check new.onnx --reference old.onnx` compares two files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser, version_converter

import gate
from gate.decision.catalog import CONVERT_AGAIN
from gate.decision.decide import decide
from gate.errors import ModelError
from gate.measure.job import Reference
from gate.policy.policy import Policy
from gate.records.evidence import Evidence
from gate.report.ci_formats import CiResult, junit_xml
from gate.storage.digest import Digest
from gate.summary.summarize import summarize
from tests.commands.running import create_runner

_, check_json = create_runner("check")
RANDOM = np.random.default_rng(1)
SAMPLES = RANDOM.standard_normal((24, 3, 8, 8)).astype(np.float32)


def weights(*shape: int) -> np.ndarray[Any, Any]:
    fan = int(np.prod(shape[1:])) or 1
    return (RANDOM.standard_normal(shape) / np.sqrt(fan)).astype(np.float32)


TENSORS = {
    "w1": weights(8, 3, 3, 3), "b1": weights(8), "s": np.float32(1) + weights(8) / 4,
    "h": weights(8), "m": weights(8), "v": np.abs(weights(8)) + np.float32(0.5),
    "w2": weights(10, 8), "b2": weights(10),
}  # fmt: skip


def network(opset: int = 13, **changed: np.ndarray[Any, Any]) -> onnx.ModelProto:
    """Return a network of Conv, BatchNormalization, Relu, a mean and a linear layer.

    changed: tensors that replace the default ones.
    """
    nodes = [
        helper.make_node("Conv", ["image", "w1", "b1"], ["c"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "s", "h", "m", "v"], ["n"], "norm"),
        helper.make_node("Relu", ["n"], ["r"], "relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flat"),
        helper.make_node("Gemm", ["f", "w2", "b2"], ["scores"], "linear", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 10])],
        [numpy_helper.from_array(np.asarray(a), k) for k, a in (TENSORS | changed).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    onnx.save(network(), tmp_path / "old.onnx")
    return tmp_path / "old.onnx"


def optimize(old: Path, level: str) -> Path:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath = str(old.with_name("new.onnx"))
    onnxruntime.InferenceSession(old, options, providers=["CPUExecutionProvider"])
    return old.with_name("new.onnx")


def write_with_other_producer(old: Path) -> Path:
    """Write a copy with equal nodes."""
    model = onnx.load(old)
    model.producer_name = "another"
    onnx.save(model, old.with_name("new.onnx"))
    return old.with_name("new.onnx")


def convert_opset(old: Path) -> Path:
    onnx.save(version_converter.convert_version(onnx.load(old), 17), old.with_name("new.onnx"))
    return old.with_name("new.onnx")


def round_some_weights(old: Path) -> Path:
    """Write a copy as if another tool had folded the weights: some differ by one ulp."""
    weight = TENSORS["w1"].copy()
    weight[:3] = np.nextafter(weight[:3], np.float32(9))
    onnx.save(network(w1=weight), old.with_name("new.onnx"))
    return old.with_name("new.onnx")


@pytest.mark.parametrize(
    "how", ["same", "refolded", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "opset"]
)
def test_a_transformed_file_passes(old: Path, how: str) -> None:
    if how in ("same", "refolded"):
        new = write_with_other_producer(old) if how == "same" else round_some_weights(old)
    else:
        new = convert_opset(old) if how == "opset" else optimize(old, how)
    result = gate.check(new, old, SAMPLES)
    assert result.decision.verdict.value == "PASS", result.decision.problems
    assert result.evidence.source.onnx_sha256 == Digest.from_file(old)
    assert result.evidence.noise_unmeasured is None


@pytest.mark.parametrize(
    ("tensor", "node"),
    [("w1", "conv"), ("v", "norm"), ("w2", "linear")],
)
def test_a_changed_tensor_is_refused_where_it_is_used(old: Path, tensor: str, node: str) -> None:
    changed = TENSORS[tensor] * np.float32(1.001)
    new = old.with_name("new.onnx")
    onnx.save(network(**{tensor: changed}), new)
    result = gate.check(new, old, SAMPLES)
    assert result.decision.verdict.value == "FAIL"
    located = result.explanation.localisation
    assert located is not None
    assert located.first_divergence is not None
    assert located.first_divergence == node


@pytest.mark.parametrize("rows", [1, 5])
def test_a_file_for_any_batch_is_compared_with_one_for_a_fixed_batch(old: Path, rows: int) -> None:
    model = onnx.load(old)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = rows
    onnx.save(model, old)
    new = old.with_name("new.onnx")
    onnx.save(network(), new)
    assert gate.check(new, old, SAMPLES).decision.verdict.value == "PASS"
    onnx.save(network(s=TENSORS["s"] * np.float32(1.001)), new)
    result = gate.check(new, old, SAMPLES)
    assert result.decision.verdict.value == "FAIL"
    assert result.explanation.localisation is not None
    assert result.explanation.localisation.first_divergence == "norm"


def test_a_fused_node_is_resolved_to_the_nodes_that_it_replaces(old: Path) -> None:
    new = optimize(old, "ORT_ENABLE_EXTENDED")
    model = onnx.load(new)
    fused = next(node for node in model.graph.node if node.op_type == "FusedConv")
    activation = next(each for each in fused.attribute if each.name == "activation")
    activation.s = b"Sigmoid"
    onnx.save(model, new)
    result = gate.check(new, old, SAMPLES)
    assert result.decision.verdict.value == "FAIL"
    located = result.explanation.localisation
    assert located is not None
    assert located.first_divergence == "relu"
    (detail,) = located.fault_params["details"]
    assert detail == {"code": "replaces", "count": 3, "first": "conv", "last": "relu"}


def write_text(path: Path, text: str) -> Path:
    """Write a model of ONNX's text format, whose producer is the name of the file."""
    proto = parser.parse_model(text)
    proto.producer_name = path.stem
    onnx.save(proto, path)
    return path


def integers(values: list[int], shape: tuple[int, ...], kind: str = "int64") -> np.ndarray:
    return np.random.default_rng(0).choice(values, shape).astype(kind)


COMPARISONS = [
    *(
        pytest.param(
            f"g (int64[n,5] x) => (bool[n,5] y) <int64[5] b = {{BOUND, 11, 11, 11, 11}}> {{"
            f" y = {operator} (x, b) }}",
            "11", "10", integers([0, 40], (8, 5)), id=f"{operator}, far from the bounds",
        )
        for operator in ("Greater", "GreaterOrEqual", "Less", "LessOrEqual")
    ),
    *(
        pytest.param(
            f"g (int64[n,5] x) => (bool[n,5] y) <float[1] b = {{BOUND}}> {{"
            f" real = Cast <to = 1> (x) y = {operator} (real, b) }}",
            "3", "4", integers([*range(6)], (16, 5)), id=f"{operator}, floats on the bound",
        )
        for operator in ("Less", "GreaterOrEqual")
    ),
    pytest.param(
        """g (int64[n,5] x) => (bool[n,5] y, bool[n,5] z) {
            real = Cast <to = 1> (x)
            low = Constant <value_float = 11011.0> () high = Constant <value_float = 29029.0> ()
            y = Less (real, low) z = BOUND (real, high) }""",
        "Less", "LessOrEqual", integers([0, 90000], (8, 5)), id="more values than the check tries",
    ),
    *(
        pytest.param(
            f"g (float[n,5] x) => (int64[n] y) {{"
            f" y = {operator} <axis = 1, keepdims = 0, select_last_index = BOUND> (x) }}",
            "0", "1", integers([0, 1, 2], (16, 5), "float32"), id=f"{operator} of equal numbers",
        )
        for operator in ("ArgMax", "ArgMin")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("graph", "right", "wrong", "samples"), COMPARISONS)
def test_a_comparison_with_another_bound_is_refused(
    tmp_path: Path, graph: str, right: str, wrong: str, samples: np.ndarray[Any, Any]
) -> None:
    old, same, new = (
        write_text(
            tmp_path / f"{name}.onnx",
            '<ir_version: 8, opset_import: ["" : 16]> ' + graph.replace("BOUND", bound),
        )
        for name, bound in (("old", right), ("same", right), ("new", wrong))
    )
    assert gate.check(same, old, samples).decision.verdict.value == "PASS"
    assert gate.check(new, old, samples).decision.verdict.value == "FAIL"


@pytest.mark.parametrize("index", [1, 2])
def test_indices_of_another_integer_type_are_converted(tmp_path: Path, index: int) -> None:
    old, new = (
        write_text(tmp_path / f"{kind}.onnx", f"""<ir_version: 8, opset_import: ["" : 16]>
            g ({kind}[n,3] i) => (float[n,3] y) {{
                table = Constant <value = float[4] {{0.5, {value}.0, 4.25, 8.125}}> ()
                wide = Cast <to = 7> (i) y = Gather (table, wide) }}""")
        for kind, value in (("int64", 1), ("int32", index))
    )  # fmt: skip
    verdict = gate.check(new, old, integers([*range(4)], (16, 3), "int32")).decision.verdict.value
    assert verdict == ("PASS" if index == 1 else "FAIL")


def test_inputs_are_matched_by_name(tmp_path: Path) -> None:
    old, new = (
        write_text(tmp_path / f"{a}{b}.onnx", f"""<ir_version: 8, opset_import: ["" : 13]>
            g (float[n,4] {a}, float[n,4] {b}) => (float[n,4] y) {{ y = Sub (a, b) }}""")
        for a, b in ("ab", "ba")
    )  # fmt: skip
    data = {name: RANDOM.standard_normal((16, 4)).astype(np.float32) for name in "ab"}
    result = gate.check(new, old, data)
    assert result.decision.verdict.value == "PASS", result.decision.problems


def test_an_onnx_file_takes_no_checkpoint(old: Path) -> None:
    with pytest.raises(ModelError, match="checkpoint"):
        Reference.from_factory(str(old), checkpoint=old.with_name("w.pt"))


def test_the_command_line_takes_a_file_as_the_reference(
    old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples, new = old.with_name("x.npy"), write_with_other_producer(old)
    np.save(samples, SAMPLES)
    code, result = check_json(capsys, str(new), "--reference", str(old), "--inputs", str(samples))
    assert code == 0
    assert result["evidence"]["source"]["onnx_sha256"] == str(Digest.from_file(old))


def test_each_surface_has_remedies_for_a_file_as_the_reference(
    old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples, new = old.with_name("x.npy"), old.with_name("new.onnx")
    np.save(samples, SAMPLES)
    onnx.save(network(w2=TENSORS["w2"] * np.float32(1.001)), new)
    code, result = check_json(capsys, str(new), "--reference", str(old), "--inputs", str(samples))
    assert code == 1
    failed = [check for check in result["decision"]["checks"] if check["verdict"] == "FAIL"]
    shown = [check for finding in result["story"]["findings"] for check in finding["checks"]]
    remedies = {check["name"]: check["remedy"] for check in (*failed, *shown)}
    assert remedies["noise_ratio"] == CONVERT_AGAIN
    assert not any("Export" in remedy or "forward" in remedy for remedy in remedies.values())

    evidence = Evidence.from_json(json.dumps(result["evidence"]))
    decision = decide(Policy.default(), evidence, decided_at="now")
    summary = summarize(decision, evidence)
    junit = junit_xml(CiResult(command="check", exit_code=1, summary=summary))
    assert f"Try: {CONVERT_AGAIN}" in junit
    assert "eval mode" not in junit


def test_a_reference_that_is_not_there_is_named(
    old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples, missing = old.with_name("x.npy"), old.with_name("gone.onnx")
    np.save(samples, SAMPLES)
    code, result = check_json(
        capsys, str(old), "--reference", str(missing), "--inputs", str(samples)
    )
    assert code == 2
    assert "gone.onnx" in result["error"]["message"]


def write_nodes(path: Path, nodes: list[tuple[str, str, str]], **more: Any) -> Path:
    """Write one node per output: operator, input, output."""
    graph = helper.make_graph(
        [helper.make_node(kind, [used], [created], created) for kind, used, created in nodes],
        "g",
        [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 4])
            for n in more.get("inputs", dict.fromkeys(used for _, used, _ in nodes))
        ],
        [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 4])
            for n in more.get("outputs", [created for _, _, created in nodes])
        ],
    )
    proto = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8,
        producer_name=path.stem,
    )  # fmt: skip
    onnx.save(proto, path)
    return path


REFERENCE = [("Relu", "a", "h"), ("Neg", "b", "c")]


@pytest.mark.parametrize(
    ("nodes", "shared"),
    [
        ([("Relu", "a", "c"), ("Neg", "b", "h2")], ["'c'", "'h'", "'h2'"]),
        ([("Relu", "b", "h"), ("Neg", "a2", "c")], ["'b'", "'a'", "'a2'"]),
    ],
)
def test_names_that_are_shared_in_part_are_refused(
    tmp_path: Path, nodes: list[tuple[str, str, str]], shared: list[str]
) -> None:
    old, new = write_nodes(tmp_path / "old.onnx", REFERENCE), tmp_path / "new.onnx"
    write_nodes(new, nodes)
    data = {used: RANDOM.standard_normal((16, 4)).astype(np.float32) for _, used, _ in nodes}
    with pytest.raises(ModelError) as refused:
        gate.check(new, old, data)
    assert all(name in str(refused.value) for name in shared)


def test_outputs_in_another_order_are_matched_by_name(tmp_path: Path) -> None:
    old = write_nodes(tmp_path / "old.onnx", REFERENCE)
    new = write_nodes(tmp_path / "new.onnx", REFERENCE[::-1])
    data = {name: RANDOM.standard_normal((16, 4)).astype(np.float32) for name in "ab"}
    assert gate.check(new, old, data).decision.verdict.value == "PASS"


def test_files_without_a_common_name_are_matched_by_position(tmp_path: Path) -> None:
    old = write_nodes(tmp_path / "old.onnx", REFERENCE)
    data = {name: RANDOM.standard_normal((16, 4)).astype(np.float32) for name in "xz"}
    for nodes, verdict in (
        ([("Relu", "x", "k"), ("Neg", "z", "m")], "PASS"),
        ([("Neg", "z", "k"), ("Relu", "x", "m")], "FAIL"),
    ):
        new = write_nodes(tmp_path / "new.onnx", nodes, inputs=["x", "z"])
        assert gate.check(new, old, data).decision.verdict.value == verdict


def test_an_output_that_the_new_file_lacks_is_no_pass(tmp_path: Path) -> None:
    old = write_nodes(tmp_path / "old.onnx", [("Relu", "a", "h"), ("Neg", "a", "c")])
    new = write_nodes(tmp_path / "new.onnx", [("Neg", "a", "c")])
    result = gate.check(new, old, RANDOM.standard_normal((16, 4)).astype(np.float32))
    assert result.decision.verdict.value != "PASS"


@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_a_file_is_not_judged_against_itself(
    old: Path, copied: bool, data: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if data:
        onnx.save(
            onnx.load(old), old, save_as_external_data=True, location="w.data", size_threshold=0
        )
    new, samples = old, old.with_name("x.npy")
    if copied:
        new = old.with_name("copy.onnx")
        shutil.copy(old, new)
    np.save(samples, SAMPLES)
    code, result = check_json(capsys, str(new), "--reference", str(old), "--inputs", str(samples))
    assert (code, result["error"]["type"]) == (2, "ModelError")
    assert str(old) in result["error"]["message"]


def test_files_that_differ_in_external_data_alone_are_compared(old: Path) -> None:
    new = old.parent / "new" / "old.onnx"
    new.parent.mkdir()
    for path, model in ((old, network()), (new, network(b2=TENSORS["b2"] + np.float32(1)))):
        onnx.save(model, path, save_as_external_data=True, location="w.data", size_threshold=0)
    assert old.read_bytes() == new.read_bytes()
    assert gate.check(new, old, SAMPLES).decision.verdict.value == "FAIL"


def test_steps_and_remedies_need_no_model_of_pytorch(old: Path) -> None:
    new = old.with_name("new.onnx")
    onnx.save(network(w2=np.full_like(TENSORS["w2"], np.nan)), new)
    result = gate.check(new, old, SAMPLES)
    summary = summarize(result.decision, result.evidence, explanation=result.explanation)
    commands = [step.command for step in summary.steps]
    assert commands
    assert not [c for c in commands if c.startswith(("gate export", "gate lint"))]
    remedies = [summary.headline.remedy, *(finding.remedy for finding in summary.findings)]
    assert not [r for r in remedies if r and ("Export" in r or "checkpoint" in r)]


def test_a_reference_that_draws_is_not_called_a_forward(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 13]>
        g (float[n,4] x) => (float[n,4] y) {
            r = Constant <value_float = 0.5> () t = Constant <value = bool {1}> ()
            y = Dropout (x, r, t) }"""
    old, new = (write_text(tmp_path / f"{name}.onnx", text) for name in ("old", "new"))
    result = gate.check(new, old, RANDOM.standard_normal((16, 4)).astype(np.float32))
    assert result.decision.verdict.value != "PASS"
    assert result.evidence.noise_unmeasured
    assert "Dropout" in result.evidence.noise_unmeasured
    assert "forward" not in result.evidence.noise_unmeasured


def write_float16(path: Path, name: str, **changed: np.ndarray[Any, Any]) -> Path:
    """Write the network with inputs, weights and outputs in float16."""
    model = network(**{k: a.astype(np.float16) for k, a in (TENSORS | changed).items()})
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    model.producer_name = name
    onnx.save(model, path.with_name(name))
    return path.with_name(name)


@pytest.mark.further
def test_a_reference_in_16_bits_is_computed_without_their_rounding(old: Path) -> None:
    reference = write_float16(old, "half.onnx")
    reduced = Policy.built_in("reduced")
    result = gate.check(write_float16(old, "same.onnx"), reference, SAMPLES, reduced)
    assert result.decision.verdict.value == "PASS", result.decision.problems
    assert result.evidence.source.onnx_sha256 == Digest.from_file(reference)

    changed = TENSORS["w2"] * np.float32(1.1)
    result = gate.check(write_float16(old, "other.onnx", w2=changed), reference, SAMPLES, reduced)
    assert result.decision.verdict.value == "FAIL"

    wide = {k: a.astype(np.float16).astype(np.float32) for k, a in TENSORS.items()}
    onnx.save(network(**wide), old)
    result = gate.check(old, reference, SAMPLES)
    assert result.decision.verdict.value == "PASS", result.decision.problems


def test_subgraphs_and_casts_of_16_bits_become_float32(old: Path) -> None:
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["" : 13]>
        g (float[n,4] x, bool take) => (float[n,4] y) {
            h = Cast <to = 10> (x)
            k = If (take) <
                then_branch = a () => (float16[n,4] r) {
                    c = Constant <value = float16[1] {16384}> () r = Mul (h, c) },
                else_branch = b () => (float16[n,4] s) { s = Exp (h) } >
            y = Cast <to = 1> (k) }""")
    onnx.save(proto, old)
    module = Reference.from_model(old).module
    x = SAMPLES[:, 0, 0, :4].astype(np.float64) + 1 / 3
    with torch.no_grad():
        for take, right in ((True, 2 * x), (False, np.exp(x))):
            created = module(torch.from_numpy(x), torch.tensor(take))
            assert np.allclose(created.numpy(), right, rtol=1e-6)  # float16: 1e-3


def test_an_element_type_that_a_function_takes_becomes_float32(old: Path) -> None:
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17, "own" : 1]>
        g (float[n,4] x) => (float[n,4] y) {
            h = own.as <kind = 10> (x) k = Exp (h) y = Cast <to = 1> (k) }
        <domain: "own", opset_import: ["" : 17]>
        as <kind> (a) => (b) { b = Cast <to : int = @kind> (a) }""")
    onnx.save(proto, old)
    x = SAMPLES[:, 0, 0, :4].astype(np.float64) + 1 / 3
    with torch.no_grad():
        created = Reference.from_model(old).module(torch.from_numpy(x))
    assert np.allclose(created.numpy(), np.exp(x), rtol=1e-6)  # float16: 1e-3


def write_quantized(path: Path, name: str, *, scale: float = 0.01) -> Path:
    """Write two 8-bit convolutions, as in a converted TFLite file. `scale`: the scale of a
    weight."""
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["" : 13]>
        g (float[n,3,8,8] image) => (float[n,4,4,4] maps) {
            q = QuantizeLinear (image, s, z)
            [first] c = QLinearConv (q, s, z, w1, s1, z1, s, z)
            [second] d = QLinearConv (c, s, z, w2, s2, z1, s, z)
            maps = DequantizeLinear (d, s, z) }""")
    steps = np.random.default_rng(4).integers(-63, 64, (4, 7, 3, 3)).astype(np.int8)
    tensors = {
        "s": np.float32(0.03), "z": np.uint8(120), "z1": np.zeros(4, np.int8),
        "w1": steps[:, :3].copy(), "s1": np.full(4, 0.01, np.float32),
        "w2": steps[:, 3:].copy(), "s2": np.array([0.01, 0.02, 0.01, scale], np.float32),
    }  # fmt: skip
    proto.graph.initializer.extend(numpy_helper.from_array(a, k) for k, a in tensors.items())
    proto.producer_name = name
    onnx.save(proto, path.with_name(name))
    return path.with_name(name)


@pytest.mark.further
def test_quantized_files_are_compared_exactly(old: Path) -> None:
    reference = write_quantized(old, "int8.onnx")
    result = gate.check(write_quantized(old, "same.onnx"), reference, SAMPLES)
    assert result.decision.verdict.value == "PASS", result.decision.problems
    result = gate.check(write_quantized(old, "other.onnx", scale=0.0103), reference, SAMPLES)
    assert result.decision.verdict.value == "FAIL"
    located = result.explanation.localisation
    assert located is not None
    assert located.first_divergence == "second"


LABELS = ("ash", "birch", "cedar")


def classifier(path: Path, labels: tuple[str, ...] = LABELS, shift: float = 0.0) -> Path:
    """Write a classifier as scikit-learn's converter does: text labels and probabilities."""
    coefficients = np.random.default_rng(3).standard_normal(12) + shift
    node = helper.make_node(
        "LinearClassifier", ["x"], ["label", "scores"], "linear", domain="ai.onnx.ml",
        coefficients=coefficients.tolist(), intercepts=[0.1, 0.0, -0.1], multi_class=1,
        classlabels_strings=labels, post_transform="SOFTMAX",
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        path.stem,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [
            helper.make_tensor_value_info("label", TensorProto.STRING, ["n"]),
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 3]),
        ],
    )
    imports = [helper.make_opsetid("", 13), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return path


@pytest.mark.parametrize("policy", [None, Policy.quantized()], ids=["exact", "quantized"])
@pytest.mark.parametrize(
    ("labels", "verdict"),
    [(LABELS, "PASS"), (("ash", "cedar", "birch"), "FAIL"), (("ash", "birch", "Cedar"), "FAIL")],
)
def test_outputs_of_text_are_compared(
    tmp_path: Path, labels: tuple[str, ...], verdict: str, policy: Policy | None
) -> None:
    old, new = classifier(tmp_path / "old.onnx"), classifier(tmp_path / "new.onnx", labels)
    result = gate.check(new, old, SAMPLES[:, 0, 0, :4].copy(), policy)
    assert result.decision.verdict.value == verdict, result.decision.problems
    assert {problem.output for problem in result.decision.problems} <= {"label", None}
    assert result.explanation.failure is None
    located = result.explanation.localisation
    assert (located and located.first_divergence) == (None if verdict == "PASS" else "linear")


FILL = "[fill] full = ai.onnx.ml.Imputer <imputed_value_floats = [1.0], replaced_value_float = nan> (x)"
ENCODED = f"""
    <ir_version: 8, opset_import: ["" : 13, "ai.onnx.ml" : 3]>
    g (float[n,8] x) => (float[n,8] y, string[n] shown)
    <float[8] weights = {{1, 2, 3, 4, 5, 6, 7, 8}}> {{
        {FILL}
        [first] at = ArgMax <axis = 1, keepdims = 0> (full)
        [name] named = ai.onnx.ml.LabelEncoder <keys_int64s = [0, 1, 2, 3, 4, 5, 6, 7],
            values_strings = ["a", "b", "c", "d", "e", "f", "g", "h"]> (at)
        [group] shown = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b", "c", "d", "e"],
            values_strings = ["low", "low", "low", "mid", "mid"], default_string = "top"> (named)
        [hot] h = ai.onnx.ml.OneHotEncoder <cats_strings = ["low", "mid", "top"]> (shown)
        [cost] c = ReduceMax <axes = [1]> (h)
        [scale] s = Mul (full, weights)
        [sum] y = Add (s, c)
    }}
"""


@pytest.mark.parametrize(
    ("text", "other", "nodes"),
    [
        ("", "", {None}),
        ('"g", "h"]', '"a", "h"]', {"name"}),
        ('"mid", "mid"]', '"mid", "low"]', {"group"}),
        ('["low", "mid", "top"]', '["low", "mid", "end"]', {"hot"}),
        ("[1.0]", "[1.5]", {"fill"}),
        (FILL, "", {"fill"}),
    ],
)
def test_text_and_missing_numbers_are_traced_to_their_node(
    tmp_path: Path, text: str, other: str, nodes: set[str | None]
) -> None:
    samples = np.random.default_rng(4).standard_normal((32, 8)).astype(np.float32)
    samples[::5, 3] = np.nan
    changed = ENCODED.replace(text, other)
    changed = changed if "[fill]" in changed else changed.replace("full", "x")
    old = write_text(tmp_path / "old.onnx", ENCODED)
    new = write_text(tmp_path / "new.onnx", changed)
    policy = Policy.default().model_copy(update={"nonfinite": "same_places"})
    result = gate.check(new, old, samples, policy)
    assert result.decision.verdict.value == ("PASS" if None in nodes else "FAIL")
    located = result.explanation.localisation
    assert (located and located.first_divergence) in nodes, result.explanation


def test_of_a_long_attribute_the_first_element_that_differs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "samples.npy", SAMPLES.reshape(-1, 12))
    for name, values in (("old", [0.5] * 12), ("new", [0.5] * 9 + [0.75] * 3)):
        text = f"""<ir_version: 8, opset_import: ["" : 15, "ai.onnx.ml" : 3]>
            net (float[n, 12] x) => (float[n, 12] y) {{
                [shift] y = ai.onnx.ml.Scaler <offset = {values}, scale = {[1.5] * 12}> (x)
            }}"""
        onnx.save(parser.parse_model(text), tmp_path / f"{name}.onnx")
    code, report = check_json(
        capsys, str(tmp_path / "new.onnx"), "--reference", str(tmp_path / "old.onnx"),
        "--inputs", str(tmp_path / "samples.npy"),
    )  # fmt: skip
    assert code == 1
    explanation = json.dumps(report["explanation"])
    for value in ('"setting": "offset[9]"', '"got": "0.75"', '"want": "0.5"'):
        assert value in explanation


def write_zip_map(
    path: Path, labels: tuple[str, ...] | tuple[int, ...], *, weight: float = 0.0
) -> Path:
    """Write a boosted classifier with operators of ai.onnx.ml, whose scores are a list of maps."""
    kind = TensorProto.STRING if isinstance(labels[0], str) else TensorProto.INT64
    names = {f"classlabels_{'strings' if kind == TensorProto.STRING else 'int64s'}": labels}
    nodes = [
        helper.make_node(
            "TreeEnsembleClassifier", ["x"], ["label", "raw"], "trees", domain="ai.onnx.ml",
            nodes_treeids=[0, 0, 0, 1, 1, 1], nodes_nodeids=[0, 1, 2, 0, 1, 2],
            nodes_featureids=[0, 0, 0, 2, 0, 0], nodes_values=[0.1, 0, 0, -0.3, 0, 0],
            nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF", "BRANCH_LEQ", "LEAF", "LEAF"],
            nodes_truenodeids=[1, 0, 0, 1, 0, 0], nodes_falsenodeids=[2, 0, 0, 2, 0, 0],
            class_treeids=[0, 0, 1, 1], class_nodeids=[1, 2, 1, 2], class_ids=[0, 1, 2, 1],
            class_weights=[1.0, 0.5, 0.75, 0.25 + weight], post_transform="SOFTMAX", **names,
        ),
        helper.make_node("ZipMap", ["raw"], ["scores"], "zip", domain="ai.onnx.ml", **names),
    ]  # fmt: skip
    number = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(kind, number))
    graph = helper.make_graph(
        nodes,
        path.stem,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [
            helper.make_tensor_value_info("label", kind, ["n"]),
            helper.make_value_info("scores", maps),
        ],
    )
    imports = [helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return path


@pytest.mark.parametrize(
    ("labels", "weight", "wrong"),
    [
        (LABELS, 0.0, set()),
        ((3, 10, 7), 0.0, set()),
        (LABELS, 0.5, {"scores"}),
        (("ash", "birch", "Cedar"), 0.0, {"label", "scores", "scores keys"}),
    ],
)
def test_maps_of_a_file_of_trees_alone_are_compared(
    tmp_path: Path, labels: tuple[Any, ...], weight: float, wrong: set[str]
) -> None:
    right = LABELS if isinstance(labels[0], str) else labels
    old = write_zip_map(tmp_path / "old.onnx", right)
    new = write_zip_map(tmp_path / "new.onnx", labels, weight=weight)
    result = gate.check(new, old, SAMPLES[:, 0, 0, :4].copy())
    assert result.decision.verdict.value == ("FAIL" if wrong else "PASS"), result.decision.problems
    assert {problem.output for problem in result.decision.problems} - {None} == wrong
    assert [spec.name for spec in result.evidence.subject.outputs] == [
        "label", "scores", "scores keys",
    ]  # fmt: skip


def test_maps_count_as_values_and_keys_beside_a_model_without_keys(tmp_path: Path) -> None:
    class Scores(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = torch.softmax(x[:, :3], 1)
            return scores.argmax(1), scores

    result = gate.check(
        write_zip_map(tmp_path / "new.onnx", (0, 1, 2)), Scores(), SAMPLES[:, 0, 0, :4]
    )
    assert result.decision.verdict.value == "FAIL"
    failures = [each.failure_params for each in result.evidence.runtimes if each.failure]
    assert [(each["mismatch"], each["maps"]) for each in failures] == [("maps", ["scores"])] * 2
