"""`gate locate`: exit codes, JSON, reports, and remedies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx
import pytest

from gate import Localization, cli
from tests.commands.running import create_runner
from tests.small_project import create_project

REFERENCE = ("--reference", "small_models:build")
INPUTS = ("--inputs", "images.npy")
RUNTIMES = ("ort-cpu", "ort-cpu-optimized")
pytestmark = pytest.mark.usefixtures("project")
_run, _json = create_runner("locate")


class TestLocalization:
    def test_good_file_has_no_diverging_layer(self, capsys) -> None:
        arguments = ("good.onnx", *REFERENCE, *INPUTS, "--checkpoint", "weights.safetensors")
        code, printed = _json(capsys, *arguments)
        assert (code, printed.pop("exit_code")) == (0, 0)
        result = Localization.from_json(json.dumps(printed))
        assert (result.samples, result.first_divergence) == (8, None)
        assert {row.verdict for row in result.layers} == {"ok"}
        assert [row.module for row in result.layers][:4] == ["1", "2", "3", "4"]
        code, out, _ = _run(capsys, *arguments, "--samples", "3")
        assert code == 0
        assert out.rstrip().endswith("No layer diverges on 3 samples.")

    @pytest.mark.parametrize("runtime", RUNTIMES)
    def test_bad_file_names_the_diverging_layer(self, capsys, runtime: str) -> None:
        code, printed = _json(capsys, "bad.onnx", *REFERENCE, *INPUTS, "--runtime", runtime)
        assert (code, printed.pop("exit_code")) == (1, 1)
        result = Localization.from_json(json.dumps(printed))
        assert result.first_divergence == "4"
        assert "4.weight differs from the model's in 1 of 720 elements" in result.cause
        assert [row.title for row in result.layers if row.verdict == "source"] == ["4"]

    def test_save_writes_a_file_with_layer_outputs(self, capsys, tmp_path: Path) -> None:
        marked = tmp_path / "new" / "marked.onnx"
        code, out, _ = _run(capsys, "bad.onnx", *REFERENCE, *INPUTS, "--save", str(marked))
        assert code == 1
        assert f"marked  {marked}" in out
        outputs = onnx.load(marked).graph.output
        assert len(outputs) > 1
        assert [value.doc_string.split(",")[0] for value in outputs] == ["", "1", "2", "3"]
        before = Path("bad.onnx").read_bytes()
        code, _, err = _run(capsys, "bad.onnx", *REFERENCE, *INPUTS, "--save", "bad.onnx")
        assert code == 2
        assert "is a file of the model itself" in err
        assert Path("bad.onnx").read_bytes() == before

    def test_divergence_in_the_root_module(self, capsys, tmp_path: Path) -> None:
        """The path of the root module is empty."""
        proto = onnx.load("field.onnx")
        (scaling,) = (node for node in proto.graph.node if node.op_type == "Mul")
        scaling.op_type = "Sub"
        onnx.save(proto, tmp_path / "bad.onnx")
        field = ("--reference", "small_models:field", "--inputs", "field.npz")
        code, printed = _json(capsys, str(tmp_path / "bad.onnx"), *field)
        assert (code, printed["first_divergence"]) == (1, "")

    def test_report_has_the_record_and_a_chart(self, capsys, tmp_path: Path) -> None:
        report = tmp_path / "new" / "report"
        arguments = ("bad.onnx", *REFERENCE, *INPUTS, "--report", str(report))
        code, out, _ = _run(capsys, *arguments)
        assert code == 1
        result = Localization.load(report / "localisation.json")
        assert result.first_divergence == "4"
        chart = report / "plots" / "localisation.svg"
        assert chart.read_bytes().startswith(b"<svg ")
        assert out.rstrip().endswith(f"report  {chart}")

    def test_policy_determinism_settings_apply(self, capsys, monkeypatch, tmp_path: Path) -> None:
        from gate.localize import locate

        observed, switched = [], locate.deterministic

        def watched(policy):
            observed.append(policy.threads)
            return switched(policy)

        monkeypatch.setattr(locate, "deterministic", watched)
        policy = tmp_path / "policy.yaml"
        bounds = "{scaled_diff: 1.0, top1_agreement: 1.0}"
        policy.write_text(
            "determinism: {threads: 1}\n"
            f"runtimes: {{ort-cpu: {{required: always, bounds: {bounds}}}}}\n"
        )
        arguments = ("good.onnx", *REFERENCE, *INPUTS)
        assert _run(capsys, *arguments, "--policy", str(policy))[0] == 0
        assert _run(capsys, *arguments)[0] == 0
        assert observed == [1, None]

    def test_library_output_goes_to_stderr(self, capfd) -> None:
        arguments = ("good.onnx", "--reference", "small_models:talk", *INPUTS, "--json")
        assert cli.main(["locate", *arguments]) == 0
        captured = capfd.readouterr()
        assert json.loads(captured.out)["exit_code"] == 0
        assert "a library that prints" in captured.err


ERRORS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "another model": (("good.onnx", "--reference", "small_models:field", *INPUTS),
                      "EvidenceError", "Check that it is the model of the judged file"),
    "other samples": (("field.onnx", "--reference", "small_models:field", *INPUTS),
                      "InputMismatch", "image"),
}  # fmt: skip


class TestLocateErrors:
    @pytest.mark.parametrize("case", ERRORS)
    def test_errors_are_typed_and_explained(self, capsys, case: str) -> None:
        arguments, kind, expected = ERRORS[case]
        code, printed = _json(capsys, *arguments)
        assert (code, printed["error"]["type"]) == (2, kind)
        assert expected in printed["error"]["message"]
        assert len(printed["error"]["message"]) > 40


def test_input_files_are_not_changed(capsys, tmp_path: Path) -> None:
    custom = tmp_path / "own"
    shutil.copytree(create_project(), custom, ignore=shutil.ignore_patterns("__pycache__"))
    before = {path.name: path.read_bytes() for path in custom.iterdir() if path.is_file()}
    arguments = [str(custom / "bad.onnx"), *REFERENCE, "--inputs", str(custom / "images.npy")]
    assert _json(capsys, *arguments)[0] == 1
    after = {path.name: path.read_bytes() for path in custom.iterdir() if path.is_file()}
    assert after == before
