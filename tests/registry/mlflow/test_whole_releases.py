"""Models of several files as people ship them, on a real MLflow server: exported, judged, promoted,
deployed and rolled back as one, with a twin or without."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from mlflow.exceptions import MlflowException

from gate import cli
from gate.deploy.store import EXACT, QUANTIZED, ModelStore, Slot
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.records.evidence import Evidence
from gate.registry.interface import CHAMPION
from gate.storage.digest import Digest
from tests.exhaustive import exhaustive
from tests.multi_file import tiny, towers
from tests.multi_file.exports import export
from tests.registry.servers import Server
from tests.reused_charts import reused_charts

__all__ = ["reused_charts"]
pytestmark = [
    pytest.mark.proof,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
]
COUNT = 12
QUICK = (
    "task: auto\ninstruments: {probes: false, search_inputs: 0}\n"
    "runtimes: {ort-cpu: {required: always, bounds: {max_abs_diff: 0.001, top1_agreement: 0.9}}}\n"
)
"""What the seam does, one runtime shows."""
TWIN = """precision: quantized
task: tensors
instruments: {noise_samples: 0, stability_samples: 0, probes: false, search_inputs: 0}
runtimes: {ort-cpu-optimized: {required: always, bounds: {scaled_diff: 0.3}}}
"""
TWINNED = (
    """task: tensors
instruments: {probes: false, search_inputs: 0}
runtimes: {ort-cpu: {required: always, bounds: {max_abs_diff: 0.001}}}
twin:
  """
    + TWIN.strip().replace("\n", "\n  ")
    + "\n"
)
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def place(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, reused_charts: None
) -> Path:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.yaml").write_text(QUICK)
    return tmp_path


def detector(folder: Path, opset: int) -> tuple[str, str, dict[str, str]]:
    model = tiny.build()
    assert isinstance(model, tiny.Detector)
    export(model.encoder, folder / "encoder.onnx", torch.zeros(2, 2, 5, 5), opset=opset)
    export(model.head, folder / "head.onnx", torch.zeros(2, 4), opset=opset)
    np.savez(folder / "x.npz", input=_noise(COUNT, 2, 5, 5))
    return "tiny:run", "tiny:build", {"encoder": "encoder.onnx", "head": "head.onnx"}


def clip(folder: Path, opset: int) -> tuple[str, str, dict[str, str]]:
    model, rng = towers.towers(), np.random.default_rng(0)
    tokens = np.concatenate([rng.integers(1, 31, (COUNT, 5)), np.full((COUNT, 1), 31)], axis=1)
    np.savez(folder / "x.npz", pixels=_noise(COUNT, 3, 8, 8), tokens=tokens)
    export(model.image, folder / "image.onnx", torch.zeros(2, 3, 8, 8), opset=opset)
    export(model.text, folder / "text.onnx", torch.from_numpy(tokens[:2]), opset=opset)
    return "towers:match", "towers:towers", {"image": "image.onnx", "text": "text.onnx"}


def translator(folder: Path, opset: int) -> tuple[str, str, dict[str, str]]:
    model = towers.translator()
    np.savez(folder / "x.npz", source=_noise(COUNT, 5, 8))
    export(model.encoder, folder / "encoder.onnx", torch.zeros(2, 5, 8), opset=opset)
    tokens, memory = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 5, 8)
    export(model.decoder, folder / "decoder.onnx", tokens, memory, grows="in_0", opset=opset)
    files = {"encoder": "encoder.onnx", "decoder": "decoder.onnx"}
    return "towers:translate", "towers:translator", files


def _noise(*shape: int) -> Any:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def made(folder: Path, make: Callable[[Path, int], Any], opset: int = 17) -> tuple[Path, str]:
    """The release file, and what builds its model."""
    folder.mkdir()
    chain, factory, files = make(folder, opset)
    return written(folder, chain, files), f"tests.multi_file.{factory}"


def written(folder: Path, chain: str, files: dict[str, str]) -> Path:
    path = folder / "release.yaml"
    lines = [f"  {name}: {{file: {file}}}" for name, file in files.items()]
    path.write_text("\n".join([f"chain: tests.multi_file.{chain}", "parts:", *lines, ""]))
    return path


def judged(release: Path, factory: str, policy: str = "policy.yaml") -> int:
    inputs, report = str(release.with_name("x.npz")), str(release.with_name("report"))
    options = ["--reference", factory, "--inputs", inputs, "--report", report, "--overwrite"]
    options += ["--batch-size", "4", "--policy", policy]
    return cli.main(["check", str(release), *options])


def promoted(release: Path, name: str, capsys: Capture, *more: str) -> tuple[int, dict[str, Any]]:
    options = ["--name", name, "--report", str(release.with_name("report")), "--json", *more]
    capsys.readouterr()
    code = cli.main(["promote", str(release), *options])
    return code, json.loads(capsys.readouterr().out)


def look(name: str) -> Mapping[str, Slot]:
    """What the service does after an event; what serves then."""
    assert cli.main(["reconcile", name, "--store", "store", "--policy", "policy.yaml"]) == 0
    live = ModelStore(Path("store")).live(name)
    assert live is not None
    return live.slots


@pytest.mark.parametrize(
    "make", [detector, *(pytest.param(more, marks=exhaustive) for more in (clip, translator))]
)
def test_it_goes_the_whole_way_and_back_as_one(
    place: Path, server: Server, capsys: Capture, make: Callable[[Path, int], Any]
) -> None:
    name, seen = f"parts-{make.__name__}", []
    for number, opset in enumerate((17, 16), start=1):
        release, factory = made(place / f"release-{number}", make, opset)
        assert judged(release, factory) == 0, capsys.readouterr()
        code, told = promoted(release, name, capsys)
        assert (code, told["outcome"], told["version"]) == (0, "promoted", str(number)), told
        slot = look(name)[EXACT]
        assert str(slot.sha256) == told["digest"]
        assert len(slot.parts) == 2
        for file in slot.parts.values():
            assert file.sha256 == Digest.of_file(release.parent / file.name)
        seen.append(slot)
        golden = ModelStore(Path("store")).content(slot.golden_sha256)  # type: ignore[arg-type]
        served = (ModelStore(Path("store")).live_link(name) / "exact").resolve() / "release.yaml"
        assert cli.main(["verify-release", str(served), "--golden", str(golden)]) == 0
    lines = [e.action for e in Ledger(Path(".gate/state.db")).entries() if e.model == name]
    assert lines.count("promoted") == 2
    assert cli.main(["rollback", name, "--yes", "--reason", "a test"]) == 0
    assert look(name)[EXACT] == seen[0]
    registry = MlflowRegistry(server.uri)
    assert registry.alias(name, CHAMPION) == "1"
    _not_loaded(f"models:/{name}/1")
    (place / "back").mkdir()
    back = registry.download(name, "2", place / "back")
    assert back.name == "release.yaml"
    assert (
        Digest.of_manifest(
            back.parent, ("release.yaml", *(file.name for file in seen[1].external_data))
        )
        == seen[1].sha256
    )


def _not_loaded(uri: str) -> None:
    """By MLflow itself, which can't run the chain."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of MLflow, about itself
        with pytest.raises(MlflowException, match="flavor"):
            mlflow.pyfunc.load_model(uri)


@exhaustive
def test_a_release_and_its_twin_go_the_whole_way_and_back_as_one(
    place: Path, capsys: Capture
) -> None:
    Path("policy.yaml").write_text(TWINNED)
    Path("twin.yaml").write_text(TWIN)
    seen: list[dict[str, Digest]] = []
    for number, opset in enumerate((17, 16), start=1):
        release, factory = made(place / f"release-{number}", detector, opset)
        assert judged(release, factory) == 0
        twin = release.parent / "twin" / release.name
        asked = ["--reference", factory, "--calibration", str(release.with_name("x.npz"))]
        assert cli.main(["quantize", str(release), *asked, "--output", str(twin)]) == 0
        shutil.copy(release.with_name("x.npz"), twin.parent)
        assert judged(twin, factory, policy="twin.yaml") == 0, capsys.readouterr()
        more = ["--policy", "policy.yaml", "--twin", str(twin)]
        more += ["--twin-report", str(twin.with_name("report"))]
        code, told = promoted(release, "twins", capsys, *more)
        assert (code, told["outcome"], told["version"]) == (0, "promoted", str(number)), told
        seen.append({label: slot.sha256 for label, slot in look("twins").items()})
        its = Evidence.load(twin.with_name("report") / "evidence.json").subject.sha256
        assert seen[-1] == {EXACT: Digest.parse(told["digest"].split(":")[1]), QUANTIZED: its}
    assert cli.main(["rollback", "twins", "--yes", "--reason", "a test"]) == 0
    assert {label: slot.sha256 for label, slot in look("twins").items()} == seen[0]
    files = ["--file", str(release), "--golden", str(release.with_name("report") / "golden")]
    files += ["--twin", str(twin), "--twin-golden", str(twin.with_name("report") / "golden")]
    assert cli.main(["deploy", "by-hand", "--store", "store", *files]) == 0
    live = ModelStore(Path("store")).live("by-hand")
    assert live is not None
    assert {label: slot.sha256 for label, slot in live.slots.items()} == seen[1]
    single = ["--file", str(release), "--twin", str(twin.with_name("head.onnx"))]
    assert cli.main(["deploy", "by-hand", "--store", "store", *single]) == 1
