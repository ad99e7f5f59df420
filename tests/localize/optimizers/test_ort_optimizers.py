"""For real faults of ONNX Runtime, the faulty optimizer is identified in a child process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gate import (
    Localization,
    MeasurementJob,
    SampleSet,
    TestedFile,
    locate,
)
from gate.localize import ort_optimizers
from gate.localize.layer_deviations import DeviationLimits
from gate.localize.locate import compare_layers
from gate.localize.ort_optimizers import (
    RULES,
    OptimizerTrials,
    ReferenceOutput,
    TrialSettings,
    find_faulty_optimizer,
    find_optimizer_in_sandbox,
    minimal_set,
)
from gate.policy.runtime_options import plain_setup
from gate.policy.sections import RuntimePolicy
from gate.records.localization import OptimizerFault
from gate.runtimes.ort import cuda_absent_reason
from gate.sandbox.process import run_in_sandbox
from gate.summary.render import render_optimizer
from tests.localize.nets import localize_file
from tests.localize.optimizers.faults import FAULTS
from tests.measure import tiny

OPTIMIZED = plain_setup("ort-cpu-optimized")


@pytest.fixture(scope="module", params=FAULTS, ids=str)
def localized(request, tmp_path_factory):
    fault = FAULTS[request.param]
    candidate = fault.file(tmp_path_factory.mktemp("fault") / "m.onnx")
    reported = localize_file(
        fault.model().eval(), candidate, fault.inputs, runtime="ort-cpu-optimized"
    )
    assert reported.optimiser, (
        f"ONNX Runtime {onnxruntime.__version__} computes '{request.param}' as it should: "
        "the fault is mended. Take another one in its place (tests/localize/optimizers/faults)."
    )
    return fault, reported


@pytest.mark.rows(4)
class TestRealFaults:
    def test_faulty_optimizer_is_named(self, localized):
        fault, reported = localized
        assert reported.blame.names == fault.names
        assert reported.blame.level == fault.level
        assert reported.blame.reason_code is None
        assert reported.blame.sessions <= 20
        names = ", ".join(f'"{name}"' for name in fault.names)
        assert f"Serve with disabled_optimizers=[{names}]" in reported.remedy
        text = render_optimizer(reported.blame).text
        assert text[1:] in reported.cause
        if fault.raises is None:
            assert reported.blame.raises is None
            assert "a different result" in text
        else:
            assert re.search(fault.raises, reported.blame.raises)
            assert "ONNX Runtime fails" in text
            assert reported.outcome[0]["code"] == "session_fails"
        if fault.after:
            assert [node.partition(" ")[0] for node in reported.blame.after] == [fault.after]
            assert len(reported.blame.before) > 1
            assert f"became {fault.after}" in reported.cause
        else:
            assert (reported.blame.before, reported.blame.after) == ((), ())
            assert reported.blame.nodes_unread is not None

    def test_file_without_the_optimizer_is_correct(self, localized, tmp_path):
        fault, reported = localized
        candidate = fault.file(tmp_path / "m.onnx")
        session = onnxruntime.InferenceSession(
            candidate.path,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=list(reported.blame.names),
        )
        (got,) = session.run(None, {"input": fault.inputs})
        want = fault.model().eval()(torch.from_numpy(fault.inputs)).detach().numpy()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


class TestOtherSetups:
    FAULT = FAULTS["a transposed matrix by a vector"]

    def localized(self, tmp_path, **options) -> Localization:
        runtime = RuntimePolicy(
            kind="ort",
            required="always",
            bounds=tiny.policy().runtimes["ort-cpu"].bounds,
            options={"providers": ["CPUExecutionProvider"], **options},
        )
        policy = tiny.policy().model_copy(update={"runtimes": {"mine": runtime}})
        fault = self.FAULT
        candidate = fault.file(tmp_path / "m.onnx")
        samples = SampleSet.from_arrays({"input": fault.inputs})
        return locate(
            MeasurementJob(fault.model().eval(), candidate, samples, policy), runtime="mine"
        )

    @pytest.mark.proof
    def test_configured_runtime_uses_its_optimization_level(self, tmp_path):
        reported = self.localized(tmp_path, graph_optimization_level="ORT_ENABLE_EXTENDED")
        assert (reported.blame.names, reported.blame.below) == (
            self.FAULT.names,
            "ORT_ENABLE_BASIC",
        )

    def test_lower_optimization_level_has_no_fault(self, tmp_path):
        reported = self.localized(tmp_path, graph_optimization_level="ORT_ENABLE_BASIC")
        assert (reported.diverges, reported.blame, reported.optimiser) == (False, None, False)

    def test_disabled_optimizer_has_no_fault(self, tmp_path):
        reported = self.localized(tmp_path, disabled_optimizers=list(self.FAULT.names))
        assert (reported.diverges, reported.blame) == (False, None)


def test_no_optimizer_is_named_when_the_plain_session_fails(tmp_path):
    fault = FAULTS["a transposed matrix by a vector"]
    candidate, samples = (
        fault.file(tmp_path / "m.onnx"),
        SampleSet.from_arrays({"input": fault.inputs}),
    )
    case = MeasurementJob(fault.model().eval(), candidate, samples, tiny.policy())
    reported = compare_layers(
        case, runtime="ort-cpu-optimized", refused=["ort-cpu", "ort-cpu-optimized"]
    ).localization
    assert (reported.diverges, reported.blame, reported.optimiser) == (True, None, False)


class ScriptedTrials(OptimizerTrials):
    """Real sessions whose outcome a rule replaces, to simulate faulty optimizers."""

    def __init__(self, candidate, rule: Callable[[str, frozenset[str]], bool]) -> None:
        super().__init__(candidate, OPTIMIZED, comparator=AlwaysAgrees())
        self._rule = rule

    def _run_trial(self, level, is_unoptimized, log):
        outcome = super()._run_trial(level, is_unoptimized, log)
        return dataclasses.replace(outcome, agrees=self._rule(level, is_unoptimized))


class AlwaysAgrees:
    """A comparator that accepts every output."""

    def agrees(self, answers):
        return True


@pytest.fixture(scope="module")
def candidate(tmp_path_factory):
    """A file that several optimizers change."""
    return tiny.export(tiny.net(), tmp_path_factory.mktemp("net") / "m.onnx")


def is_unoptimized(level: str) -> bool:
    return level == "ORT_DISABLE_ALL"


class TestNoFaultyOptimizer:
    """Give the reason if no optimizer is faulty."""

    @pytest.mark.parametrize(
        ("rule", "reason", "remedy"),
        [
            (lambda level, without: False, "unoptimized_off", None),
            (lambda level, without: True, "served_agrees", None),
            (lambda level, without: is_unoptimized(level), "still_wrong",
             "graph_optimization_level ORT_DISABLE_ALL"),
            (lambda level, without: level != "ORT_ENABLE_ALL", "still_wrong",
             "graph_optimization_level ORT_ENABLE_LAYOUT"),
        ],
        ids=["wrong without them", "right with them", "none by name", "none of the last level"],
    )  # fmt: skip
    def test_missing_optimizer_has_a_reason(self, candidate, rule, reason, remedy):
        reported = find_faulty_optimizer(ScriptedTrials(candidate, rule), size_bytes=1)
        assert reported.names == ()
        assert reported.reason_code == reason
        text, result = render_optimizer(reported)
        assert text.startswith("no optimizer is identified: ")
        assert (result is None) if remedy is None else (remedy in result)

    def test_failing_trial_is_a_reason(self, candidate, monkeypatch):
        def fail(*_, **__):
            raise RuntimeError("no room")

        monkeypatch.setattr(OptimizerTrials, "outcome", fail)
        reported = find_faulty_optimizer(ScriptedTrials(candidate, lambda *_: True), size_bytes=1)
        assert reported == OptimizerFault(
            reason_code="stopped", reason_params={"failure": "RuntimeError: no room"}
        )


class TestSearch:
    def test_smallest_set_of_optimizers_is_found(self, candidate):
        pair = {"ConvActivationFusion", "NchwcTransformer"}
        rule = lambda level, without: is_unoptimized(level) or pair <= without  # noqa: E731
        reported = find_faulty_optimizer(ScriptedTrials(candidate, rule), size_bytes=1)
        assert (set(reported.names), reported.reason_code) == (pair, None)
        assert " and " in render_optimizer(reported).text

    def test_rule_set_is_named_when_no_single_rule_is_faulty(self, tmp_path):
        candidate = FAULTS["zeros around a pool"].file(tmp_path / "m.onnx")
        rule_set = "Level1_RuleBasedTransformer"
        rule = lambda level, without: is_unoptimized(level) or rule_set in without  # noqa: E731
        assert find_faulty_optimizer(ScriptedTrials(candidate, rule), size_bytes=1).names == (
            rule_set,
        )

    @pytest.mark.parametrize(("sessions", "named"), [(3, False), (6, True)])
    def test_number_of_sessions_is_limited(self, candidate, monkeypatch, sessions, named):
        monkeypatch.setattr(ort_optimizers, "SESSIONS", sessions)
        rule = lambda level, without: is_unoptimized(level) or "NchwcTransformer" in without  # noqa: E731
        reported = find_faulty_optimizer(ScriptedTrials(candidate, rule), size_bytes=1)
        assert reported.sessions == sessions
        assert bool(reported.names) is named
        assert reported.reason_params == {"count": sessions}
        assert not named or "NchwcTransformer" in reported.names


@pytest.mark.skipif(cuda_absent_reason() is None, reason="CUDA loads here")
def test_missing_provider_is_a_reason(candidate):
    """Report why the provider is missing, also while the log of the session is captured."""
    reported = find_faulty_optimizer(
        OptimizerTrials(candidate, plain_setup("ort-cuda-optimized"), AlwaysAgrees()), size_bytes=1
    )
    assert reported.names == ()
    assert "could not load CUDAExecutionProvider" in reported.reason_params["failure"]


VECTOR_FAULT = FAULTS["a transposed matrix by a vector"]


@pytest.fixture(scope="module")
def faulty_file(tmp_path_factory):
    return VECTOR_FAULT.file(tmp_path_factory.mktemp("fault") / "m.onnx")


@pytest.fixture(scope="module")
def reference_outputs():
    """The outputs of the model in float32 and the truth in float64."""
    model = VECTOR_FAULT.model().eval()
    expected = model(torch.from_numpy(VECTOR_FAULT.inputs)).detach().numpy()
    exact = model.double()(torch.from_numpy(VECTOR_FAULT.inputs).double()).detach().numpy()
    truths = {"logits": exact[:2].astype(np.float64).reshape(-1)}
    return [
        ReferenceOutput({"input": VECTOR_FAULT.inputs[:2]}, {"logits": expected[:2]}, True, truths),
        ReferenceOutput({"input": VECTOR_FAULT.inputs}, {"logits": expected}, False, None),
    ]


def trial_settings(faulty_file: TestedFile) -> TrialSettings:
    setup = plain_setup("ort-cpu-optimized")
    limits = DeviationLimits("ort-cpu-optimized", setup, float64=True)
    return TrialSettings(faulty_file, limits, bound=16.0, threads=1, deterministic=False)


@pytest.mark.further
def test_optimizer_is_found_in_another_process(faulty_file, reference_outputs, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("a session was opened in the process of the verdict")

    monkeypatch.setattr(OptimizerTrials, "outcome", fail)
    result = find_optimizer_in_sandbox(trial_settings(faulty_file), reference_outputs)
    assert (result.names, result.reason_code) == (VECTOR_FAULT.names, None)


@pytest.mark.parametrize(("does", "limit_s", "reason"), [
    (("die", {"number": 6}), 40.0, "its process died of SIGABRT"),
    (("for_ever", {}), 0.5, "disabling optimizers took more than the time limit of 0.5 s"),
    (("stumble", {}), 40.0, "KeyError"),
    (("echo", {"names": 5}), 40.0, "names"),
])  # fmt: skip
def test_failure_of_the_other_process_is_a_reason(
    faulty_file, reference_outputs, monkeypatch, does, limit_s, reason
):
    def run_behavior(_, arguments, **options):
        function, function_arguments = does
        return run_in_sandbox(f"tests.sandbox.behavior:{function}", function_arguments, **options)

    monkeypatch.setattr(ort_optimizers, "APART_LIMIT_S", limit_s)
    monkeypatch.setattr(ort_optimizers, "run_in_sandbox", run_behavior)
    result = find_optimizer_in_sandbox(trial_settings(faulty_file), reference_outputs)
    assert result.names == ()
    assert reason in result.reason_params["failure"]
    assert "Nothing was decided" not in result.reason_params["failure"]


def test_rule_names_exist_in_onnxruntime():
    """Check the rule names against the library: ONNX Runtime ignores unknown names."""
    (path,) = (Path(onnxruntime.__file__).parent / "capi").glob("onnxruntime_pybind11_state*.so")
    library = path.read_bytes()
    sets = {name.partition("_")[2] for name in RULES}  # the prefix is generated from the level
    names = sets | {rule for rules in RULES.values() for rule in rules}
    assert not [name for name in names if name.encode() not in library], onnxruntime.__version__


NAMES = tuple("abcdefghijklmnopqrst")


@given(st.sets(st.sampled_from(NAMES), min_size=1), st.permutations(NAMES))
def test_minimal_set_is_exact(needed, names):
    assert set(minimal_set(names, lambda is_unoptimized: needed <= is_unoptimized)) == needed
