"""Recorded outputs are checked like any runtime's and are bound to the file and the samples."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from gate import MeasurementJob, Policy, SampleSet, Verdict, decide
from gate.api import measure_job
from gate.distributed.external_runtime import Packing, Sending
from gate.errors import EvidenceError, InputMismatch, PolicyError
from gate.policy.defaults import exact_bounds
from gate.policy.sections import Bounds, Instruments, RuntimePolicy
from gate.runtimes.recorded import RecordedSession, with_recordings
from gate.runtimes.recording_format import Recording, RecordingSource
from gate.summary.render import render_check
from tests.measure import tiny
from tests.runtimes import consumer

COUNT = 20
INSTRUMENTS = Instruments(noise_samples=0, stability_samples=2, search_inputs=0, graph=False)
SOURCE = RecordingSource.model_validate(consumer.META)


def policy(probes="required", instruments=INSTRUMENTS, **bounds) -> Policy:
    custom = Bounds(**{"max_abs_diff": 1e-4, "top1_agreement": 1.0} | bounds)
    phone = RuntimePolicy(
        required="always", kind="recorded", options={"probes": probes}, bounds=custom
    )
    here = tiny.policy(instruments=instruments)
    return Policy(**{**dict(here), "runtimes": {**here.runtimes, "phone": phone}})


@pytest.fixture(scope="module")
def recorded_folder(model, tmp_path_factory):
    """A folder with the file, the samples sent, the outputs received, and the recording."""
    folder = tmp_path_factory.mktemp("made")
    good = tiny.export(model, folder / "model.onnx")
    sending = Sending(good, tiny.samples(COUNT), policy(), model)
    sending.write(folder / "sent")
    consumer.run(good.path, folder / "sent", folder / "outputs")
    Packing(good.subject, folder / "sent", folder / "outputs", SOURCE).write(folder / "phone")
    return folder


@pytest.fixture
def check_recording(model, recorded_folder):
    def judge(recording, *, by=None, samples=None, batch_size=32):
        by = by or policy()
        good = tiny.candidate(recorded_folder / "model.onnx")
        case = MeasurementJob(
            model,
            good,
            samples or tiny.samples(COUNT),
            by,
            batch_size,
            recordings={"phone": recording},
        )
        measured = measure_job(case)
        evidence = tiny.stored(measured)
        decision = decide(by, evidence, decided_at="now")
        checks = {c.name: c for c in decision.checks if c.runtime == "phone"}
        return evidence.runtime("phone"), checks, decision

    return judge


@pytest.fixture
def pack_changed(recorded_folder, tmp_path):
    """Return a function that changes outputs and packs them into a recording."""

    def change(part, edit):
        outputs = shutil.copytree(recorded_folder / "outputs", tmp_path / "outputs")
        header = json.loads((outputs / "outputs.json").read_text())
        (described,) = header["parts"][part]["outputs"]
        array = np.fromfile(outputs / described["file"], described["dtype"])
        array = array.reshape(described["shape"])
        edit(array)
        array.tofile(outputs / described["file"])
        subject = tiny.candidate(recorded_folder / "model.onnx").subject
        Packing(subject, recorded_folder / "sent", outputs, SOURCE).write(tmp_path / "changed")
        return tmp_path / "changed"

    return change


def test_correct_recording_passes(check_recording, recorded_folder):
    instruments = INSTRUMENTS.model_copy(update={"noise_samples": 8})
    by = policy(noise_ratio=32.0, instruments=instruments)
    phone, checks, decision = check_recording(recorded_folder / "phone", by=by, batch_size=3)
    assert decision.verdict is Verdict.PASS, [render_check(c) for c in decision.problems]
    assert set(decision.runtimes) == {"ort-cpu", "phone"}
    assert not decision.waived
    assert (phone.latency, phone.memory_bytes, phone.cost, phone.unprobed) == (None, None, None, ())
    assert all(output.stability is None for output in phone.outputs)
    assert phone.identity.device == "Jetson Orin Nano"
    assert phone.identity.versions == {"TensorRT": "10.3"}
    assert len(phone.probes) > 10
    assert checks["noise_ratio"].verdict is Verdict.PASS
    stated = render_check(checks["recording"])
    assert "TensorRT 10.3 computed it on Jetson Orin Nano" in stated
    assert "batch invariance, latency and memory were not measured" in stated


def _insert_nan(array):
    array[3, 2] = np.nan


def _swap_rows(array):
    array[[4, 5]] = array[[5, 4]]


@pytest.mark.parametrize("edit", [_insert_nan, _swap_rows])
def test_wrong_outputs_fail(check_recording, pack_changed, edit):
    phone, checks, decision = check_recording(pack_changed("samples", edit))
    assert phone.measured
    assert decision.verdict is Verdict.FAIL
    assert decision.runtimes == ("ort-cpu",)
    assert "FAIL" in {check.verdict for check in checks.values()}


@pytest.mark.parametrize(("part", "failed", "passed"), [
    ("batch_4", "probe_batch_4", "max_abs_diff"),
    ("samples", "max_abs_diff", "probe_batch_4"),
])  # fmt: skip
def test_probe_and_samples_use_their_own_recorded_outputs(
    check_recording, pack_changed, part, failed, passed
):
    """If a probe has the same inputs as samples, both recorded outputs are checked."""

    def edit(array):
        array[:4] = 0.0

    _, checks, decision = check_recording(pack_changed(part, edit), batch_size=4)
    assert decision.verdict is Verdict.FAIL
    assert checks[failed].verdict is Verdict.FAIL
    assert checks[passed].verdict is Verdict.PASS


def test_recorded_probe_failure_fails(check_recording, recorded_folder, tmp_path):
    outputs = shutil.copytree(recorded_folder / "outputs", tmp_path / "outputs")
    header = json.loads((outputs / "outputs.json").read_text())
    header["parts"]["batch_7"] = {"failed": "profile 0 allows batches up to 4"}
    (outputs / "outputs.json").write_text(json.dumps(header))
    subject = tiny.candidate(recorded_folder / "model.onnx").subject
    Packing(subject, recorded_folder / "sent", outputs, SOURCE).write(tmp_path / "phone")
    _, checks, decision = check_recording(tmp_path / "phone")
    assert decision.verdict is Verdict.FAIL
    assert "profile 0 allows batches up to 4" in render_check(checks["probe_batch_7"])


@pytest.mark.parametrize(
    ("probes", "verdict", "of_all"),
    [("required", Verdict.ERROR, Verdict.ERROR), ("when_recorded", Verdict.WAIVED, Verdict.PASS)],
)
def test_missing_probes_of_a_recording(
    check_recording, recorded_folder, tmp_path, probes, verdict, of_all
):
    outputs = shutil.copytree(recorded_folder / "outputs", tmp_path / "outputs")
    header = json.loads((outputs / "outputs.json").read_text())
    header["parts"] = {"samples": header["parts"]["samples"]}
    (outputs / "outputs.json").write_text(json.dumps(header))
    subject = tiny.candidate(recorded_folder / "model.onnx").subject
    Packing(subject, recorded_folder / "sent", outputs, SOURCE).write(tmp_path / "phone")
    phone, checks, decision = check_recording(tmp_path / "phone", by=policy(probes))
    assert (checks["probes"].verdict, decision.verdict) == (verdict, of_all)
    assert "batch_1" in phone.unprobed
    assert "no outputs for the probes batch_1" in render_check(checks["probes"])
    assert (checks["probes"] in decision.waived) == (verdict is Verdict.WAIVED)


IMAGES = tiny.images(COUNT)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (IMAGES[::-1], "another order than in the recording: sample 0 is its sample 19"),
        (IMAGES[[0, 1, 3, 2, *range(4, COUNT)]], "sample 2 is its sample 3"),
        (IMAGES[:12], "the recording has 20 samples, but only the first 12 were passed"),
        (IMAGES[2:], "sample 0 is its sample 2"),
        (np.concatenate([IMAGES, -IMAGES[:1]]), "the recording has 20 samples, and more"),
        (IMAGES + np.float32(1e-6), "sample 0 has other inputs than were recorded"),
        (np.concatenate([IMAGES[:19], IMAGES[:1]]), "sample 19 is its sample 0"),
    ],
    ids=["reversed", "two swapped", "fewer", "later ones", "more", "others", "one twice"],
)
def test_samples_not_matching_the_recording_are_refused(recorded_folder, images, words):
    with pytest.raises(InputMismatch, match=words):
        run_all(Recording(recorded_folder / "phone"), np.ascontiguousarray(images), batch_size=32)


@pytest.mark.parametrize("batch_size", [3])
@pytest.mark.parametrize("images", [IMAGES[::-1], IMAGES[:12], -IMAGES])
def test_mismatching_samples_in_smaller_batches_are_refused(recorded_folder, images, batch_size):
    with pytest.raises(InputMismatch):
        run_all(
            Recording(recorded_folder / "phone"),
            np.ascontiguousarray(images),
            batch_size=batch_size,
        )


def run_all(recording, images, *, batch_size):
    """Run an example of another size, then all samples, as a measurement does."""
    session = RecordedSession(recording, {"input": images[:2]})
    session.run({"input": images[:2]})
    for start in range(0, len(images), batch_size):
        session.run({"input": images[start : start + batch_size]})
    session.proof()


def test_reordered_samples_fail(check_recording, recorded_folder):
    samples = SampleSet.from_arrays({"input": np.ascontiguousarray(IMAGES[::-1])})
    phone, _, decision = check_recording(recorded_folder / "phone", samples=samples)
    assert "another order than in the recording" in phone.failure
    assert decision.verdict is Verdict.FAIL
    assert decision.runtimes == ("ort-cpu",)


def test_recording_of_another_file_is_refused(check_recording, recorded_folder, tmp_path):
    def rename(proto):
        proto.producer_name = "somebody else"

    second = tiny.edit(
        tiny.candidate(recorded_folder / "model.onnx"), tmp_path / "other.onnx", rename
    )
    outputs = recorded_folder / "outputs"
    inputs = tmp_path / "images.npy"
    np.save(inputs, IMAGES)
    header = json.loads((outputs / "outputs.json").read_text())["parts"]["samples"]["outputs"][0]
    logits = np.fromfile(outputs / header["file"], np.float32).reshape(header["shape"])
    np.save(tmp_path / "logits.npy", logits)
    Packing(second.subject, inputs, tmp_path / "logits.npy", SOURCE).write(tmp_path / "other")
    phone, _, decision = check_recording(tmp_path / "other", by=policy("when_recorded"))
    assert f"is of the file {second.subject.sha256}" in phone.failure
    assert decision.verdict is Verdict.FAIL


def test_equal_inputs_with_different_outputs_are_refused(model, recorded_folder, tmp_path):
    """Otherwise the better output could replace the worse one when a sample is read again."""
    images = np.concatenate([IMAGES[:2], IMAGES[:2]])
    np.save(tmp_path / "images.npy", images)
    np.save(tmp_path / "logits.npy", np.arange(28, dtype=np.float32).reshape(4, 7))
    subject = tiny.candidate(recorded_folder / "model.onnx").subject
    packing = Packing(subject, tmp_path / "images.npy", tmp_path / "logits.npy", SOURCE)
    packing.write(tmp_path / "twice")
    session = RecordedSession(Recording(tmp_path / "twice"), {"input": images[:1]})
    assert session.run({"input": images[:1]})[0].tolist() == [[0, 1, 2, 3, 4, 5, 6]]  # the example
    firsts = [session.run({"input": images[i : i + 1]})[0][0, 0] for i in range(4)]
    assert firsts == [0, 7, 14, 21]
    with pytest.raises(EvidenceError, match="samples 0 and 2 are the same inputs"):
        session.run({"input": images[:1]})


def test_missing_recording_is_an_error(model, recorded_folder):
    by = policy()
    good = tiny.candidate(recorded_folder / "model.onnx")
    measured = measure_job(MeasurementJob(model, good, tiny.samples(COUNT), by))
    decision = decide(by, tiny.stored(measured), decided_at="now")
    assert decision.verdict is Verdict.ERROR
    assert "no recording was given" in " ".join(render_check(c) for c in decision.problems)


def test_recordings_get_built_in_bounds_without_stability():
    by = with_recordings(Policy.default(), ["phone"])
    expected = by.runtimes["phone"]
    assert (expected.kind, expected.required) == ("recorded", "always")
    assert expected.bounds.noise_ratio == exact_bounds("device", classes=True).noise_ratio
    assert expected.bounds.repeatability_ratio is None
    assert expected.bounds.batch_invariance_ratio is None
    assert with_recordings(by, ["phone"]) == by
    assert "recorded" in with_recordings(by, ["recorded"]).runtimes


@pytest.mark.parametrize(
    ("by", "name", "words"),
    [
        (Policy.default(), "ort-cpu", "computes here, not a recording"),
        (Policy.default(), "browser-wasm", "computes here, not a recording"),
        (Policy.default(), "ort", "computes here, not a recording"),
        (Policy.quantized(), "phone", "kind: recorded with bounds of your own"),
    ],
)
def test_recording_for_an_executing_runtime_is_refused(by, name, words):
    with pytest.raises(PolicyError, match=words):
        with_recordings(by, [name])


def test_unrequested_recording_is_refused(model, recorded_folder):
    good = tiny.candidate(recorded_folder / "model.onnx")
    case = MeasurementJob(model, good, tiny.samples(COUNT), tiny.policy())
    for name, words in (("phone", "not in the policy"), ("ort-cpu", "live runtime")):
        with pytest.raises(PolicyError, match=words):
            measure_job(replace(case, recordings={name: recorded_folder / "phone"}))
