"""gate export: options, output, records and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from gate import Digest, cli
from tests.commands.running import create_runner

EXAMPLE = ("--example-input", "images.npy")
BUILD = ("small_models:build", *EXAMPLE)
pytestmark = pytest.mark.usefixtures("project")
_run, _json = create_runner("export")


def _metadata(path: Path) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


WARNED = """
import torch
from torch import nn


class Rows(nn.Module):
    def forward(self, x):
        return x.flatten(1) if x.shape[2] > 4 else -x.flatten(1)
"""
POLICY = """
task: tensors
export_findings: {lint: refuse_warnings, record: required}
runtimes:
  ort-cpu: {required: always, bounds: {noise_ratio: 1.5}}
"""


def test_export_findings_are_checked_only_with_the_export_record(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "warned_rows.py").write_text(WARNED)
    (tmp_path / "policy.yaml").write_text(POLICY)
    monkeypatch.syspath_prepend(tmp_path)
    output, record = tmp_path / "x.onnx", tmp_path / "x.onnx.export.json"
    code, plain = _json(capsys, "warned_rows:Rows", *EXAMPLE, "--output", str(output))
    assert (code, plain["record"]) == (0, str(record))
    assert json.loads(record.read_text()) == {
        "subject_sha256": plain["subject"]["sha256"],
        "record": plain["export"],
    }

    def check(*more: str) -> tuple[int, dict[str, Any]]:
        arguments = ("--reference", "warned_rows:Rows", "--inputs", "images.npy", "--policy",
                     str(tmp_path / "policy.yaml"))  # fmt: skip
        code = cli.main(["check", str(output), *arguments, *more, "--json"])
        return code, json.loads(capsys.readouterr().out)

    code, plain = check()
    assert (code, plain["verdict"]) == (2, "ERROR")
    code, plain = check("--export-record", str(record))
    assert (code, plain["verdict"]) == (1, "FAIL")
    problems = [item for item in plain["decision"]["checks"] if item["verdict"] != "PASS"]
    assert ["TRC016" in item["explanation"] for item in problems] == [True], problems
    assert plain["evidence"]["export"] == json.loads(record.read_text())["record"]
    note = json.loads(record.read_text())
    record.write_text(json.dumps({**note, "subject_sha256": "sha256:" + 64 * "0"}))
    code, plain = check("--export-record", str(record))
    assert code == 2
    assert "the export record is about sha256:000" in plain["error"]["message"]
    record.write_text("{}")
    code, plain = check("--export-record", str(record))
    assert code == 2
    assert "not a valid ExportNote record" in plain["error"]["message"]


def test_json_record_matches_the_file_metadata(capsys) -> None:
    code, plain = _json(
        capsys, *BUILD, "--output", "json.onnx", "--checkpoint", "weights.safetensors",
        "--strategy", "direct", "--opset", "17", "--output-names", "scores",
    )  # fmt: skip
    assert code == plain.get("exit_code") == 0, plain
    assert plain["export"]["strategy"] == "direct"
    assert plain["subject"]["opset"] == 17
    assert plain["subject"]["outputs"][0]["name"] == "scores"
    assert max(plain["self_check"].values()) < 1e-5
    checkpoint = str(Digest.from_file(Path("weights.safetensors")))
    assert plain["source"]["checkpoint_sha256"] == checkpoint
    assert _metadata(Path("json.onnx")) == {
        "parity_gate.strategy": "direct",
        "parity_gate.opset_asked": "17",
        "parity_gate.factory": "small_models:build",
        "parity_gate.checkpoint_sha256": checkpoint,
    }


def test_file_metadata_names_the_preprocessing_spec(capsys, tmp_path: Path) -> None:
    from gate import PreprocessSpec

    spec = tmp_path / "spec.yaml"
    spec.write_text("preprocessing:\n  resize: {size: [8, 8]}\n")
    more = ["--preprocessing", str(spec)]
    code, plain = _json(capsys, *BUILD, "--output", "spec.onnx", *more)
    assert code == 0
    digest = str(PreprocessSpec.from_file(spec).digest())
    assert plain["source"]["preprocess_sha256"] == digest
    assert _metadata(Path("spec.onnx"))["parity_gate.preprocess_sha256"] == digest
    spec.write_text("preprocessing:\n  resize: {size: [8, 0]}\n")
    code, plain = _json(capsys, *BUILD, "--output", "spec.onnx", *more)
    assert code == 2
    assert "spec.yaml" in plain["error"]["message"]


def test_options_override_the_settings_file(capsys, tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text("export:\n  opset: 15\n  strategy: direct\n  output_names: [scores]\n")
    _, plain = _json(capsys, *BUILD, "--output", "s.onnx", "--settings", str(file), "--opset", "16")
    assert plain["subject"]["opset"] == 16
    assert plain["export"]["strategy"] == "direct"
    assert plain["subject"]["outputs"][0]["name"] == "scores"


def test_dynamic_axes(capsys, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {"scale": rng.random((6, 1, 8, 8)), "image": rng.random((6, 1, 8, 8))}
    np.savez(tmp_path / "two.npz", **{name: a.astype(np.float32) for name, a in arrays.items()})
    _, plain = _json(
        capsys, "small_models:field", "--example-input", str(tmp_path / "two.npz"),
        "--output", "sizes.onnx", "--dynamic", "image:2=height", "--dynamic", "scale:2=height",
    )  # fmt: skip
    assert [(item["name"], item["shape"]) for item in plain["subject"]["inputs"]] == [
        ("image", ["batch", 1, "height", 8]),
        ("scale", ["batch", 1, "height", 8]),
    ]
    assert list(plain["self_check"])[2:] == ["max_abs_diff_other_height"]


def _settings(folder: Path, text: str) -> tuple[str, str]:
    (folder / "params.yaml").write_text(f"export: {{{text}}}")
    return "--settings", str(folder / "params.yaml")


def test_exporter_switches_are_settings(capsys, tmp_path: Path) -> None:
    settings = _settings(
        tmp_path,
        "opset: auto, strategy: direct, autograd_inlining: false, verbose: true, "
        "keep_initializers_as_inputs: true, export_modules_as_functions: [Conv2d], "
        "custom_opsets: {torch.nn.modules.conv: 7}",
    )
    output = tmp_path / "s.onnx"
    code, plain = _json(capsys, *BUILD, "--output", str(output), *settings)
    assert code == 0, plain
    used = {key: plain["export"]["settings"][key] for key in SWITCHES}
    assert used == SWITCHES
    model = onnx.load(output)
    assert len(model.graph.input) > 1
    assert [function.name for function in model.functions] == ["Conv2d"]
    assert {"torch.nn.modules.conv": 7}.items() <= {
        o.domain: o.version for o in model.opset_import
    }.items()
    assert plain["log"] == str(output) + ".export.log"
    assert "graph(" in Path(plain["log"]).read_text()


SWITCHES = {
    "keep_initializers_as_inputs": True,
    "custom_opsets": "torch.nn.modules.conv=7",
    "autograd_inlining": False,
    "export_modules_as_functions": "Conv2d",
    "operator_export_type": "ONNX",
    "verbose": True,
}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((*BUILD, "--opset", "8"), "expected auto, or a number from 9"),
        ((*BUILD, "--opset", "new"), "neither auto nor a number"),
        ((*BUILD, "--opset", "22", "--strategy", "traced"), "at most opset 20"),
        ((*BUILD, "--dynamic", "input=2"), "expected NAME:AXIS=LABEL"),
        ((*BUILD, "--dynamic", "image:2=height"), "dynamic_axes names image"),
        ((*BUILD, "--batch-axis", "image=none"), "names the input 'image', the example has input."),
        ((*BUILD, "--batch-axis", "input=7"), "names axis 7 of input"),
        ((*BUILD, "--dynamic", "input:7=height"), "names axis 7 of input"),
        ((*BUILD, "--dynamic", "input:2=height"), "the model itself fails at every other size"),
        ((*BUILD, "--output-names", "a,b"), "returns 1 tensor"),
        ((*BUILD, "--output-names", "two words"), "output_names"),
    ],
)
def test_invalid_export_exits_with_2_and_writes_nothing(
    capsys, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    code, out, err = _run(capsys, *arguments, "--output", str(tmp_path / "x.onnx"))
    assert (code, out) == (2, "")
    assert says in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("custom_opsets: {mine: 2}", "silently ignores it"),
        ("export_modules_as_functions: true", "works only with strategy direct"),
        (
            "export_modules_as_functions: [Conv3d], strategy: direct, opset: auto",
            "no module of the model is one. It has: torch.nn.modules.activation.ReLU, ",
        ),
        ("operator_export_type: ONNX_ATEN", "set strategy: direct"),
    ],
)
def test_invalid_settings_exit_with_2(capsys, tmp_path: Path, settings: str, says: str) -> None:
    target = ("--output", str(tmp_path / "x.onnx"))
    code, _, err = _run(capsys, *BUILD, *target, *_settings(tmp_path, settings))
    assert code == 2
    assert says in err
    assert not (tmp_path / "x.onnx").exists()


WRONG = """
from torch import nn


class Baked(nn.Module):
    def forward(self, x):
        return x.flatten(1) + len(x)
"""


def test_failed_self_check_keeps_the_old_file(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "baked_length.py").write_text(WRONG.replace("+ len(x)", "[:len(x) * 2 // 2]"
                                              ".reshape(len(x), 64)"))  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    output = tmp_path / "x.onnx"
    output.write_bytes(b"old")
    code, _, err = _run(
        capsys, "baked_length:Baked", *EXAMPLE, "--output", str(output), "--strategy", "traced",
        "--no-lint",
    )  # fmt: skip
    assert code == 2
    assert "samples" in err
    assert output.read_bytes() == b"old"
