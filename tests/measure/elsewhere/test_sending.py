"""What is sent can be read by whoever knows the header alone, and is what the gate will ask for."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from gate.data.samples import SampleSet
from gate.distributed.external_runtime import Sending
from gate.errors import InputMismatch, StorageError
from gate.policy.sections import Instruments
from gate.records.instruments import drawn_batch_sizes
from tests.measure import tiny

POLICY = tiny.policy(
    instruments=Instruments(noise_samples=0, stability_samples=0, search_inputs=0, graph=False)
)


def read(folder, part):
    """The inputs of a part twice: from the raw files, and from the .npy ones."""
    raw, npy = {}, {}
    for each in part["inputs"]:
        dtype = np.dtype(each["dtype"]).newbyteorder("<")
        flat = np.frombuffer((folder / each["raw"]).read_bytes(), dtype)
        raw[each["name"]] = flat.reshape(each["shape"])
        npy[each["name"]] = np.load(folder / each["npy"])
    return raw, npy


def test_samples_and_probes_are_written_twice_alike(good, tmp_path):
    Sending(good, tiny.samples(), POLICY).write(tmp_path / "sent")
    header = json.loads((tmp_path / "sent/samples.json").read_text())
    assert header["model_sha256"] == str(good.subject.sha256)
    assert header["outputs"] == ["logits"]
    parts = {part["name"]: part for part in header["parts"]}
    assert len(parts) == len(header["parts"])
    for part in parts.values():
        raw, npy = read(tmp_path / "sent", part)
        assert np.array_equal(raw["input"], npy["input"], equal_nan=True)
        assert len(raw["input"]) == part["size"]
    assert parts["samples"]["batch"] is None
    assert np.array_equal(read(tmp_path / "sent", parts["samples"])[0]["input"], tiny.images())
    sizes = {*POLICY.instruments.probe_batch_sizes, *drawn_batch_sizes(good.subject.sha256, ())}
    assert {f"batch_{size}" for size in POLICY.instruments.probe_batch_sizes} <= set(parts)
    assert all(parts[f"batch_{size}"]["batch"] == size for size in sizes if size < 8)


class Words(nn.Module):
    """Words (n, 5) to logits (n, 3); which words there are, only its table says."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 3)

    def forward(self, words):
        return self.table(words).mean(1)


def test_the_model_adds_the_probes_that_it_is_asked_about(tmp_path):
    words = {"words": np.random.default_rng(0).integers(3, 20, (8, 5))}
    model = Words()
    file = tiny.export(model, tmp_path / "words.onnx", example=words)
    samples = SampleSet.from_arrays(words)
    without = Sending(file, samples, POLICY).write(tmp_path / "without")
    asked = Sending(file, samples, POLICY, model).write(tmp_path / "asked")
    names = [{part.name for part in header.parts} for header in (without, asked)]
    assert names[0] < names[1]
    more = next(part for part in asked.parts if part.name in names[1] - names[0])
    assert np.load(tmp_path / "asked" / more.inputs[0].npy).max() > 20


def test_several_inputs_go_by_the_names_of_the_file(tmp_path):
    arrays = {
        "left": np.arange(24, dtype=np.float32).reshape(6, 4),
        "right": np.ones((6, 4), np.float32),
    }
    model = tiny.TwoInputs()
    names = ("sum", "more.0", "more.1")
    file = tiny.export(model, tmp_path / "two.onnx", example=arrays, outputs=names)
    header = Sending(file, SampleSet.from_arrays(arrays), POLICY, model).write(tmp_path / "sent")
    assert header.outputs == names
    part = json.loads(header.parts[0].to_json())
    raw, _ = read(tmp_path / "sent", part)
    assert {name: array.tolist() for name, array in raw.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


def test_a_fixed_batch_is_said(model, tmp_path):
    file = tiny.export(model, tmp_path / "fixed.onnx", dynamic=False)
    header = Sending(file, tiny.samples(), POLICY).write(tmp_path / "sent")
    assert {part.batch for part in header.parts} == {2}


def test_without_probes_only_the_samples_are_written(good, tmp_path):
    policy = tiny.policy(instruments=Instruments.none())
    assert len(Sending(good, tiny.samples(), policy).write(tmp_path / "sent").parts) == 1


def test_a_folder_that_is_there_is_not_written_into(good, tmp_path):
    with pytest.raises(StorageError, match="there already"):
        Sending(good, tiny.samples(), POLICY).write(tmp_path)


def test_samples_that_do_not_fit_leave_nothing(good, tmp_path):
    other = SampleSet.from_arrays({"input": torch.zeros(4, 5).numpy()})
    with pytest.raises(InputMismatch):
        Sending(good, other, POLICY).write(tmp_path / "sent")
    assert list(tmp_path.iterdir()) == []
