"""Files with unusual input dtypes and calls are checked, correct and with one fault."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional

import gate
from gate import Policy, Verdict
from gate.errors import DataError, EvidenceError, InputMismatch
from tests.inferred_roles.nets import export_with_torch as export

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

MERSENNE = 2**61 - 1


def check_file(model, path, x, policy=None):
    return gate.check(path, model.eval(), {"x": x}, policy)


def build_seeded(build: Callable[..., nn.Module], *arguments: object) -> nn.Module:
    torch.manual_seed(0)
    return build(*arguments)


class Forces(nn.Module):
    """Energy and forces, computed with autograd or explicitly, as in an exported file."""

    def __init__(self, *, by_hand: bool = False, sign: float = -1.0) -> None:
        super().__init__()
        self.hidden, self.energy = nn.Linear(6, 16), nn.Linear(16, 1)
        self.by_hand, self.sign = by_hand, sign

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.by_hand:
            t = torch.tanh(self.hidden(x))
            slope = ((1 - t * t) * self.energy.weight[0]) @ self.hidden.weight
            return self.energy(t).sum((1, 2)), self.sign * slope
        with torch.enable_grad():
            x = x.requires_grad_(True)
            energy = self.energy(torch.tanh(self.hidden(x))).sum((1, 2))
            (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, -slope


@pytest.mark.parametrize(("sign", "verdict"), [(-1.0, Verdict.PASS), (1.0, Verdict.FAIL)])
def test_forces_by_autograd(tmp_path, sign, verdict):
    x = np.random.default_rng(0).normal(size=(24, 7, 6)).astype(np.float32)
    by_hand = build_seeded(lambda: Forces(by_hand=True, sign=sign))
    example = torch.from_numpy(x[:2])
    path = export(by_hand, tmp_path / "forces.onnx", example, outputs=("y0", "y1"))
    result = check_file(build_seeded(Forces), path, x)
    assert result.decision.verdict is verdict, result.decision.problems
    failed = {
        output.name for output in result.evidence.runtimes[1].outputs if output.scaled_diff > 0.1
    }
    assert failed == ({"y1"} if verdict is Verdict.FAIL else set())


class Hashed(nn.Module):
    def __init__(self, modulus: int = MERSENNE, dtype: torch.dtype = torch.int64) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 8)
        self.modulus, self.dtype = modulus, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.dtype).to(torch.int64) if self.dtype != torch.int64 else x
        return self.table(torch.remainder(torch.remainder(x, self.modulus), 100))


@pytest.mark.parametrize(("given", "verdict"), [
    ((), Verdict.PASS),
    ((MERSENNE - 2,), Verdict.FAIL),
    ((MERSENNE, torch.float32), Verdict.FAIL),
    ((MERSENNE, torch.float64), Verdict.FAIL),
])  # fmt: skip
def test_embedding_of_hashed_ids(tmp_path, given, verdict):
    limits = np.iinfo(np.int64)
    x = np.random.default_rng(0).integers(limits.min, limits.max, 40, endpoint=True)
    x[:2] = limits.min, limits.max
    path = export(build_seeded(Hashed, *given), tmp_path / "hash.onnx", torch.from_numpy(x[:2]))
    result = check_file(build_seeded(Hashed), path, x)
    assert result.decision.verdict is verdict, result.decision.problems


class Shifted(nn.Module):
    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + self.by, torch.sin((x % 1000).float())


def test_integers_beyond_float64_precision(tmp_path):
    x = np.random.default_rng(0).integers(2**61, 2**62, (40, 3))
    path = export(Shifted(1), tmp_path / "ids.onnx", torch.from_numpy(x[:2]), outputs=("y", "z"))
    assert check_file(Shifted(1), path, x).decision.verdict is Verdict.PASS
    assert check_file(Shifted(2), path, x).decision.verdict is Verdict.FAIL


@pytest.mark.parametrize(("dtype", "factor", "verdict"), [
    (np.uint8, 1.0, Verdict.PASS),
    (np.uint8, 1.01, Verdict.FAIL),
    (np.bool_, 1.0, Verdict.PASS),
])  # fmt: skip
def test_small_integer_and_boolean_inputs(tmp_path, dtype, factor, verdict):
    class Pixels(nn.Module):
        def __init__(self, factor: float = 1.0) -> None:
            super().__init__()
            self.linear, self.factor = nn.Linear(5, 3), factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.float() / 255) * self.factor

    x = np.random.default_rng(0).integers(0, 256, (40, 5))
    x = (x > 99 if dtype is np.bool_ else x).astype(dtype)
    path = export(build_seeded(Pixels, factor), tmp_path / "pixels.onnx", torch.from_numpy(x[:2]))
    result = check_file(build_seeded(Pixels), path, x)
    assert result.decision.verdict is verdict, result.decision.problems


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.conv(x).relu().mean((2, 3)))


class Encoder(nn.Module):
    """Weights, inputs and outputs in one dtype; the computation is in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias, scale, shift = (
            p.float() for p in (*self.linear.parameters(), *self.norm.parameters())
        )
        y = functional.gelu(functional.linear(x.float(), weight, bias))
        return functional.layer_norm(y, (16,), scale, shift).to(self.linear.weight.dtype)


HALF_PRECISION = [(Classifier, torch.float16, (40, 3, 12, 12)), (Encoder, torch.bfloat16, (40, 8))]


def export_in_half(build, dtype, shape, path, factor):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    model = build_seeded(build)
    with torch.no_grad():
        model.linear.weight[1] *= factor
    return export(model.to(dtype), path, torch.from_numpy(x[:2]).to(dtype)), x


@pytest.mark.further
@pytest.mark.rows(3)
@pytest.mark.parametrize(("build", "dtype", "shape", "given"), [
    (*HALF_PRECISION[0], np.float16),
    (*HALF_PRECISION[0], np.float64),
    (*HALF_PRECISION[1], np.float32),
    (*HALF_PRECISION[1], np.float64),
])  # fmt: skip
def test_half_precision_file_accepts_any_float_samples(tmp_path, build, dtype, shape, given):
    path, x = export_in_half(build, dtype, shape, tmp_path / "half.onnx", 1.0)
    result = check_file(build_seeded(build).to(dtype), path, x.astype(given), Policy.reduced())
    assert result.decision.verdict is Verdict.PASS, result.decision.problems
    with pytest.raises(InputMismatch, match="--precision reduced"):
        check_file(build_seeded(build), path, x)


@pytest.mark.parametrize(("build", "dtype", "shape"), HALF_PRECISION)
def test_wrong_weight_in_half_precision_fails(tmp_path, build, dtype, shape):
    path, x = export_in_half(build, dtype, shape, tmp_path / "half.onnx", 1.5)
    result = check_file(build_seeded(build).to(dtype), path, x, Policy.reduced())
    assert result.decision.verdict is Verdict.FAIL


def test_samples_beyond_float16_are_refused(tmp_path):
    path, x = export_in_half(*HALF_PRECISION[0], tmp_path / "half.onnx", 1.0)
    x[7, 0, 0, 0] = 70000.0
    with pytest.raises(DataError, match="sample 7"):
        check_file(build_seeded(Classifier), path, x, Policy.reduced())


def test_bfloat16_operator_without_kernel_is_named(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    model = nn.Linear(8, 3).bfloat16()
    path = export(model, tmp_path / "half.onnx", torch.from_numpy(x[:2]).bfloat16())
    with pytest.raises(EvidenceError, match="Gemm in bfloat16"):
        check_file(model, path, x, Policy.reduced())


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return self.first(x) + 2 * self.second(z)


class AllKeywords(TwoInputs):
    def forward(self, **given: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(given["x"], given["z"])


class OtherKeywords(TwoInputs):
    def forward(self, x: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, given["z"])


class KeywordOnly(TwoInputs):
    def forward(self, *, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, z)


class WithNone(TwoInputs):
    def forward(  # type: ignore[override]
        self, x: torch.Tensor, scale: torch.Tensor | None = None, z: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert scale is None
        return super().forward(x, x if z is None else z)


@pytest.mark.rows(3)
@pytest.mark.parametrize(("build", "factor", "verdict"), [
    (AllKeywords, 1.0, Verdict.PASS),
    (OtherKeywords, 1.0, Verdict.PASS),
    (KeywordOnly, 1.0, Verdict.PASS),
    (KeywordOnly, 1.01, Verdict.FAIL),
    (WithNone, 1.0, Verdict.PASS),
])  # fmt: skip
def test_inputs_by_keyword(tmp_path, build, factor, verdict):
    arrays = {
        name: np.random.default_rng(seed).normal(size=(24, 4)).astype(np.float32)
        for seed, name in enumerate("xz")
    }
    model = build_seeded(TwoInputs).eval()
    with torch.no_grad():
        model.second.weight *= factor
    examples = (torch.from_numpy(a[:2]) for a in arrays.values())
    path = export(model, tmp_path / "two.onnx", *examples, inputs=("x", "z"))
    result = gate.check(path, build_seeded(build).eval(), arrays)
    assert result.decision.verdict is verdict, result.decision.problems


class Float64Built(nn.Module):
    """A model that is built while float64 is the default dtype of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * torch.full((3,), 0.1) + torch.ones(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float64_default_dtype(tmp_path, dtype):
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(24, 4))).to(dtype)
    torch.set_default_dtype(torch.float64)
    try:
        model = build_seeded(Float64Built)
        torch.set_default_dtype(dtype)
        path = export(copy.deepcopy(model).to(dtype), tmp_path / "model.onnx", x[:2])
        torch.set_default_dtype(torch.float64)
        result = check_file(model, path, x.numpy())
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert result.decision.verdict is Verdict.PASS, result.decision.problems
    if dtype is torch.float64:
        assert result.evidence.runtimes[1].outputs[0].scaled_diff < 1e-13


class BatchStatistics(nn.Module):
    """A batch norm by batch statistics, which needs two rows; `by_hand`: written as in an exported
    file.
    """

    def __init__(self, *, by_hand: bool = False, eps: float = 1e-5) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3, track_running_stats=False)
        self.by_hand, self.eps = by_hand, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if not self.by_hand:
            return self.norm(y)
        centered = y - y.mean(0, keepdim=True)
        spread = torch.sqrt((centered * centered).mean(0, keepdim=True) + self.eps)
        return centered / spread * self.norm.weight + self.norm.bias


class RefusesSingleRow(BatchStatistics):
    """A BatchStatistics model that raises an error for a single row."""

    def __init__(self, *, by_hand: bool = False, eps: float = 1e-5) -> None:
        super().__init__(by_hand=True, eps=eps)
        self.refuses = not by_hand

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.refuses and len(x) < 2:
            raise ValueError("give at least two rows")
        return super().forward(x)


@pytest.mark.parametrize(("kind", "samples", "eps", "verdict"), [
    (BatchStatistics, 3, 1e-5, Verdict.PASS),
    (BatchStatistics, 24, 1e-3, Verdict.FAIL),
    (BatchStatistics, 33, 1e-3, Verdict.FAIL),
    (BatchStatistics, 65, 1e-5, Verdict.PASS),
    (RefusesSingleRow, 3, 1e-3, Verdict.FAIL),
    (RefusesSingleRow, 33, 1e-5, Verdict.PASS),
    pytest.param(RefusesSingleRow, 321, 1e-3, Verdict.FAIL, marks=pytest.mark.proof),
])  # fmt: skip
def test_last_batch_never_has_one_row(tmp_path, kind, samples, eps, verdict):
    x = np.random.default_rng(0).normal(size=(samples, 4)).astype(np.float32)
    path = export(build_seeded(lambda: kind(by_hand=True, eps=eps)), tmp_path / "norm.onnx",
                    torch.from_numpy(x[:2]))  # fmt: skip
    result = check_file(build_seeded(kind), path, x)
    assert result.decision.verdict is verdict, result.decision.problems
    single_row_probe = next(p for p in result.evidence.runtimes[1].probes if p.name == "batch_1")
    assert single_row_probe.inapplicable is not None
    if verdict is Verdict.FAIL:
        assert result.explanation.localisation is not None


def set_batch_minus_one(model: onnx.ModelProto) -> None:
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = -1


def clear_output_shape(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.ClearField("shape")


@pytest.mark.parametrize(("spoil", "factor", "verdict"), [
    (set_batch_minus_one, 1.0, Verdict.PASS),
    (set_batch_minus_one, 1.01, Verdict.FAIL),
    (clear_output_shape, 1.0, Verdict.PASS),
])  # fmt: skip
def test_unusual_shape_annotations(tmp_path, spoil, factor, verdict):
    x = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
    model = build_seeded(Float64Built)
    with torch.no_grad():
        model.linear.weight *= factor
    path = export(model, tmp_path / "model.onnx", torch.from_numpy(x[:2]))
    proto = onnx.load(path)
    spoil(proto)
    onnx.save(proto, path)
    result = check_file(build_seeded(Float64Built), path, x)
    assert result.decision.verdict is verdict, result.decision.problems
    graph = result.evidence.graph
    assert graph is not None
    assert ("checker" in {finding.code for finding in graph.findings}) == (
        spoil is clear_output_shape
    )
