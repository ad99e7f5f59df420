"""A fault of a plug-in runtime ends only its process; invalid messages are errors."""

from __future__ import annotations

import json
import socket
import threading
from multiprocessing.connection import Connection

import numpy as np
import psutil
import pytest

from gate import MeasurementJob, Policy, Verdict, decide
from gate.api import measure_job
from gate.errors import EvidenceError, PolicyError
from gate.policy.sections import RuntimePolicy
from gate.runtimes.isolated_worker import _Worker
from gate.sandbox.worker_process import receive, send
from gate.summary.render import render_check
from tests.measure import tiny
from tests.runtimes import acme


@pytest.fixture
def check_with(model, good, tmp_path, monkeypatch):
    """Return a function that checks with ort-cpu and a plug-in runtime, and returns records and
    checks."""

    def judge(name, **settings):
        acme.install(tmp_path / name, {"acme": f"tests.runtimes.acme:{name}"})
        monkeypatch.syspath_prepend(str(tmp_path / name))
        plain = tiny.policy("ort-cpu")
        custom_policy = RuntimePolicy(
            **{"required": "always", "bounds": plain.runtimes["ort-cpu"].bounds, **settings}
        )
        runtimes = {"acme": custom_policy, **plain.runtimes}
        policy = Policy.model_validate({**dict(plain), "runtimes": runtimes})
        before = psutil.Process().children(recursive=True)
        measured = measure_job(MeasurementJob(model, good, tiny.samples(), policy=policy))
        decision = decide(policy, tiny.stored(measured), decided_at="now")
        assert set(psutil.Process().children(recursive=True)) <= set(before)
        return measured.runtimes, decision

    return judge


def acme_checks(decision):
    return {c.name: c for c in decision.checks if c.runtime == "acme"}


def test_correct_plugin_runtime_passes_with_identity(check_with):
    (theirs, ours), decision = check_with("Acme", options={"fast": True})
    assert decision.verdict is Verdict.PASS
    assert set(decision.runtimes) == {"acme", "ort-cpu"}
    assert theirs.identity.package == "acme-parity 1.2"
    assert theirs.identity.versions == {"acme": "1.2"}
    assert theirs.identity.options == {"fast": True}
    assert theirs.identity.precision == "float32"
    assert theirs.providers_active == ("ACME",)
    assert 0 < theirs.memory_bytes < theirs.cost.peak_bytes
    assert theirs.cost.peak_bytes < ours.cost.peak_bytes
    assert theirs.cost.open_ms > 0
    assert theirs.cost.single.batch_size == 1
    assert theirs.latency.median_ms > 0
    assert theirs.outputs[0].samples == ours.outputs[0].samples == 20
    assert theirs.outputs[0].stability is not None
    assert theirs.probes
    assert ours.identity is None


def test_session_is_closed_before_its_process(check_with, good):
    _, decision = check_with("Closing")
    assert decision.verdict is Verdict.PASS
    assert good.path.with_name(f"{good.path.name}.closed").exists()


@pytest.mark.rows(4)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("RaisesInOpen", "it raised RuntimeError: cannot open"),
        ("Exits", "it raised SystemExit: 0"),
        ("Dies", "ended with code 0. Its last output: illegal instruction"),
        ("Hangs", "took longer than 0.5 s and was killed"),
        ("TooFew", "acme returned 0 outputs, the file names ['logits']"),
        ("Words", "expected an array of numbers"),
        ("Stored", "the session overrides live, which only"),
        ("AsksItself", "the session overrides has_probe, run_probe"),
        ("NoProof", "it raised RuntimeError: no counters"),
        ("BadProof", "validation error"),
    ],
)
def test_failing_plugin_runtime_fails_alone(check_with, name, words):
    (theirs, ours), decision = check_with(name, required="when_present")
    assert words in theirs.failure
    assert theirs.outputs == ()
    assert ours.outputs[0].samples == 20
    assert decision.verdict is Verdict.FAIL
    assert decision.runtimes == ("ort-cpu",)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("RaisesInLook", "it raised OSError: a driver is broken"),
        ("Nothing", "is not a runtime: it is a Nothing"),
        ("LacksLibrary", "it raised ImportError: libacme.so.1: cannot open"),
    ],
)
def test_unusable_plugin_runtime_is_an_error(check_with, name, words):
    (theirs, ours), decision = check_with(name, required="when_present")
    assert words in theirs.failure
    assert theirs.unusable
    assert ours.outputs[0].samples == 20
    assert acme_checks(decision)["runtime"].verdict is Verdict.ERROR
    assert decision.verdict is Verdict.ERROR


@pytest.mark.further
def test_plugin_runtime_with_wrong_model_fails(check_with):
    _, decision = check_with("AnotherModel")
    assert acme_checks(decision)["max_abs_diff"].verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("name", "check", "words"),
    [
        ("Unproven", "provider", "active provider is CPU, not ACME"),
        ("Rounded", "precision", "reports bfloat16 precision"),
    ],
)
def test_plugin_runtime_without_promised_proof_fails(check_with, name, check, words):
    _, decision = check_with(name)
    assert acme_checks(decision)[check].verdict is Verdict.FAIL
    assert words in render_check(acme_checks(decision)[check])
    assert decision.verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("required", "verdict"), [("when_present", Verdict.WAIVED), ("always", Verdict.ERROR)]
)
def test_absent_plugin_runtime_is_waived_only_when_optional(check_with, required, verdict):
    (theirs, _), decision = check_with("Absent", required=required)
    assert theirs.absent_reason == "no ACME chip on this machine"
    assert acme_checks(decision)["runtime"].verdict is verdict


def test_unknown_plugin_options_are_a_policy_error(check_with):
    with pytest.raises(PolicyError, match="options: slow: Extra inputs are not permitted"):
        check_with("Acme", options={"slow": True})


def worker_answers(name, path, subject):
    """Return the time to open, the time to run, and the proof, as JSON."""
    worker = _Worker(f"tests.runtimes.acme:{name}")
    header = {"path": str(path), "subject": subject.to_plain(), "options": {}, "conditions": {}}
    opened, _ = worker.answer({"verb": "open", **header}, {})
    ran, _ = worker.answer({"verb": "run"}, {"input": tiny.images(1)})
    proof, _ = worker.answer({"verb": "proof"}, {})
    return json.loads(json.dumps([opened, ran, proof]))


@pytest.mark.parametrize(
    ("name", "memory"), [("Acme", 0), ("Boasts", 15), ("Babbles", None), ("ElsewhereAgain", None)]
)
def test_cost_is_measured_or_a_number_or_none(good, name, memory):
    opened, ran, proof = worker_answers(name, good.path, good.subject)
    assert opened["seconds"] > 0
    assert ran["seconds"] > 0
    assert proof["own_process"] is True
    if name == "Acme":
        assert 0 <= proof["memory_bytes"] < proof["peak_bytes"]
    else:
        assert (proof["memory_bytes"], proof["peak_bytes"]) == (memory, memory)


@pytest.fixture
def ends():
    pair = [Connection(end.detach()) for end in socket.socketpair()]
    yield pair
    for end in pair:
        end.close()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6, dtype=np.int64).reshape(2, 3).T,
        np.float64(2.5).reshape(()),
        np.zeros((0, 4), np.float32),
        np.array([True, False]),
        np.array([[np.nan, np.inf]], np.float16),
        np.zeros((3, 1000, 100), np.float32),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_survive_transport(ends, array):
    first, second = ends
    sender = threading.Thread(target=send, args=(first, {"verb": "run"}, {"x": array}))
    sender.start()
    header, ((name, got),) = receive(second)
    sender.join()
    assert (header, name) == ({"verb": "run"}, "x")
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert np.array_equal(got, array, equal_nan=array.dtype.kind == "f")
    assert got.flags.writeable


@pytest.mark.parametrize(
    "parts",
    [
        [b"no json"],
        [b"[]"],
        [b"{}"],
        [{"arrays": [["x", "O", [1]]], "v": 1}, b"12345678"],
        [{"arrays": [["x", "<f4", [1 << 40]]]}, b""],
        [{"arrays": [["x", "<f4", [2]]]}, b"1234"],
        [{"arrays": [["x", "<f4", [2]]]}, b"123456789012"],
        [{"arrays": [["x", "<f4", [-1]]]}, b"1234"],
        [{"arrays": [["x", "<f4", "two"]]}, b"1234"],
        [{"arrays": [["x"]]}],
    ],
)
def test_invalid_message_is_an_evidence_error(ends, parts):
    first, second = ends
    for part in parts:
        first.send_bytes(part if isinstance(part, bytes) else json.dumps(part).encode())
    with pytest.raises(EvidenceError, match="sent an invalid message"):
        receive(second)


def test_closed_connection_raises_eof(ends):
    first, second = ends
    first.close()
    with pytest.raises(EOFError):
        receive(second)
