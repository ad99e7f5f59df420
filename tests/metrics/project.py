"""A text classifier with labels, slices, a custom metric, and a file that fails in one slice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from gate.policy.policy import Policy
from tests.measure import tiny

MODULE = '''
import torch
from torch import nn


class Text(nn.Module):
    """Two classes of texts of eight token ids; tokens from 16 on are of a language of their own."""

    def __init__(self):
        super().__init__()
        table = torch.zeros(32, 2)
        table[:16, 0] = torch.linspace(-1, 1, 16) + 0.013
        table[16:, 1] = torch.linspace(-1, 1, 16) + 0.013
        self.embed = nn.Embedding.from_pretrained(table)
        self.head = nn.Linear(2, 2, bias=False)
        self.head.weight = nn.Parameter(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))

    def forward(self, ids):
        return self.head(self.embed(ids).mean(dim=1))


def build():
    return Text().eval()
'''

METRICS = '''
import os
import time

import numpy as np


def miss(outputs, labels):
    return 1.0 - hit(outputs, labels)


def hit(outputs, labels):
    return (outputs.argmax(axis=1) == np.asarray(labels)).astype(float)


def margin(outputs, labels, *, power=1):
    own = np.take_along_axis(outputs, np.asarray(labels)[:, None], axis=1)[:, 0]
    return (own - outputs.mean(axis=1)) ** power


def raises(outputs, labels):
    if np.isclose(outputs, MARKED).all(axis=1).any():
        raise KeyError("no such class")
    return hit(outputs, labels)


def is_nan(outputs, labels):
    return np.where(np.arange(len(outputs)) == 3, np.nan, 1.0)


def short(outputs, labels):
    return 0.5


def sleeps(outputs, labels):
    time.sleep(60)


def eats(outputs, labels):
    memory = [np.ones(10_000_000) for _ in range(100)]
    time.sleep(60)


def leaves(outputs, labels):
    os._exit(3)


class Counts:
    """F1 of class 1 by sums of counts."""

    def update(self, outputs, labels):
        found, labels = outputs.argmax(axis=1), np.asarray(labels)
        return np.stack([(found == 1) & (labels == 1), found == 1, labels == 1], axis=1)

    def compute(self, sums):
        return 2 * sums[0] / (sums[1] + sums[2])
'''

POLICY = """
task: tensors
instruments: {noise_samples: 0, stability_samples: 0, probes: false, search_inputs: 0, graph: false}
waive: [noise_ratio]
runtimes:
  ort-cpu: {required: always, bounds: {max_abs_diff: 100.0}}
metrics:
"""


class Project:
    """The project's files in the current folder."""

    def __init__(self, folder: Path, *, samples: int = 600) -> None:
        self.folder = folder
        (folder / "textnet.py").write_text(MODULE)
        (folder / "mymetrics.py").write_text(METRICS)
        rng = np.random.default_rng(0)
        self.foreign = rng.random(samples) < 0.25
        ids = rng.integers(0, 16, (samples, 8)) + np.where(self.foreign, 16, 0)[:, None]
        np.save(folder / "ids.npy", ids)
        sys.modules.pop("textnet", None)
        sys.path.insert(0, str(folder))
        import textnet

        sys.path.remove(str(folder))
        model = textnet.build()
        outputs = model(torch.tensor(ids)).detach().numpy()
        labels = outputs.argmax(axis=1)
        self.outputs = outputs
        with (folder / "labels.jsonl").open("w") as stream:
            for label, foreign in zip(labels.tolist(), self.foreign.tolist(), strict=True):
                row = {"label": label, "language": "b" if foreign else "a", "long": label == 1}
                stream.write(json.dumps(row) + "\n")
        tiny.export(model, folder / "model.onnx", example={"input": ids[:4]})
        self._alter(lambda table: np.where(np.arange(32)[:, None] >= 16, -0.01 * table, table))

    def _alter(self, change) -> None:
        """Write a file with different outputs for texts in language b."""
        model = onnx.load(self.folder / "model.onnx")
        for tensor in model.graph.initializer:
            table = numpy_helper.to_array(tensor)
            if table.shape == (32, 2):
                created = change(table).astype(np.float32)
                tensor.CopyFrom(numpy_helper.from_array(created, tensor.name))
        onnx.save(model, self.folder / "worse.onnx")

    def policy(self, *metrics: str, more: str = "") -> Path:
        path = self.folder / "policy.yaml"
        path.write_text(POLICY + "".join(f"  - {{{metric}}}\n" for metric in metrics) + more)
        Policy.from_file(path)
        return path


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    return Project(tmp_path)
