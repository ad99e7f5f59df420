"""OpenVINO passes if it reports float32, and is rejected if it rounds more."""

from __future__ import annotations

from typing import Any

import pytest

from gate import MeasurementJob, Policy, Verdict, decide
from gate.api import measure_job
from gate.errors import DigestMismatch, EvidenceError, OutputMismatch
from gate.policy.defaults import exact_bounds
from gate.policy.sections import Instruments, RuntimePolicy
from gate.runtimes import RunnableFile
from gate.runtimes import openvino as module
from gate.summary.render import render_check
from tests.measure import tiny
from tests.runtimes import strange_files
from tests.runtimes.strange_files import create_file, open_session

# OpenVINO once ended the worker process by SIGSEGV after thousands of other tests.
pytestmark = pytest.mark.alone
openvino = pytest.importorskip("openvino", reason="pip install 'parity-gate[openvino]'")
IN_BFLOAT16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
INSTRUMENTS = Instruments(probes=False, search_inputs=0)


def policy(instruments: Instruments | None = None, **options: dict[str, Any]) -> Policy:
    """Return a policy with OpenVINO runtimes of these names and options."""
    runtimes = {
        name: RuntimePolicy(
            required="always",
            kind="openvino",
            options=arguments,
            bounds=exact_bounds("cpu", classes=True),
        )
        for name, arguments in options.items()
    }
    plain = {**dict(tiny.policy()), "runtimes": runtimes}
    return Policy.model_validate({**plain, "instruments": instruments or Instruments()})


def check_runtimes(model, candidate, wanted: Policy):
    """Return records and failed checks by runtime, and the verdict."""
    measured = measure_job(MeasurementJob(model, candidate, tiny.samples(), policy=wanted))
    decision = decide(wanted, tiny.stored(measured), decided_at="now")
    problems = {(check.runtime, check.name): render_check(check) for check in decision.problems}
    return {record.runtime: record for record in measured.runtimes}, problems, decision.verdict


def test_openvino_proves_float32_and_fails_with_lower_precision(model, good):
    half = {"precision_hint": "bf16" if IN_BFLOAT16 else "f32"}
    custom_policy = policy(exact={}, best={"precision_hint": "default"}, half=half)
    records, problems, _ = check_runtimes(model, good, custom_policy)
    exact = records["exact"]
    assert not {name for runtime, name in problems if runtime == "exact"}
    assert exact.providers_active == ("OpenVINO CPU",)
    assert exact.nodes_per_provider["OpenVINO CPU"] > 2
    assert exact.session_options["INFERENCE_PRECISION_HINT"] == "f32"
    assert exact.identity.precision == "float32"
    assert exact.identity.device
    assert openvino.__version__.startswith(exact.identity.versions["openvino"])
    assert exact.outputs[0].stability is not None
    assert exact.probes
    for name in ("best", "half"):
        rounds = records[name].identity.precision != "float32"
        assert rounds is IN_BFLOAT16
        assert ((name, "precision") in problems) is rounds
        if rounds:
            stated = (
                "reports bfloat16 precision, and the policy's precision 'exact' asks for float32"
            )
            assert stated in problems[name, "precision"]
            assert "bf16" in records[name].session_options["node_precisions"]


def test_wrong_weights_fail(model, good, tmp_path):
    wrong = tiny.export(tiny.net(seed=1), tmp_path / "wrong.onnx")
    _, problems, verdict = check_runtimes(model, wrong, policy(INSTRUMENTS, exact={}))
    assert verdict is Verdict.FAIL
    assert ("exact", "noise_ratio") in problems


def test_unsupported_operator_is_a_failure(model, good, tmp_path):
    def change(proto):
        (gemm,) = (node for node in proto.graph.node if node.op_type == "Gemm")
        gemm.op_type, gemm.domain = "Head", "acme"
        proto.opset_import.add(domain="acme", version=1)
        del gemm.attribute[:]

    strange = tiny.edit(good, tmp_path / "strange.onnx", change)
    records, _, verdict = check_runtimes(model, strange, policy(INSTRUMENTS, exact={}))
    assert "acme.Head" in records["exact"].failure
    assert verdict is Verdict.FAIL


@pytest.mark.parametrize("make", strange_files.FILES)
def test_outputs_have_the_order_and_types_of_the_file(make, tmp_path):
    candidate, batches = create_file(make, tmp_path)
    session = open_session(module.OpenVinoRuntime(), candidate, batches[0])
    strange_files.assert_matches_onnxruntime(session, candidate, batches)
    assert session.proof().precision == "float32"


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (strange_files.fixed_batch, "model.onnx"),
        (strange_files.external_data, "model.onnx"),
        (strange_files.external_data, "weights.bin"),
    ],
)
def test_replaced_file_is_not_opened(make, name, tmp_path):
    candidate, batches = create_file(make, tmp_path)
    data = bytearray((tmp_path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DigestMismatch):
        open_session(module.OpenVinoRuntime(), candidate, batches[0])


class ReportedModel:
    """A compiled model with some reported properties replaced."""

    def __init__(self, real, **replaced):
        self._real, self._replaced = real, replaced

    def __getattr__(self, name):
        return getattr(self._real, name)

    def get_property(self, name):
        return self._replaced.get(name, self._real.get_property(name))

    def get_runtime_model(self):
        return self._replaced.get("model", self._real).get_runtime_model()


def test_reported_precision_and_device_are_used(good):
    batch = {"input": tiny.images(2)}
    exact = open_session(module.OpenVinoRuntime(), good, batch)
    exact.run(batch)
    hint = {"INFERENCE_PRECISION_HINT": openvino.Type.f16}
    assert (
        create_session(ReportedModel(exact._compiled, **hint), good).proof().precision == "float16"
    )
    elsewhere = ReportedModel(exact._compiled, EXECUTION_DEVICES=["GPU.0"])
    assert create_session(elsewhere, good).proof().providers_active == ("OpenVINO GPU.0",)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision_hint": "f16"}, "INFERENCE_PRECISION_HINT is bf16, expected f16"),
        ({"threads": 3}, "INFERENCE_NUM_THREADS is 2, expected 3"),
    ],
)
def test_options_without_effect_are_refused(good, options, words):
    compiled = open_session(module.OpenVinoRuntime(), good, {"input": tiny.images(2)})._compiled
    reported = {"INFERENCE_PRECISION_HINT": openvino.Type.bf16, "INFERENCE_NUM_THREADS": 2}
    expected = {"precision_hint": "bf16", "threads": 2}
    assert create_session(ReportedModel(compiled, **reported), good, **expected)
    with pytest.raises(EvidenceError, match=words):
        create_session(ReportedModel(compiled, **reported), good, **{**expected, **options})
    assert create_session(ReportedModel(compiled, **reported), good)  # no setting requests either


def create_session(compiled, candidate, **options):
    expected = module.OpenVinoOptions(**{"precision_hint": "default", **options})
    return module.OpenVinoSession(compiled, RunnableFile(candidate), device="x", options=expected)


@pytest.mark.skipif(not IN_BFLOAT16, reason="this processor has no bfloat16")
def test_node_with_lower_precision_is_found(good):
    batch = {"input": tiny.images(2)}
    exact = open_session(module.OpenVinoRuntime(), good, batch)
    half = open_session(module.OpenVinoRuntime(), good, batch, precision_hint="bf16")
    half.run(batch)
    mixed = ReportedModel(exact._compiled, model=half._compiled)
    proof = create_session(mixed, good).proof()
    assert proof.session_options["INFERENCE_PRECISION_HINT"] == "f32"
    assert proof.precision == "bfloat16"


def test_missing_output_of_the_compiled_model_is_refused(good):
    session = open_session(module.OpenVinoRuntime(), good, {"input": tiny.images(2)})
    renamed = good.subject.outputs[0].model_copy(update={"name": "other"})
    subject = good.subject.model_copy(update={"outputs": (renamed,)})
    with pytest.raises(OutputMismatch, match="'other' among them"):
        create_session(session._compiled, type(good)(good.path, subject))


@pytest.mark.parametrize("installed", [None, "1.24.1"])
def test_openvino_is_absent_without_its_package(monkeypatch, installed):
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    versions = {"onnxruntime-openvino": installed} if installed else {}
    monkeypatch.setattr(module, "package_versions", lambda _: versions)
    reason = module.OpenVinoRuntime().absent_reason(module.OpenVinoOptions())
    assert "pip install 'parity-gate[openvino]'" in reason
    assert ("onnxruntime-openvino 1.24.1 is installed, but does not help" in reason) is bool(
        installed
    )
