"""What comes back is packed only where it is whole and of these inputs."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from gate.distributed.external_runtime import Packing, Sending, read_recording_source
from gate.errors import GateError
from gate.runtimes.recording_format import Recording, RecordingSource
from gate.storage.digest import Digest
from tests.measure import tiny
from tests.runtimes import consumer

WHENCE = RecordingSource.model_validate(consumer.META)


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """The file, what was sent, and what the consumer of the raw files gave back."""
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
def subject(there):
    return tiny.candidate(there / "model.onnx").subject


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ("sent", "outputs"),
        ("sent", "logits.npy"),
        ("images.npy", "logits.npy"),
        ("images.npy", "logits.npz"),
    ],
)
def test_the_ways_to_give_them_agree(there, subject, tmp_path, inputs, outputs):
    made = Packing(subject, there / inputs, there / outputs, WHENCE).write(tmp_path / "made")
    recording = Recording(tmp_path / "made")
    assert recording.manifest == made
    assert np.array_equal(recording.outputs["samples"][0], np.load(there / "logits.npy"))
    assert made.samples.inputs_sha256 == Digest.parse(
        json.loads((there / "sent/samples.json").read_text())["parts"][0]["inputs_sha256"]
    )
    assert (len(made.parts) > 10) == (outputs == "outputs")


@pytest.fixture
def outputs(there, tmp_path):
    return shutil.copytree(there / "outputs", tmp_path / "outputs")


def edited(outputs, change):
    plain = json.loads((outputs / "outputs.json").read_text())
    change(plain["parts"])
    (outputs / "outputs.json").write_text(json.dumps(plain))


def of_samples(parts):
    return parts["samples"]["outputs"][0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda parts: parts.pop("samples"), "expected 'samples'"),
        (lambda parts: parts.update(batch_999=parts["samples"]), "batch_999"),
        (lambda parts: parts["samples"].update(outputs=[]), "there are 0 outputs of samples"),
        (lambda parts: parts["samples"]["outputs"].append(of_samples(parts)), "are 2 outputs"),
        (lambda parts: of_samples(parts).update(shape=[7, 6]), "shape .7, 6. for 6 samples"),
        (lambda parts: of_samples(parts).update(shape=[6, 8]), "has 168 bytes, float32"),
        (lambda parts: of_samples(parts).update(shape=None), "needs dtype and shape"),
        (lambda parts: of_samples(parts).update(dtype="object"), "needs dtype and shape"),
        (lambda parts: of_samples(parts).update(dtype="complex64"), "needs dtype and shape"),
        (lambda parts: of_samples(parts).update(dtype="nonsense"), "not understood"),
        (lambda parts: of_samples(parts).update(file="../sent/samples/0.raw"), "no path inside"),
        (lambda parts: of_samples(parts).update(file="gone.raw"), "No such file"),
        (lambda parts: of_samples(parts).update(file="gone.npy"), "cannot read gone.npy"),
        (lambda parts: parts.update(samples={"failed": "out of memory"}), "out of memory"),
        (lambda parts: parts["batch_1"].update(failed="why"), "outputs, and why it failed"),
    ],
)
def test_what_does_not_fit_is_not_packed(there, subject, outputs, tmp_path, change, words):
    edited(outputs, change)
    with pytest.raises(GateError, match=words):
        Packing(subject, there / "sent", outputs, WHENCE).write(tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("array", "words"),
    [
        ({"logits": np.zeros((5, 7), np.float32)}, "for 6 samples"),
        ({"other": np.zeros((6, 7), np.float32)}, "the file has the outputs"),
        ({"logits": np.array(["a"] * 6)}, "dtype"),
    ],
)
def test_arrays_that_do_not_fit(there, subject, tmp_path, array, words):
    np.savez(tmp_path / "outputs.npz", **array)
    with pytest.raises(GateError, match=words):
        Packing(subject, there / "images.npy", tmp_path / "outputs.npz", WHENCE).write(
            tmp_path / "made"
        )


def test_inputs_that_were_changed_after_they_were_sent(there, subject, tmp_path):
    sent = shutil.copytree(there / "sent", tmp_path / "sent")
    np.save(sent / "samples/0.npy", -tiny.images(6))
    with pytest.raises(GateError, match="inputs of samples"):
        Packing(subject, sent, there / "outputs", WHENCE).write(tmp_path / "made")


@pytest.mark.parametrize("by", ["sent", "meta"])
def test_another_file_than_the_one_that_ran(there, subject, tmp_path, by):
    other = Digest.of_bytes(b"another")
    whence = WHENCE.model_copy(update={"model_sha256": other if by == "meta" else None})
    file = subject if by == "meta" else subject.model_copy(update={"sha256": other})
    with pytest.raises(GateError, match=other.hex):
        Packing(file, there / "sent", there / "outputs", whence).write(tmp_path / "made")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": None}, "device"),
        ({"runtime": ""}, "runtime"),
        ({"version": "10\n[31m"}, "version"),
        ({"recorded_at": "yesterday"}, "recorded_at"),
        ({"model_sha256": "sha256:12"}, "model_sha256"),
        ({"notes": "nice"}, "notes"),
    ],
)
def test_what_meta_json_has_to_say(tmp_path, change, words):
    (tmp_path / "meta.json").write_text(json.dumps(consumer.META | change))
    with pytest.raises(GateError, match=words):
        read_recording_source(tmp_path / "meta.json")


def test_nothing_is_overwritten(there, subject, tmp_path):
    with pytest.raises(GateError, match="there already"):
        Packing(subject, there / "sent", there / "outputs", WHENCE).write(tmp_path)
