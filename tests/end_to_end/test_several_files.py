"""Models of several files from the export to the rollback, by the commands of a user: each is
exported, judged, promoted, deployed and taken back as one, and refused with the name of its part."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn

from gate import cli
from gate.deploy.store import EXACT, Manifest
from gate.model.loading import build_model
from gate.multi_file.chain_model import CallRecorder, ChainModel
from gate.storage.digest import Digest
from tests.exhaustive import exhaustive, some
from tests.registry.servers import empty_database

pytestmark = [
    pytest.mark.proof,
    # SQLAlchemy, about MLflow's own tables.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
]
COUNT = 8
POLICY = (
    "task: tensors\ninstruments: {probes: false, search_inputs: 0, stability_samples: 0}\n"
    "runtimes: {ort-cpu: {required: always, bounds: {max_abs_diff: 1.0e-4, noise_ratio: 2.0}}}\n"
)


def _points(rng: np.random.Generator) -> dict[str, Any]:
    return {"points": rng.normal(size=(COUNT, 10, 4)).astype(np.float32)}


def _sentences(rng: np.random.Generator) -> dict[str, Any]:
    return {"source": rng.integers(3, 24, (COUNT, 5))}


def _pairs(rng: np.random.Generator) -> dict[str, Any]:
    tokens = np.concatenate([rng.integers(1, 31, (COUNT, 5)), np.full((COUNT, 1), 31)], axis=1)
    return {"pixels": rng.normal(size=(COUNT, 3, 8, 8)).astype(np.float32), "tokens": tokens}


@dataclass(frozen=True)
class Kind:
    """A model and its parts in the order of the chain."""

    factory: str
    chain: str
    parts: tuple[str, str]
    samples: Callable[[np.random.Generator], Mapping[str, Any]]
    dynamic: tuple[str, ...] = ()
    """Of the second part."""


KINDS = {
    "detector": Kind(
        "tests.multi_file.voxels:detector", "tests.multi_file.voxels:detect", ("encoder", "head"), _points
    ),
    "transformer": Kind(
        "tests.multi_file.voxels:bart", "tests.multi_file.voxels:translate", ("encoder", "decoder"),
        _sentences, ("--dynamic", "tokens:1=steps"),
    ),
    "towers": Kind(
        "tests.multi_file.towers:towers", "tests.multi_file.towers:match", ("image", "text"), _pairs
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A folder with samples, and for each training a checkpoint and a release."""

    folder: Path
    kind: Kind

    def train(self, name: str, *, factor: float) -> None:
        """Another training is another number in each part."""
        model = build_model(self.kind.factory)
        with torch.no_grad():
            for part in self.kind.parts:
                matrices = [p for p in model.get_submodule(part).parameters() if p.dim() > 1]
                matrices[-1].view(-1)[:2] *= factor
        torch.save(model.state_dict(), self.folder / f"{name}.pt")

    def reference(self, name: str) -> list[str]:
        return ["--reference", self.kind.factory, "--checkpoint", str(self.folder / f"{name}.pt")]

    def export(self, name: str, model: nn.Module) -> None:
        """Each part, on what the chain gives it."""
        with np.load(self.folder / "x.npz") as samples:
            rows = dict(samples)
        kind, calls = self.kind, CallRecorder()
        named = {part: part for part in kind.parts}
        chain = ChainModel.from_model(model, chain=kind.chain, references=named, inputs=tuple(rows))
        calls.record(chain, rows)
        for part in kind.parts:
            example = self.folder / f"{part}.npz"
            np.savez(example, **calls.of(part).named_example)
            dynamic = kind.dynamic if part == kind.parts[1] else ()
            code = cli.main(
                ["export", kind.factory, "--checkpoint", str(self.folder / f"{name}.pt"),
                 "--submodule", part, "--example-input", str(example), "--strategy", "traced",
                 "--no-lint", *dynamic, "--output", str(self.folder / name / f"{part}.onnx")]
            )  # fmt: skip
            assert code == 0

    def check(self, name: str, *, by: str, report: str | None = None) -> int:
        """The files of one folder against the model of one training."""
        parts = [f"--part={part}={self.folder / name / part}.onnx" for part in self.kind.parts]
        asked = ["--inputs", str(self.folder / "x.npz"), "--policy", str(self.folder / "p.yaml")]
        to = ["--report", str(self.folder / report)] if report else []
        chain = ["--chain", self.kind.chain]
        return cli.main(["check", *parts, *chain, *self.reference(by), *asked, *to])

    def digests(self, name: str) -> dict[str, Digest]:
        return {p: Digest.of_file(self.folder / name / f"{p}.onnx") for p in self.kind.parts}

    def live(self) -> dict[str, Digest]:
        """Of the parts that serve."""
        text = (self.folder / "store/live/model/manifest.json").read_bytes()
        slot = Manifest.from_json(text).slots[EXACT]
        return {part: file.sha256 for part, file in slot.parts.items()}


@pytest.fixture(params=some(KINDS, 3))
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    made = Place(tmp_path, KINDS[request.param])
    empty_database(tmp_path / "mlflow.db")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("DVC_EXP_NAME", raising=False)
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "x.npz", **made.kind.samples(np.random.default_rng(0)))
    (tmp_path / "p.yaml").write_text(POLICY)
    for name, factor in (("yesterday", 1.0), ("today", 1.5)):
        made.train(name, factor=factor)
        model = build_model(made.kind.factory)
        model.load_state_dict(torch.load(tmp_path / f"{name}.pt"))
        (tmp_path / name).mkdir()
        made.export(name, model)
    return made


@exhaustive
def test_several_files_live_as_one(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("yesterday", "today"):
        release, report = f"{name}/release.yaml", f"{name}-report"
        assert place.check(name, by=name, report=report) == 0, capsys.readouterr()
        assert cli.main(["promote", release, "--name", "model", "--report", report]) == 0
        golden = ["--golden", f"{report}/golden"]
        assert cli.main(["deploy", "model", "--store", "store", "--file", release, *golden]) == 0
        assert place.live() == place.digests(name)
    capsys.readouterr()
    assert cli.main(["history", "--model", "model", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["entries"]
    assert [(line["action"], line["version"]) for line in lines] == [
        ("promoted", "1"), ("promoted", "2"),
    ]  # fmt: skip
    assert cli.main(["rollback", "model", "--yes"]) == 0
    assert cli.main(["deploy", "model", "--store", "store", "--rollback"]) == 0
    assert place.live() == place.digests("yesterday")
    # What was judged as one is promoted as one: a part of another training makes it another.
    second = place.kind.parts[1]
    shutil.copy(f"yesterday/{second}.onnx", f"today/{second}.onnx")
    capsys.readouterr()
    assert cli.main(
        ["promote", "today/release.yaml", "--name", "model", "--report", "today-report"]
    ) == 2  # fmt: skip
    assert f"the part {second} " in capsys.readouterr().err
    assert place.live() == place.digests("yesterday")


def _of_yesterday(place: Place) -> str:
    second = place.kind.parts[1]
    shutil.copy(f"yesterday/{second}.onnx", f"today/{second}.onnx")
    return second


def _swapped(place: Place) -> str:
    first, second = (Path(f"today/{part}.onnx") for part in place.kind.parts)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    return place.kind.parts[0]


def _transposed(place: Place) -> str:
    """The last two axes of what the first part gives; of a tower the only two."""
    first = place.kind.parts[0]
    path = Path(f"today/{first}.onnx")
    model = onnx.load(path)
    (output,) = model.graph.output
    shape = output.type.tensor_type.shape.dim
    order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["before" if name == output.name else name for name in names]
    model.graph.node.append(helper.make_node("Transpose", ["before"], [output.name], perm=order))
    turned = [type(shape[at])() for at in order]
    for axis, at in zip(turned, order, strict=True):
        axis.CopyFrom(shape[at])
    del shape[:]
    shape.extend(turned)
    onnx.save(model, path)
    return first


@pytest.mark.rows(3)
@pytest.mark.parametrize("spoil", [_of_yesterday, _swapped, _transposed])
def test_what_does_not_belong_together_is_refused_by_its_name(
    place: Place, capsys: pytest.CaptureFixture[str], spoil: Callable[[Place], str]
) -> None:
    part = spoil(place)
    capsys.readouterr()
    code = place.check("today", by="today")
    printed = capsys.readouterr()
    told = " ".join((printed.out + printed.err).split())
    assert code in (1, 2)
    assert f"the part {part}" in told.partition("try ")[0], told
    assert "Traceback" not in told
