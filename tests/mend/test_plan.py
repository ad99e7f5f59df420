"""The search finds the cheapest export that passes on samples it did not use."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from gate.api import check
from gate.measure.job import EvaluationData, Reference
from gate.mend.mixed_precision import is_float32
from gate.mend.plan import MendPlan, Outcome
from gate.mend.recipe import Builder, calibration_of, example_of, halves
from gate.mend.search import Search, TrialLog, with_disabled
from gate.policy.policy import Policy
from gate.policy.sections import Instruments
from gate.records.export import ExportSettings
from gate.storage.digest import Digest
from tests.localize.optimizers.faults import FAULTS

TRACED = ExportSettings(strategy="traced", opset=13, do_constant_folding=False)


class LogSigmoidNet(nn.Module):
    """PyTorch's exporters write log(sigmoid(x)) for LogSigmoid, which is -inf from -104 on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.act = nn.LogSigmoid()
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.act(100 * self.first(x)))


class Doubles(nn.Module):
    def forward(self, x):
        return 2.0 * x


def write_doubling_file(path: Path) -> Path:
    """Write a file that computes 2 x, but another function for x above 100."""
    wide = ["batch", 6]
    nodes = [
        helper.make_node("Add", ["x", "x"], ["twice"]),
        helper.make_node("Sub", ["x", "hundred"], ["above"]),
        helper.make_node("Relu", ["above"], ["more"]),
        helper.make_node("Add", ["twice", "more"], ["output"]),
    ]
    used = helper.make_tensor_value_info("x", TensorProto.FLOAT, wide)
    arguments = helper.make_tensor_value_info("output", TensorProto.FLOAT, wide)
    hundred = numpy_helper.from_array(np.float32(100.0), "hundred")
    graph = helper.make_graph(nodes, "doubles", [used], [arguments], [hundred])
    opset = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return path


def run_search(
    model: nn.Module,
    samples: np.ndarray,
    folder: Path,
    *,
    settings: ExportSettings = TRACED,
    policy: Policy | None = None,
    budget: int = 10_000,
    log: TrialLog | None = None,
    file: Path | None = None,
) -> tuple[Search, Outcome]:
    reference = Reference.from_model(model.eval())
    data = EvaluationData.from_data(samples)
    search = Search(reference, policy or Policy.default(), budget, log=log)
    plan = MendPlan(search, create_builder(reference, data, settings, file), settings)
    return search, plan.run(halves(data), folder)


def create_builder(
    reference: Reference,
    data: EvaluationData,
    settings: ExportSettings = TRACED,
    file: Path | None = None,
) -> Builder:
    calibration = calibration_of(halves(data)[0])
    return Builder(reference, example_of(data.samples, settings), file, calibration)


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def mended(tmp_path_factory) -> tuple[Search, Outcome]:
    return run_search(LogSigmoidNet(), floats(24, 6), tmp_path_factory.mktemp("steep"))


class TestAFaultOfTheExporter:
    def test_is_mended_by_a_rewrite_of_the_layer_that_was_located(self, mended):
        search, outcome = mended
        assert search.trials[0].verdict == "FAIL"
        assert search.trials[0].layer == "act"
        assert outcome.winner is not None
        assert outcome.winner.candidate.stage == "rewrite"
        assert [trial.half for trial in search.trials if trial.passed] == ["search", "verify"]

    def test_passes_on_fresh_samples(self, mended):
        _, outcome = mended
        result = check(outcome.winner.path, LogSigmoidNet().eval(), floats(24, 6, seed=3))
        assert result.decision.passed

    def test_has_the_rewrite_in_the_record_of_its_export(self, mended):
        _, outcome = mended
        export = outcome.winner.result.evidence.export
        edits = [item.text for item in outcome.winner.steps.edits]
        functions = outcome.winner.steps.functions
        assert bool(edits) != bool(functions)
        assert export.settings.get("replaced_functions", "") == ",".join(functions)
        assert [export.settings[f"edit_{index}"] for index in range(len(edits))] == edits


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.heads(x, x, x, need_weights=False)[0]


class LogOfSigmoid(nn.Module):
    """ONNX Runtime's Sigmoid is 0 from -18 on, PyTorch's from -89 on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)

    def forward(self, x):
        return torch.log(torch.sigmoid(20 * self.first(x)))


class OwnDivisor(nn.Module):
    """PyTorch's exporters ignore `divisor_override`."""

    def forward(self, x):
        return torch.nn.functional.avg_pool2d(x, 2, divisor_override=3)


class TestWhatTheExporterLacks:
    @pytest.mark.further
    @pytest.mark.parametrize(
        ("model", "shape", "functions", "edits"),
        [
            (Attention, (16, 5, 8), ("multi_head_attention",), ()),
            (LogOfSigmoid, (24, 6), (), ("log_sigmoid_exp",)),
            (OwnDivisor, (24, 2, 4, 4), ("avg_pool2d",), ()),
        ],
    )
    def test_is_mended_by_another_form(self, tmp_path, model, shape, functions, edits):
        _, outcome = run_search(model(), floats(*shape), tmp_path)
        steps = outcome.winner.steps
        assert steps.functions == functions
        assert tuple(item.rewrite for item in steps.edits) == edits


class TestAFaultOfAnOptimizer:
    @pytest.mark.further
    def test_is_mended_by_disabling_it(self, tmp_path):
        fault = FAULTS["a transposed matrix by a vector"]
        samples = floats(24, *fault.inputs.shape[1:])
        search, outcome = run_search(fault.model(), samples, tmp_path)
        winner = outcome.winner
        assert winner.candidate.stage == "optimizers"
        assert winner.candidate.disabled_optimizers == {"ort-cpu-optimized": fault.names}
        fresh = floats(24, *fault.inputs.shape[1:], seed=3)
        policy = with_disabled(search.policy, winner.candidate.disabled_optimizers)
        assert check(winner.path, fault.model().eval(), fresh, policy).decision.passed
        assert not check(winner.path, fault.model().eval(), fresh).decision.passed


class TestTheHeldOutHalf:
    def test_rejects_what_passed_on_the_half_of_the_search(self, tmp_path):
        samples = floats(24, 6)
        samples[1::2] *= 200.0
        few = Instruments(probes=False, search_inputs=0)
        policy = Policy.default().model_copy(update={"instruments": few})
        file = write_doubling_file(tmp_path / "m.onnx")
        search, outcome = run_search(Doubles(), samples, tmp_path, policy=policy, file=file)
        assert [(trial.half, trial.verdict) for trial in search.trials] == [
            ("search", "PASS"),
            ("verify", "FAIL"),
            ("search", "PASS"),
            ("verify", "PASS"),
        ]
        assert outcome.winner.steps.export == TRACED


class TestTheLog:
    @pytest.mark.further
    def test_spares_a_second_search_the_trials_of_the_first(self, tmp_path):
        path, inputs = tmp_path / "trials.jsonl", Digest.from_bytes(b"inputs")
        (tmp_path / "first").mkdir()
        log = TrialLog.open(path, inputs)
        first, stopped = run_search(
            LogSigmoidNet(), floats(24, 6), tmp_path / "first", budget=24, log=log
        )
        assert stopped == Outcome(None, "budget")
        assert first.spent <= 24
        path.write_text(path.read_text() + '{"key": "torn')
        log = TrialLog.open(path, inputs)
        assert set(log.earlier) == {str(trial.key) for trial in first.trials}
        (tmp_path / "second").mkdir()
        repeated, outcome = run_search(LogSigmoidNet(), floats(24, 6), tmp_path / "second", log=log)
        assert repeated.trials[: len(first.trials)] == first.trials
        assert outcome.winner is not None
        assert not TrialLog.open(path, Digest.from_bytes(b"other inputs")).earlier


class Overflows(nn.Module):
    """The values between the layers exceed the range of float16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last((self.layers(x) * 1e6).abs() * 1e-6)


class TestAFloat16File:
    @pytest.mark.further
    def test_keeps_in_float32_only_what_overflows_and_is_built_again(self, tmp_path):
        policy, samples = Policy.reduced(task="tensors"), floats(24, 6)
        path, inputs = tmp_path / "trials.jsonl", Digest.from_bytes(b"inputs")
        log = TrialLog.open(path, inputs)
        search, outcome = run_search(Overflows(), samples, tmp_path, policy=policy, log=log)
        winner = outcome.winner
        assert winner.candidate.stage == "mixed_precision"
        assert [trial.half for trial in search.trials] == ["search", "search", "verify"]
        assert 1 <= winner.candidate.float32.count <= 3
        assert not is_float32(winner.path)
        assert winner.rounded_ratio <= 1.0
        assert log.ratios
        measured = path.read_text().count("\n")
        (tmp_path / "again").mkdir()
        log = TrialLog.open(path, inputs)  # a second search measures nothing
        _, repeated = run_search(Overflows(), samples, tmp_path / "again", policy=policy, log=log)
        assert repeated.winner.steps == winner.steps
        assert path.read_text().count("\n") == measured
        assert repeated.winner.path.read_bytes() == winner.path.read_bytes()


class UnevenScales(nn.Module):
    """One value between two layers is far larger than the others."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.third, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        with torch.no_grad():
            self.second.weight[0] *= factor
            self.third.weight[:, 0] /= factor

    def forward(self, x):
        return self.last(torch.tanh(self.third(self.second(torch.tanh(self.first(x))))))


def create_quantized_policy(bound: float) -> Policy:
    runtimes = {"ort-cpu-optimized": {"required": "always", "bounds": {"scaled_diff": bound}}}
    plain = {**Policy.quantized().to_plain(), "task": "tensors", "runtimes": runtimes}
    return Policy.from_json(json.dumps(plain))


def draw_uniform(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, size=shape).astype(np.float32)


class TestAnInt8File:
    @pytest.mark.further
    def test_excludes_the_layers_that_lose_most_and_is_built_again(self, tmp_path):
        data = draw_uniform(64, 6)
        _, outcome = run_search(
            UnevenScales(300.0), data, tmp_path, policy=create_quantized_policy(0.1)
        )
        winner = outcome.winner
        assert winner.candidate.stage == "quantization"
        assert {"/second/Gemm", "/third/Gemm"} <= set(winner.steps.quantize.exclude)
        layers = winner.candidate.float32
        assert layers.count == len(winner.steps.quantize.exclude) < len(layers.sensitivity)
        assert {*list(layers.sensitivity)[:2]} == {"/second/Gemm", "/third/Gemm"}
        ratios = list(layers.sensitivity.values())
        assert ratios == sorted(ratios, reverse=True)
        assert ratios[0] > 1.0  # in units of the bound
        assert not is_float32(winner.path)
        (tmp_path / "again").mkdir()
        repeated = create_builder(
            Reference.from_model(UnevenScales(300.0).eval()), EvaluationData.from_data(data)
        )
        created = repeated.build(winner.steps, tmp_path / "again")
        assert created.read_bytes() == winner.path.read_bytes()

    @pytest.mark.further
    def test_that_is_refused_on_the_other_half_gets_a_margin(self, tmp_path):
        search, outcome = run_search(
            UnevenScales(1.0), draw_uniform(64, 6), tmp_path, policy=create_quantized_policy(0.1)
        )
        verified = [trial for trial in search.trials if trial.half == "verify"]
        assert [trial.verdict for trial in verified] == ["FAIL", "PASS"]
        assert outcome.winner.candidate.float32.count == 1

    @pytest.mark.further
    def test_that_nothing_can_pass_ends_with_the_reason(self, tmp_path):
        search, outcome = run_search(
            UnevenScales(1.0), draw_uniform(16, 6), tmp_path, policy=create_quantized_policy(1e-6)
        )
        assert outcome == Outcome(None, "candidates")
        assert "no set" in next(t.failure for t in search.trials if t.stage == "quantization")
