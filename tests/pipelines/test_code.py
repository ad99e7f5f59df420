"""The stage `code` links the model's source files for DVC."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gate import Digest, Evidence
from gate.errors import ModelError
from gate.model.source_code import changed_files
from gate.records.evidence import ModelCode
from pipelines import code, paths, promote, signing
from pipelines.override import override
from pipelines.promotion_report import PromotionReport
from tests.pipelines.conftest import ONNX

MODEL = "from torch import nn\nfrom own_parts import WIDTH\n\n\ndef build():\n    return nn.Linear(WIDTH, 2)\n"


@pytest.fixture
def custom_model(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with the user's model in two files."""
    monkeypatch.setattr(sys, "path", [str(project), *sys.path])
    Path("own_model.py").write_text(MODEL)
    Path("own_parts.py").write_text("WIDTH = 3\n")
    override(["model.factory=own_model:build"])
    yield project
    for name in ("own_model", "own_parts"):
        sys.modules.pop(name, None)


def test_each_source_file_gets_a_link(custom_model: Path) -> None:
    assert code.main() == 0
    links = sorted(p.name for p in paths.CODE.glob("*.py"))
    assert links == ["own_model.py", "own_parts.py"]
    for name in links:
        link = paths.CODE / name
        assert not link.readlink().is_absolute()  # the link is valid after the project is moved
        assert link.resolve() == (custom_model / name).resolve()
    record = ModelCode.load(paths.CODE / code.RECORD)
    assert set(record.files) == {"own_model", "own_parts"}
    assert set(record.packages) == {"torch"}


def test_links_of_unused_files_are_removed(custom_model: Path) -> None:
    assert code.main() == 0
    Path("own_model.py").write_text(MODEL.replace("from own_parts import WIDTH", "WIDTH = 3"))
    sys.modules.pop("own_model")
    assert code.main() == 0
    assert [p.name for p in paths.CODE.glob("*.py")] == ["own_model.py"]


def test_architecture_records_packages_only(project: Path) -> None:
    override(["model.factory=null", "model.architecture=resnet18"])
    assert code.main() == 0
    assert [p.name for p in paths.CODE.iterdir()] == [code.RECORD]
    assert set(ModelCode.load(paths.CODE / code.RECORD).packages) == {"torch", "torchvision"}


def test_file_outside_the_project_is_linked(project: Path) -> None:
    assert code.main() == 0
    link = paths.CODE / "tests.pipelines.tiny.py"
    assert link.readlink().is_absolute()
    assert "def network" in link.read_text()


def test_unreadable_source_is_reported(
    custom_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("own_model.py").write_text(
        MODEL.replace("return", "kind = type('Kind', (nn.Linear,), {'__module__': 'gone'})\n    return")
        .replace("nn.Linear(W", "kind(W")
    )  # fmt: skip
    assert code.main() == 0
    assert "not read, so changes are not noticed: gone" in capsys.readouterr().out


def test_missing_factory_is_an_error_and_keeps_the_links(custom_model: Path) -> None:
    code.main()
    override(["model.factory=own_models:build"])
    with pytest.raises(ModelError, match="own_models"):
        code.main()
    assert (paths.CODE / "own_model.py").exists()


def test_refresh_without_changes_writes_nothing(custom_model: Path) -> None:
    code.refresh()  # before the first run
    assert not paths.CODE.exists()
    code.main()
    before = {p: p.lstat().st_mtime_ns for p in paths.CODE.iterdir()}
    code.refresh()
    assert {p: p.lstat().st_mtime_ns for p in paths.CODE.iterdir()} == before


def test_refresh_updates_versions_and_removes_dead_links(custom_model: Path) -> None:
    code.main()
    record = paths.CODE / code.RECORD
    plain = json.loads(record.read_text())
    real = plain["packages"]["torch"]
    plain["packages"] |= {"torch": "0.1", "no-such-distribution": "1.0"}
    record.write_text(json.dumps(plain))
    Path("own_parts.py").unlink()
    code.refresh()
    packages = ModelCode.load(record).packages
    assert packages == {"torch": real, "no-such-distribution": "none"}
    assert sorted(p.name for p in paths.CODE.glob("*.py")) == ["own_model.py"]
    record.write_text("{")
    code.refresh()  # DVC detects the change and runs the stage
    assert record.read_text() == "{"


@pytest.mark.proof
def test_evidence_measured_before_an_edit_is_refused(measured: Path) -> None:
    evidence = Evidence.load(paths.EVIDENCE)
    assert evidence.source.code is not None
    assert set(evidence.source.code.files) == {"tests.pipelines.tiny"}
    assert evidence.export is not None
    assert evidence.export.code == evidence.source.code
    assert changed_files(evidence.source.code) == ()
    old = {"tests.pipelines.tiny": Digest.from_bytes(b"nn.ReLU()")}
    edited = evidence.source.model_copy(
        update={"code": evidence.source.code.model_copy(update={"files": old})}
    )
    earlier = evidence.model_copy(update={"source": edited})
    earlier.save(paths.EVIDENCE)
    golden = json.loads((paths.GOLDEN / "golden.json").read_text())
    assert edited.code is not None
    golden["origin"]["code_sha256"] = str(edited.code.digest())
    (paths.GOLDEN / "golden.json").write_text(json.dumps(golden))
    vectors = Digest.from_file(paths.GOLDEN / "golden.json")
    who = signing.signatory()
    signing.write_measured(paths.EVIDENCE_STATEMENT, who, ONNX, earlier, golden=vectors)
    assert promote.main() == 1
    report = PromotionReport.load(paths.PROMOTION)
    assert report.outcome == "refused"
    assert "changed since it was measured: tests.pipelines.tiny" in report.reason
