"""float64 in the model, in the file or in both is checked, and so are outputs without elements."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gate
from gate import Verdict
from gate.export.export import export_model
from gate.onnx_file.tested_file import TestedFile
from gate.records.evidence import TensorSpec
from gate.records.export import ExportSettings
from gate.reference.torch_reference import TorchReference
from gate.summary.render import render_check
from tests import builders
from tests.inferred_roles import nets
from tests.inferred_roles.nets import make_policy


class Net(nn.Module):
    """A float32 linear layer and a float64 buffer, used by `make`."""

    def __init__(self, make: Callable[[Net, torch.Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 5)
        self.register_buffer("scale", torch.rand(5, dtype=torch.float64))
        self.make = make

    def forward(self, input: torch.Tensor) -> object:
        return self.make(self, input)


def inputs(samples: int, dtype: type) -> np.ndarray:
    return np.random.default_rng(samples).normal(size=(samples, 6)).astype(dtype)


def export(model: nn.Module, path: Path, dtype: type = np.float32) -> Path:
    settings = ExportSettings(strategy="direct", batch_size=4, input_names=("input",))
    export_model(model.eval(), {"input": inputs(4, dtype)}, settings=settings, output=path)
    return path


def export_with_torch(model: nn.Module, path: Path, dtype: type = np.float32) -> Path:
    return nets.export_with_torch(
        model, path, torch.from_numpy(inputs(4, dtype)), inputs=("input",)
    )


def check_file(model, onnx, dtype=np.float32, samples=40):
    return gate.check(onnx, model, {"input": inputs(samples, dtype)}, make_policy())


def return_float64(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x).double()


def multiply_by_buffer(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x) * net.scale


def cast_input_to_float32(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x.float())


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize(("make", "double", "dtype", "gives"), [
    (return_float64, False, np.float32, "float64"),
    (multiply_by_buffer, False, np.float32, "float64"),
    (multiply_by_buffer, True, np.float64, "float64"),
    (cast_input_to_float32, False, np.float64, "float32"),
])  # fmt: skip
def test_float64_in_file_and_model_passes(tmp_path, make, double, dtype, gives):
    net = Net(make).double() if double else Net(make)
    path = export_with_torch(net, tmp_path / "model.onnx", dtype)
    result = check_file(net, path, dtype)
    assert result.decision.verdict is Verdict.PASS, result.decision.problems
    (output,) = result.evidence.runtimes[1].outputs
    assert output.dtype == gives
    assert not double or output.scaled_diff < 1e-13
    wrong = copy.deepcopy(net)
    with torch.no_grad():
        wrong.linear.weight[2, 3] *= 1.001
    assert check_file(wrong, path, dtype).decision.verdict is Verdict.FAIL


def test_float32_file_of_a_float64_model_passes(tmp_path):
    net = Net(multiply_by_buffer).double()
    path = export(copy.deepcopy(net).float(), tmp_path / "model.onnx")
    assert check_file(net, path).decision.verdict is Verdict.PASS
    assert net.linear.weight.dtype is torch.float64


class WideInside(nn.Module):
    """float64 between float32 inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 5).double()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.linear(input.double()).tanh().float()


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, Verdict.PASS), (1.0001, Verdict.FAIL)])
def test_float64_model_with_float32_inputs_and_outputs(tmp_path, factor, verdict):
    net, wrong = WideInside(), WideInside()
    with torch.no_grad():
        wrong.linear.weight[2, 3] *= factor
    result = check_file(net, export_with_torch(wrong, tmp_path / "model.onnx"))
    assert result.decision.verdict is verdict, result.decision.problems


def test_narrowed_output_dtype_is_described(tmp_path):
    path = export(Net(lambda net, x: net.linear(x)), tmp_path / "model.onnx")
    problems = check_file(Net(return_float64), path).decision.problems
    reported = " ".join(render_check(problem) for problem in problems)
    assert "returned float32 (1, 5)" in reported
    assert "the model returns float64" in reported
    assert "cast it in forward" in reported


def test_empty_output_is_the_only_problem(tmp_path):
    path = export(net := Net(lambda net, x: (net.linear(x), x[:, :0])), tmp_path / "model.onnx")
    decision = check_file(net, path).decision
    assert decision.verdict is Verdict.ERROR
    assert {problem.name for problem in decision.problems} == {"empty"}
    assert {problem.output for problem in decision.problems} == {"output_1"}


@pytest.mark.parametrize(("own", "takes", "gives", "keeps"), [
    ([torch.float32], "float32", "float32", False),
    ([torch.float32], "float32", "float64", True),
    ([torch.float32], "float64", "float32", False),
    ([torch.float32], "float64", "float64", True),
    ([torch.float32, torch.float64], "float32", "float64", True),
    ([torch.float64], "float32", "float64", False),
    ([torch.float64], "float64", "float32", True),
    ([torch.float64], "int64", "float64", True),
    ([torch.float64], "int64", "float32", False),
    ([], "float64", "float32", True),
    ([torch.float16], "float32", "float32", False),
])  # fmt: skip
def test_reference_keeps_float64(own, takes, gives, keeps, tmp_path):
    model = nn.Module()
    for index, dtype in enumerate(own):
        model.register_buffer(f"b{index}", torch.zeros(1, dtype=dtype))
    subject = builders.evidence().subject.model_copy(
        update={
            "inputs": (TensorSpec(name="x", dtype=takes, shape=("b",)),),
            "outputs": (TensorSpec(name="y", dtype=gives, shape=("b",)),),
        }
    )
    path = export(Net(cast_input_to_float32), tmp_path / "float32.onnx")
    assert TorchReference(model).keeps_double(TestedFile(path, subject)) is keeps


class Clock(nn.Module):
    """A clock in float64 seconds since a start; `dtype`: the dtype in which the start is stored."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 4)
        self.register_buffer("start", torch.tensor([1.7e9 + 17.0], dtype=torch.float64).to(dtype))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        since = input[:, :1].double() * 1e5 + 1.7e9 - self.start
        return self.fc(input) + torch.sin(since / 1e5).float()


@pytest.mark.parametrize(
    ("kept_in", "verdict"), [(torch.float64, Verdict.PASS), (torch.float32, Verdict.FAIL)]
)
def test_float64_buffer_of_a_float32_model_stays_float64(tmp_path, kept_in, verdict):
    path = export_with_torch(Clock(kept_in), tmp_path / "model.onnx")
    observed = check_file(Clock(torch.float64).eval(), path, samples=48)
    assert observed.decision.verdict is verdict, observed.decision.problems
