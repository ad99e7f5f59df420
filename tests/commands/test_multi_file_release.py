"""--part, --chain and --submodule: multi-file releases from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from ruamel.yaml import YAML

from gate import cli
from tests.commands.running import create_runner
from tests.multi_file import tiny

run, as_json = create_runner("check")
QUICK = (
    "task: auto\ninstruments: {probes: false, search_inputs: 0}\n"
    "runtimes: {ort-cpu: {required: always, bounds: {max_abs_diff: 0.001, top1_agreement: 0.9}}}\n"
)
PARTS = ("--part", "encoder=encoder.onnx", "--part", "head=head.onnx")
CHAIN = ("--chain", "tests.multi_file.tiny:run")
REFERENCE = ("--reference", "tests.multi_file.tiny:build")


@pytest.fixture
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny.export_files(tmp_path)
    (tmp_path / "policy.yaml").write_text(QUICK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


CHECK_OPTIONS = (*REFERENCE, "--inputs", "x.npy", "--policy", "policy.yaml")


def test_part_options_write_and_check_a_release_file(
    work_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = as_json(capsys, *PARTS, *CHAIN, *CHECK_OPTIONS)
    assert code == 0, printed
    assert set(printed["evidence"]["subject"]["parts"]) == {"encoder", "head"}
    release = YAML(typ="safe").load(work_folder / "release.yaml")
    assert release["chain"] == "tests.multi_file.tiny:run"
    assert [part["file"] for part in release["parts"].values()] == ["encoder.onnx", "head.onnx"]
    before = (work_folder / "release.yaml").read_bytes()
    repeated, same = as_json(capsys, "release.yaml", *CHECK_OPTIONS)
    assert repeated == 0
    assert same["evidence"]["subject"]["sha256"] == printed["evidence"]["subject"]["sha256"]
    assert before == (work_folder / "release.yaml").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((), "Missing argument 'MODEL'"),
        (PARTS, "--part and --chain go together"),
        (CHAIN, "--part and --chain go together"),
        (("encoder.onnx", *PARTS, *CHAIN), "use either encoder.onnx, or --part"),
        ((*PARTS, "--part", "head=encoder.onnx", *CHAIN), "a name is used twice"),
        (("--part", "a b=head.onnx", *CHAIN), "expected NAME=FILE.onnx"),
        (("--part", "../a=head.onnx", *CHAIN), "expected NAME=FILE.onnx"),
        (("--part", "head=none.onnx", *CHAIN), "none.onnx does not exist"),
        ((*PARTS, "--chain", "no colon"), "chain"),
    ],
)
def test_invalid_part_options_are_refused(
    work_folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], wanted: str
) -> None:
    code, _, error = run(capsys, *arguments, *CHECK_OPTIONS)
    assert code == 2
    assert wanted in error


def test_different_release_file_is_not_overwritten(
    work_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (work_folder / "release.yaml").write_text("chain: mine:run\n")
    code, _, error = run(capsys, *PARTS, *CHAIN, *CHECK_OPTIONS)
    assert code == 2
    assert "differs from --part and --chain" in error
    assert (work_folder / "release.yaml").read_text() == "chain: mine:run\n"


def test_submodule_is_exported_as_a_part(
    work_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save("voxels.npy", np.ones((4, 4), np.float32))
    requests = ["export", "tests.multi_file.tiny:build", "--example-input", "voxels.npy"]
    assert cli.main([*requests, "--submodule", "head", "--output", "part.onnx"]) == 0
    assert "{file: part.onnx, reference: head}" in capsys.readouterr().out
    weights = tiny.build().get_submodule("head").state_dict()["weight"]
    (output,) = onnx.load(work_folder / "part.onnx").graph.output
    assert output.type.tensor_type.shape.dim[1].dim_value == len(weights)
    assert cli.main([*requests, "--submodule", "neck", "--output", "part.onnx"]) == 2
    assert "no submodule 'neck'" in capsys.readouterr().err


def test_multi_file_release_is_quantized(
    work_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tiny.write_release(work_folder, encoder="encoder.onnx", head="head.onnx"))
    requests = ["quantize", path, "--calibration", "x.npy", "--output", "twin/release.yaml"]
    assert cli.main([*requests, *REFERENCE, "--part", "head", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["parts"]["encoder"] is None
    assert printed["parts"]["head"]["settings"]["calibration_samples"] == 24
    assert set(printed["subject"]["parts"]) == set(printed["of"]["parts"]) == {"encoder", "head"}
    assert printed["path"] == "twin/release.yaml"
    assert cli.main([*requests, *REFERENCE]) == 0
    out = capsys.readouterr().out
    assert "head: quantized, calibrated on 24 samples" in out


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("release.yaml", "--output", "t.yaml"), "calibrated on intermediate values of the model"),
        (("release.yaml", "--output", "t.onnx", *REFERENCE), "must both be"),
        (("head.onnx", "--output", "t.yaml"), "must both be"),
        (("head.onnx", "--output", "t.onnx", *REFERENCE), "--reference is for a release"),
        (("head.onnx", "--output", "t.onnx", "--part", "head"), "--part is for a release"),
        (("release.yaml", "--output", "t/r.yaml", *REFERENCE, "--part", "neck"), "no part neck"),
        (("release.yaml", "--output", "t.yaml", *REFERENCE), "would overwrite the exact parts"),
    ],
)
def test_invalid_quantize_options_are_refused(
    work_folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], wanted: str
) -> None:
    tiny.write_release(work_folder, encoder="encoder.onnx", head="head.onnx")
    before = sorted(work_folder.iterdir())
    assert cli.main(["quantize", *arguments, "--calibration", "x.npy"]) == 2
    assert wanted in capsys.readouterr().err
    assert sorted(work_folder.iterdir()) == before


def test_part_paths_are_relative_to_the_current_folder(
    work_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paths in the release file are relative to its folder, also for `..` and absolute
    arguments."""
    (work_folder / "elsewhere").mkdir()
    monkeypatch.chdir(work_folder / "elsewhere")
    parts = ("--part", "encoder=../encoder.onnx", "--part", f"head={work_folder / 'head.onnx'}")
    custom = ("--inputs", "../x.npy", "--policy", "../policy.yaml")
    code, printed = as_json(capsys, *parts, *CHAIN, *REFERENCE, *custom)
    assert code == 0, printed
    release = YAML(typ="safe").load(work_folder / "release.yaml")
    assert [part["file"] for part in release["parts"].values()] == ["encoder.onnx", "head.onnx"]
