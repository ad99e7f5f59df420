"""Of a release, the part that diverges first is looked into, and the seam is told from the parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gate import cli
from gate.api import case_of
from gate.errors import PolicyError
from gate.localize.locate_part import locate_part
from gate.measure.job import EvaluationData, Reference
from gate.multi_file.release import MultiFileRelease
from gate.policy.policy import Policy
from gate.records.localization import Localization
from gate.records.runtime import RuntimeName
from tests.multi_file import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("parts")
    tiny.exported(place)
    return place


def located(
    folder: Path, *, chain: str = "run", runtime: RuntimeName = "ort-cpu", **files: str
) -> Localization:
    path = tiny.release(folder, **files)
    path.write_text(path.read_text().replace("tiny:run", f"tiny:{chain}"))
    case = case_of(
        path,
        reference=Reference.from_factory(
            f"tests.multi_file.tiny:build{'_scaled' if chain != 'run' else ''}"
        ),
        data=EvaluationData.open(folder / "x.npy", batch_size=8),
        policy=Policy.default(task="tensors"),
    )
    assert isinstance(case.chained, MultiFileRelease)
    return locate_part(case, case.chained, runtime=runtime, limit=4)


def test_right_parts_diverge_nowhere(folder: Path) -> None:
    found = located(folder, encoder="encoder.onnx", head="head.onnx")
    assert not found.diverges
    assert (found.part, found.seam, found.layers) == (None, None, ())
    assert [one["code"] for one in found.outcome] == ["no_part", "parts_fit"]


def test_the_part_of_yesterday_is_looked_into(folder: Path) -> None:
    found = located(folder, encoder="encoder.onnx", head="yesterday.onnx")
    assert found.diverges
    assert (found.part, found.seam) == ("head", None)
    assert found.layers


def test_a_seam_is_to_blame_where_every_part_is_right(folder: Path) -> None:
    """The module takes any dtype, its file one."""
    found = located(folder, chain="run_in_double", encoder="encoder.onnx", head="head.onnx")
    assert found.part is None
    assert found.diverges
    assert "at the seam before the part head: the chain passes float64" in str(found.seam)
    assert "The fault is between the parts: at the seam" in found.cause


def test_code_that_breaks_between_right_parts_is_the_seam(folder: Path) -> None:
    found = located(folder, chain="run_with_attributes", encoder="encoder.onnx", head="head.onnx")
    assert found.part is None
    assert "the chain fails on the outputs of the files: AttributeError" in str(found.seam)


def test_a_runtime_that_nobody_names_is_refused(folder: Path) -> None:
    with pytest.raises(PolicyError, match="names no runtime tract"):
        located(folder, runtime="tract", encoder="encoder.onnx", head="head.onnx")


def test_the_command_names_part_and_layer(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny.release(folder, encoder="encoder.onnx", head="yesterday.onnx")
    arguments = ["locate", str(path), "--reference", "tests.multi_file.tiny:build"]
    arguments += ["--inputs", str(folder / "x.npy")]
    marked = tmp_path / "marked.onnx"
    assert cli.main([*arguments, "--save", str(marked)]) == 1
    assert "part head" in capsys.readouterr().out
    assert marked.is_file()
    assert cli.main([*arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["part"] == "head"
