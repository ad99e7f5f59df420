"""Samples are exported for an external runtime, and its outputs are packed as a recording."""

import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from gate import Digest, GateError, SampleSet
from gate.distributed.external_runtime import Packing, Sending, read_recording_source
from gate.errors import InputMismatch
from gate.policy.sections import Instruments
from gate.records.instruments import drawn_batch_sizes
from gate.runtimes.recording_format import Recording, RecordingSource
from tests.measure import tiny
from tests.modules import Layers
from tests.runtimes import consumer

POLICY = tiny.policy(
    instruments=Instruments(noise_samples=0, stability_samples=0, search_inputs=0, graph=False)
)


def read_inputs(folder, part):
    """Read the inputs of a part from the raw and from the .npy files."""
    raw, npy = {}, {}
    for each in part["inputs"]:
        dtype = np.dtype(each["dtype"]).newbyteorder("<")
        flat = np.frombuffer((folder / each["raw"]).read_bytes(), dtype)
        raw[each["name"]] = flat.reshape(each["shape"])
        npy[each["name"]] = np.load(folder / each["npy"])
    return raw, npy


def test_samples_and_probes_are_written_as_raw_and_npy(good, tmp_path):
    Sending(good, tiny.samples(), POLICY).write(tmp_path / "sent")
    header = json.loads((tmp_path / "sent/samples.json").read_text())
    assert header["model_sha256"] == str(good.subject.sha256)
    assert header["outputs"] == ["logits"]
    parts = {part["name"]: part for part in header["parts"]}
    assert len(parts) == len(header["parts"])
    for part in parts.values():
        raw, npy = read_inputs(tmp_path / "sent", part)
        assert np.array_equal(raw["input"], npy["input"], equal_nan=True)
        assert len(raw["input"]) == part["size"]
    assert parts["samples"]["batch"] is None
    assert np.array_equal(
        read_inputs(tmp_path / "sent", parts["samples"])[0]["input"], tiny.images()
    )
    sizes = {*POLICY.instruments.probe_batch_sizes, *drawn_batch_sizes(good.subject.sha256, ())}
    assert {f"batch_{size}" for size in POLICY.instruments.probe_batch_sizes} <= set(parts)
    assert all(parts[f"batch_{size}"]["batch"] == size for size in sizes if size < 8)


def make_words() -> nn.Module:
    """Return an embedding: words (n, 5) to logits (n, 3). Only its table limits the word ids."""
    return Layers(lambda m, words: m.table(words).mean(1), table=lambda: nn.Embedding(50, 3))


def test_model_adds_its_probes(tmp_path):
    words = {"words": np.random.default_rng(0).integers(3, 20, (8, 5))}
    model = make_words()
    file = tiny.export(model, tmp_path / "words.onnx", example=words)
    samples = SampleSet.from_arrays(words)
    without_model = Sending(file, samples, POLICY).write(tmp_path / "without")
    with_model = Sending(file, samples, POLICY, model).write(tmp_path / "asked")
    names = [{part.name for part in header.parts} for header in (without_model, with_model)]
    assert names[0] < names[1]
    added = next(part for part in with_model.parts if part.name in names[1] - names[0])
    assert np.load(tmp_path / "asked" / added.inputs[0].npy).max() > 20


def test_fixed_batch_is_written_in_the_header(model, tmp_path):
    file = tiny.export(model, tmp_path / "fixed.onnx", dynamic=False)
    header = Sending(file, tiny.samples(), POLICY).write(tmp_path / "sent")
    assert {part.batch for part in header.parts} == {2}


def test_mismatching_samples_leave_no_files(good, tmp_path):
    mismatching = SampleSet.from_arrays({"input": torch.zeros(4, 5).numpy()})
    with pytest.raises(InputMismatch):
        Sending(good, mismatching, POLICY).write(tmp_path / "sent")
    assert list(tmp_path.iterdir()) == []


SOURCE = RecordingSource.model_validate(consumer.META)


@pytest.fixture(scope="module")
def recorded_folder(tmp_path_factory):
    """A folder with the file, exported samples, and the outputs of the example consumer."""
    folder = tmp_path_factory.mktemp("there")
    good = tiny.export(tiny.net(), folder / "model.onnx")
    policy = tiny.policy()
    Sending(good, tiny.samples(6), policy).write(folder / "sent")
    consumer.run(good.path, folder / "sent", folder / "outputs", batch=4)
    np.save(folder / "images.npy", tiny.images(6))
    header = json.loads((folder / "outputs/outputs.json").read_text())
    (described,) = header["parts"]["samples"]["outputs"]
    logits = np.fromfile(folder / "outputs" / described["file"], "<f4").reshape(6, 7)
    np.save(folder / "logits.npy", logits)
    np.savez(folder / "logits.npz", logits=logits)
    return folder


@pytest.fixture
def subject(recorded_folder):
    return tiny.candidate(recorded_folder / "model.onnx").subject


@pytest.mark.parametrize(("inputs", "outputs"), [
    ("sent", "outputs"),
    ("sent", "logits.npy"),
    ("images.npy", "logits.npy"),
    ("images.npy", "logits.npz"),
])  # fmt: skip
def test_each_form_of_outputs_gives_the_same_recording(
    recorded_folder, subject, tmp_path, inputs, outputs
):
    manifest = Packing(subject, recorded_folder / inputs, recorded_folder / outputs, SOURCE).write(
        tmp_path / "made"
    )
    recording = Recording(tmp_path / "made")
    assert recording.manifest == manifest
    assert np.array_equal(recording.outputs["samples"][0], np.load(recorded_folder / "logits.npy"))
    assert manifest.samples.inputs_sha256 == Digest.parse(
        json.loads((recorded_folder / "sent/samples.json").read_text())["parts"][0]["inputs_sha256"]
    )
    assert (len(manifest.parts) > 10) == (outputs == "outputs")


@pytest.fixture
def outputs(recorded_folder, tmp_path):
    return shutil.copytree(recorded_folder / "outputs", tmp_path / "outputs")


def edit_outputs(outputs, change):
    plain = json.loads((outputs / "outputs.json").read_text())
    change(plain["parts"])
    (outputs / "outputs.json").write_text(json.dumps(plain))


def samples_output(parts):
    return parts["samples"]["outputs"][0]


@pytest.mark.parametrize(("change", "words"), [
    (lambda parts: parts.pop("samples"), "expected 'samples'"),
    (lambda parts: parts.update(batch_999=parts["samples"]), "batch_999"),
    (lambda parts: parts["samples"].update(outputs=[]), "there are 0 outputs of samples"),
    (lambda parts: parts["samples"]["outputs"].append(samples_output(parts)), "are 2 outputs"),
    (lambda parts: samples_output(parts).update(shape=[7, 6]), "shape .7, 6. for 6 samples"),
    (lambda parts: samples_output(parts).update(shape=[6, 8]), "has 168 bytes, float32"),
    (lambda parts: samples_output(parts).update(shape=None), "needs dtype and shape"),
    (lambda parts: samples_output(parts).update(dtype="object"), "needs dtype and shape"),
    (lambda parts: samples_output(parts).update(dtype="nonsense"), "not understood"),
    (lambda parts: samples_output(parts).update(file="../sent/samples/0.raw"), "not a path inside"),
    (lambda parts: samples_output(parts).update(file="gone.raw"), "No such file"),
    (lambda parts: samples_output(parts).update(file="gone.npy"), "cannot read gone.npy"),
    (lambda parts: parts.update(samples={"failed": "out of memory"}), "out of memory"),
    (lambda parts: parts["batch_1"].update(failed="why"), "both outputs and failed"),
])  # fmt: skip
def test_mismatching_outputs_are_refused(
    recorded_folder, subject, outputs, tmp_path, change, words
):
    edit_outputs(outputs, change)
    with pytest.raises(GateError, match=words):
        Packing(subject, recorded_folder / "sent", outputs, SOURCE).write(tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("array", "words"), [
    ({"logits": np.zeros((5, 7), np.float32)}, "for 6 samples"),
    ({"other": np.zeros((6, 7), np.float32)}, "the file has the outputs"),
    ({"logits": np.array(["a"] * 6)}, "dtype"),
])  # fmt: skip
def test_mismatching_arrays_are_refused(recorded_folder, subject, tmp_path, array, words):
    np.savez(tmp_path / "outputs.npz", **array)
    with pytest.raises(GateError, match=words):
        Packing(subject, recorded_folder / "images.npy", tmp_path / "outputs.npz", SOURCE).write(
            tmp_path / "made"
        )


def test_changed_inputs_are_refused(recorded_folder, subject, tmp_path):
    sent = shutil.copytree(recorded_folder / "sent", tmp_path / "sent")
    np.save(sent / "samples/0.npy", -tiny.images(6))
    with pytest.raises(GateError, match="inputs of samples"):
        Packing(subject, sent, recorded_folder / "outputs", SOURCE).write(tmp_path / "made")


@pytest.mark.parametrize("by", ["sent", "meta"])
def test_recording_of_another_file_is_refused(recorded_folder, subject, tmp_path, by):
    other_digest = Digest.from_bytes(b"another")
    source = SOURCE.model_copy(update={"model_sha256": other_digest if by == "meta" else None})
    file = subject if by == "meta" else subject.model_copy(update={"sha256": other_digest})
    with pytest.raises(GateError, match=other_digest.hex):
        Packing(file, recorded_folder / "sent", recorded_folder / "outputs", source).write(
            tmp_path / "made"
        )


@pytest.mark.parametrize(("change", "words"), [
    ({"device": None}, "device"),
    ({"runtime": ""}, "runtime"),
    ({"version": "10\n[31m"}, "version"),
    ({"recorded_at": "yesterday"}, "recorded_at"),
    ({"model_sha256": "sha256:12"}, "model_sha256"),
    ({"notes": "nice"}, "notes"),
])  # fmt: skip
def test_invalid_recording_source_is_refused(tmp_path, change, words):
    (tmp_path / "meta.json").write_text(json.dumps(consumer.META | change))
    with pytest.raises(GateError, match=words):
        read_recording_source(tmp_path / "meta.json")
