from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn

from gate import cli
from gate.errors import LimitExceeded
from gate.export.quantize import quantized_layers
from gate.measure.job import EvaluationData, Reference
from gate.mend.mixed_precision import Float16Conversion, round_as_device
from gate.mend.recipe import Float32Layers, Steps
from gate.mend.search import BudgetSpent, Candidate, Search
from gate.mend.sensitivity import OutputError, smallest_set
from gate.onnx_file.sessions import open_in_child
from gate.policy.policy import Policy
from gate.policy.sections import Bounds, Instruments, RuntimePolicy
from gate.sandbox.limits import SandboxLimits

X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


@pytest.fixture
def exact(tmp_path: Path) -> Path:
    """Write two linear layers; the values between them are multiplied by 1e4 and divided by it
    again."""
    rng = np.random.default_rng(1)
    weights = {
        "first": rng.normal(size=(16, 16)),
        "second": rng.normal(size=(16, 4)),
        "large": np.array(1e4),
        "small": np.array(1e-4),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["a"], name="matmul_1"),
        helper.make_node("Mul", ["a", "large"], ["b"]),
        helper.make_node("Abs", ["b"], ["c"]),
        helper.make_node("Mul", ["c", "small"], ["d"]),
        helper.make_node("MatMul", ["d", "second"], ["y"], name="matmul_2"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(v.astype(np.float32), name) for name, v in weights.items()],
    )
    path = tmp_path / "exact.onnx"
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), str(path))
    return path


def test_overflow_shows_on_the_cpu_only_with_rounded_values(exact) -> None:
    conversion, error = Float16Conversion(exact), OutputError(exact, [{"x": X}])
    plain = conversion.convert(())
    assert error(plain.SerializeToString()) < 0.01  # the CPU computes in float32
    assert error(round_as_device(plain).SerializeToString()) == np.inf
    with np.errstate(over="ignore", invalid="ignore"):
        (actual,) = ReferenceEvaluator(plain).run(None, {"x": X})
    assert not np.isfinite(actual).all()


def test_float32_nodes_pass_values_in_float32(exact) -> None:
    conversion, error = Float16Conversion(exact), OutputError(exact, [{"x": X}])
    overflowing = conversion.overflowing([{"x": X}])
    assert overflowing == ("Mul_1", "Abs_2", "Mul_3")
    created = conversion.convert(overflowing)
    onnx.checker.check_model(created, full_check=True)
    assert conversion.float32_nodes(created) == overflowing
    assert error(round_as_device(created).SerializeToString()) < 0.01
    # Casts of x, to float32 before and to float16 after the three nodes, and of y.
    assert sum(node.op_type == "Cast" for node in created.graph.node) == 4
    assert created.SerializeToString() == conversion.convert(overflowing).SerializeToString()


def test_weights_beyond_float16_stay_in_float32(exact) -> None:
    model = onnx.load(exact)
    for tensor in model.graph.initializer:  # a scalar may be clipped
        array = numpy_helper.to_array(tensor) * (1e5 if tensor.name in ("first", "large") else 1.0)
        tensor.CopyFrom(numpy_helper.from_array(array.astype(np.float32), tensor.name))
    onnx.save(model, exact)
    assert Float16Conversion(exact).unrepresentable == ("matmul_1",)


@pytest.mark.parametrize("needed", [{3}, {0, 7}, {2, 3, 4}, set(range(8)), set()])
def test_the_set_is_the_smallest_whatever_the_ranking(needed: set[int]) -> None:
    order = [str(number) for number in range(8)]
    for ranked in (order, order[::-1]):
        result = smallest_set(ranked, order, lambda some: {str(n) for n in needed} <= set(some))
        assert result == tuple(str(n) for n in sorted(needed))
    assert smallest_set(order, order, lambda _some: False) is None


@pytest.mark.parametrize(
    ("end", "by"), [(BudgetSpent("budget"), "budget"), (BudgetSpent("time"), "time"),
                    (KeyboardInterrupt(), "interrupt")],
)  # fmt: skip
def test_what_ends_the_search_leaves_the_best_set_so_far(end: BaseException, by: str) -> None:
    order, remaining_calls = [str(number) for number in range(8)], [5]
    ends: list[str] = []

    def passes(some: object) -> bool:
        remaining_calls[0] -= 1
        if remaining_calls[0] < 0:
            raise end
        return "3" in some  # type: ignore[operator]

    assert "3" in (smallest_set(order, order, passes, cut_short=ends.append) or ())
    assert ends == [by]
    with pytest.raises(type(end)):
        smallest_set(order, order, passes)


def write_crashing_file(folder: Path) -> Path:
    """Write a file on which ONNX Runtime 1.31.1 crashes with SIGSEGV: it fuses Transpose and MatMul
    in float16. If a later version fixes that, remove its name from gate.mend.plan."""
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], to=TensorProto.FLOAT16),
        helper.make_node("Transpose", ["h"], ["t"], perm=[1, 0, 2]),
        helper.make_node("MatMul", ["t", "w"], ["m"]),
        helper.make_node("Transpose", ["m"], ["n"], perm=[1, 0, 2]),
        helper.make_node("Cast", ["n"], ["y"], to=TensorProto.FLOAT),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3, 5])
    weight = numpy_helper.from_array(np.ones((4, 5), np.float16), "w")
    graph = helper.make_graph(nodes, "g", [x], [y], [weight])
    path = folder / "crash.onnx"
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), str(path))
    return path


def test_a_file_at_which_onnx_runtime_crashes_is_opened_in_a_child(tmp_path) -> None:
    path = write_crashing_file(tmp_path)
    limits = SandboxLimits.for_command(None, None, usual_s=120.0)
    with pytest.raises(LimitExceeded):
        open_in_child(path, (), limits=limits)
    open_in_child(path, ("MatmulTransposeFusion",), limits=limits)


class Sums(nn.Module):
    def forward(self, x):
        return x @ torch.ones(4, 5)


@pytest.mark.parametrize(
    ("runtime", "disabled", "verdict"),
    [
        ("ort-cpu", (), "PASS"),
        ("ort-cpu-optimized", (), "not built"),
        ("ort-cpu-optimized", ("MatmulTransposeFusion",), "PASS"),
    ],
)
def test_a_crash_refuses_a_file_only_with_the_optimizers_of_the_policy(
    runtime, disabled, verdict
) -> None:
    policy = Policy(
        task="tensors",
        precision="reduced",
        instruments=Instruments(
            noise_samples=0, stability_samples=0, probes=False, search_inputs=0
        ),
        runtimes={runtime: RuntimePolicy(required="always", bounds=Bounds(max_abs_diff=0.1))},
    )
    layers = Float32Layers(count=0, share=0.0)
    candidate = Candidate(
        "mixed_precision", Steps(), write_crashing_file, {runtime: disabled}, layers
    )
    data = EvaluationData.from_data(X[:, :12].reshape(8, 3, 4))
    trial = Search(Reference.from_model(Sums().eval()), policy, 100).judge(candidate, data)
    assert trial.verdict == verdict


def test_the_settings_exclude_layers_and_give_the_same_bytes(exact, tmp_path) -> None:
    np.save(tmp_path / "x.npy", X)
    settings = tmp_path / "settings.yaml"

    def made(name: str, exclude: str, *options: str) -> tuple[int, Path]:
        settings.write_text(f"quantize: {{samples: 8, per_channel: false, exclude: [{exclude}]}}\n")
        output = tmp_path / name
        arguments = [exact, "--calibration", tmp_path / "x.npy", "--output", output]
        words = [*map(str, arguments), "--settings", str(settings), *options]
        return cli.main(["quantize", *words]), output

    (code, first), (_, again) = made("1.onnx", "matmul_1"), made("2.onnx", "matmul_1")
    assert code == 0
    assert first.read_bytes() == again.read_bytes()
    assert "matmul_1" not in quantized_layers(first)
    assert "matmul_2" in quantized_layers(first)
    code, missing = made("3.onnx", "matmul_9")
    assert code == 2
    assert not missing.exists()
    assert made("4.onnx", "", "--samples", "4")[0] == 2
