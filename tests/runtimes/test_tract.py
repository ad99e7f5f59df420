"""tract uses symbolic sizes if the file allows them, otherwise one model per shape."""

from __future__ import annotations

import numpy as np
import pytest

from gate import MeasurementJob, Policy, Verdict, decide
from gate.api import measure_job
from gate.errors import DigestMismatch, OutputMismatch
from gate.policy.defaults import exact_bounds
from gate.policy.sections import Instruments, RuntimePolicy
from gate.runtimes import RunnableFile
from gate.runtimes import tract as module
from tests.measure import tiny
from tests.runtimes import strange_files
from tests.runtimes.strange_files import create_file, open_session

tract = pytest.importorskip("tract", reason="pip install 'parity-gate[tract]'")
INSTRUMENTS = Instruments(probes=False, search_inputs=0)


def measure_and_decide(model, candidate, **policy):
    """Return the record, the failed checks by name, and the verdict."""
    custom_policy = RuntimePolicy(required="always", bounds=exact_bounds("cpu", classes=True))
    policy = Policy.model_validate(
        {**dict(tiny.policy()), "runtimes": {"tract": custom_policy}, **policy}
    )
    measured = measure_job(MeasurementJob(model, candidate, tiny.samples(), policy=policy))
    decision = decide(policy, tiny.stored(measured), decided_at="now")
    return measured.runtimes[0], {c.name for c in decision.problems}, decision.verdict


def test_correct_file_passes(model, good):
    record, _, verdict = measure_and_decide(model, good)
    assert verdict is Verdict.PASS
    assert record.providers_active == ("tract cpu",)
    assert record.identity.versions == {"tract": tract.version()}
    assert record.identity.precision == "float32"
    assert record.session_options == {"sizes": "symbolic", "types": "F32"}
    assert record.probes


def test_wrong_weights_fail(model, tmp_path):
    _, problems, verdict = measure_and_decide(
        model, tiny.export(tiny.net(seed=1), tmp_path / "wrong.onnx"), instruments=INSTRUMENTS
    )
    assert verdict is Verdict.FAIL
    assert "noise_ratio" in problems


def test_unsupported_operator_is_a_failure(model, good, tmp_path):
    def change(proto):
        (gemm,) = (node for node in proto.graph.node if node.op_type == "Gemm")
        gemm.op_type, gemm.domain = "Head", "acme"
        proto.opset_import.add(domain="acme", version=1)
        del gemm.attribute[:]

    record, _, verdict = measure_and_decide(
        model, tiny.edit(good, tmp_path / "strange.onnx", change), instruments=INSTRUMENTS
    )
    assert "Unimplemented(Head)" in record.failure
    assert "backtrace" not in record.failure
    assert verdict is Verdict.FAIL


@pytest.mark.parametrize("make", strange_files.FILES)
def test_outputs_have_the_order_and_types_of_the_file(make, tmp_path):
    candidate, batches = create_file(make, tmp_path)
    session = open_session(module.TractRuntime(), candidate, batches[0])
    strange_files.assert_matches_onnxruntime(session, candidate, batches)
    assert session.proof().precision == "float32"
    symbolic = make is not strange_files.input_is_output
    assert session.proof().session_options["sizes"].startswith("symbolic") is symbolic


def test_number_of_models_per_shape_is_limited(tmp_path):
    candidate, batches = create_file(strange_files.input_is_output, tmp_path)
    session = open_session(module.TractRuntime(), candidate, batches[0])
    for batch in (*batches, batches[-1]):
        session.run(batch)
    sizes = [shapes[0][0] for shapes in session._by_shape]
    assert sizes == [2, 4, 5, 6]


def test_failing_symbolic_model_falls_back_to_shapes(good, monkeypatch):
    batch = {"input": tiny.images(2)}
    session = open_session(module.TractRuntime(), good, batch)
    expected = session.run(batch)[0]

    def broken(_batch):
        raise module._Refusal("tract: symbols")

    monkeypatch.setattr(session._symbolic, "run", broken)
    np.testing.assert_allclose(session.run(batch)[0], expected, rtol=1e-5, atol=1e-5)
    assert session.proof().session_options["sizes"] == "one model a shape: tract: symbols"


def test_half_precision_is_read_from_the_prepared_model(good, monkeypatch):
    original = tract.InferenceModel.into_model

    def into_half(self):
        half = original(self)
        half.transform("f32_to_f16")
        return half

    monkeypatch.setattr(tract.InferenceModel, "into_model", into_half)
    file = RunnableFile(good)
    prepared = module._Prepared(str(good.path), file, None)
    assert "F16" in prepared.types()
    session = open_session(module.TractRuntime(), good, {"input": tiny.images(2).astype("float16")})
    assert session.proof().precision == "float16"


@pytest.mark.parametrize("name", ["model.onnx", "weights.bin"])
def test_replaced_file_is_not_opened(name, tmp_path):
    candidate, batches = create_file(strange_files.external_data, tmp_path)
    data = bytearray((tmp_path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DigestMismatch):
        open_session(module.TractRuntime(), candidate, batches[0])


def test_wrong_number_of_outputs_is_refused(good):
    subject = good.subject.model_copy(update={"outputs": good.subject.outputs * 2})
    with pytest.raises(OutputMismatch, match="1 outputs"):
        open_session(
            module.TractRuntime(), type(good)(good.path, subject), {"input": tiny.images(2)}
        )


def test_tract_is_absent_without_its_package(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    reason = module.TractRuntime().absent_reason(module.TractRuntime.options())
    assert "pip install 'parity-gate[tract]'" in reason
