"""`gate locate` as its users call it: exit codes, JSON, reports, and what to do about errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from gate import cli
from gate.records.localization import Localization
from tests.commands.running import runner
from tests.small_project import made

REFERENCE = ("--reference", "small_models:build")
INPUTS = ("--inputs", "images.npy")
RUNTIMES = ("ort-cpu", "ort-cpu-optimized")
pytestmark = pytest.mark.usefixtures("project")
_run, _json = runner("locate")


class TestAnswer:
    def test_a_right_file(self, capsys) -> None:
        arguments = ("good.onnx", *REFERENCE, *INPUTS, "--checkpoint", "weights.safetensors")
        code, told = _json(capsys, *arguments)
        assert (code, told.pop("exit_code")) == (0, 0)
        found = Localization.from_json(json.dumps(told))
        assert (found.samples, found.first_divergence) == (8, None)
        assert {row.verdict for row in found.layers} == {"ok"}
        assert [row.module for row in found.layers][:4] == ["1", "2", "3", "4"]
        code, out, _ = _run(capsys, *arguments, "--samples", "3")
        assert code == 0
        assert out.rstrip().endswith("No layer diverges on 3 samples.")

    @pytest.mark.parametrize("runtime", RUNTIMES)
    def test_a_wrong_file(self, capsys, runtime: str) -> None:
        code, told = _json(capsys, "bad.onnx", *REFERENCE, *INPUTS, "--runtime", runtime)
        assert (code, told.pop("exit_code")) == (1, 1)
        found = Localization.from_json(json.dumps(told))
        assert found.first_divergence == "4"
        assert "4.weight differs from the model's in 1 of 720 elements" in found.cause
        assert [row.title for row in found.layers if row.verdict == "source"] == ["4"]

    def test_a_viewer_gets_the_layers_as_outputs(self, capsys, tmp_path: Path) -> None:
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

    def test_people_see_the_table_and_what_it_means(self, capsys) -> None:
        code, out, _ = _run(capsys, "bad.onnx", *REFERENCE, *INPUTS)
        assert code == 1
        head, *rows = [line for line in out.splitlines() if line.strip()]
        assert head.split() == ["layer", "type", "max", "diff", "mean", "diff", "noise", "ratio",
                                "alone", "growth", "verdict"]  # fmt: skip
        (source,) = (row for row in rows if row.split()[:2] == ["4", "Linear"])
        assert "source: 4.weight differs from the model's" in source
        assert "First diverging layer: 4 (ort-cpu)." in rows
        assert any(row.startswith("Try: Export again from the checkpoint") for row in rows)
        assert "report" not in rows[-1]

    def test_two_inputs(self, capsys) -> None:
        field = ("field.onnx", "--reference", "small_models:field", "--inputs", "field.npz")
        code, told = _json(capsys, *field)
        assert code == 0
        assert [row["module"] for row in told["layers"]][:1] == ["conv"]

    def test_a_fault_in_the_models_own_code_is_one_too(self, capsys, tmp_path: Path) -> None:
        """The path of the model itself is empty."""
        proto = onnx.load("field.onnx")
        (scaling,) = (node for node in proto.graph.node if node.op_type == "Mul")
        scaling.op_type = "Sub"
        onnx.save(proto, tmp_path / "bad.onnx")
        field = ("--reference", "small_models:field", "--inputs", "field.npz")
        code, told = _json(capsys, str(tmp_path / "bad.onnx"), *field)
        assert (code, told["first_divergence"]) == (1, "")

    def test_the_report_holds_the_record_and_a_chart(self, capsys, tmp_path: Path) -> None:
        report = tmp_path / "new" / "report"
        arguments = ("bad.onnx", *REFERENCE, *INPUTS, "--report", str(report))
        code, out, _ = _run(capsys, *arguments)
        assert code == 1
        found = Localization.load(report / "localisation.json")
        assert found.first_divergence == "4"
        chart = report / "plots" / "localisation.svg"
        assert chart.read_bytes().startswith(b"<svg ")
        assert out.rstrip().endswith(f"report  {chart}")

    def test_the_policys_switches_are_in_force(self, capsys, monkeypatch, tmp_path: Path) -> None:
        from gate.localize import locate

        seen, switched = [], locate.deterministic

        def watched(policy):
            seen.append(policy.threads)
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
        assert seen == [1, None]

    def test_what_a_library_prints_does_not_spoil_the_json(self, capfd) -> None:
        arguments = ("good.onnx", "--reference", "small_models:talk", *INPUTS, "--json")
        assert cli.main(["locate", *arguments]) == 0
        seen = capfd.readouterr()
        assert json.loads(seen.out)["exit_code"] == 0
        assert "a library that prints" in seen.err


ERRORS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "no file": (("none.onnx", *REFERENCE, *INPUTS), "OnnxFileError", "none.onnx does not exist"),
    "half a file": (("cut.onnx", *REFERENCE, *INPUTS), "OnnxFileError", "cut.onnx"),
    "an empty file": (("nothing.onnx", *REFERENCE, *INPUTS), "OnnxFileError", "nothing.onnx"),
    "no module": (("good.onnx", "--reference", "nowhere:build", *INPUTS), "ModelError", "nowhere"),
    "a broken factory": (("good.onnx", "--reference", "small_models:broken", *INPUTS),
                         "ModelError", "no weights here"),
    "another model": (("good.onnx", "--reference", "small_models:field", *INPUTS),
                      "EvidenceError", "Check that this is the exported model"),
    "no checkpoint": (("good.onnx", *REFERENCE, *INPUTS, "--checkpoint", "none.pt"),
                      "CheckpointError", "none.pt"),
    "another checkpoint": (("good.onnx", *REFERENCE, *INPUTS, "--checkpoint", "other.pt"),
                           "CheckpointError", "other.pt"),
    "no samples": (("good.onnx", *REFERENCE, "--inputs", "none.npy"), "DataError", "none.npy"),
    "other samples": (("field.onnx", "--reference", "small_models:field", *INPUTS),
                      "InputMismatch", "image"),
    "no policy": (("good.onnx", *REFERENCE, *INPUTS, "--policy", "none.yaml"), "PolicyError",
                  "none.yaml"),
}  # fmt: skip


class TestCouldNotTell:
    @pytest.mark.parametrize("case", ERRORS)
    def test_errors_say_what_to_do(self, capsys, case: str) -> None:
        arguments, kind, said = ERRORS[case]
        code, told = _json(capsys, *arguments)
        assert (code, told["error"]["type"]) == (2, kind)
        assert said in told["error"]["message"]
        assert len(told["error"]["message"]) > 40

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("good.onnx", *INPUTS), "--reference"),
            (("good.onnx", *REFERENCE), "--inputs"),
            (REFERENCE + INPUTS, "MODEL"),
            (("good.onnx", *REFERENCE, *INPUTS, "--samples", "0"), "--samples"),
            (("good.onnx", *REFERENCE, *INPUTS, "--runtime", "torch-cuda"), "ort-cpu"),
        ],
        ids=["no reference", "no inputs", "no model", "no sample", "no such runtime"],
    )
    def test_wrong_usage(self, capsys, arguments, said) -> None:
        code, _, error = _run(capsys, *arguments)
        assert code == 2
        assert said in error

    def test_a_runtime_that_this_machine_lacks(self, capsys) -> None:
        import torch

        if torch.cuda.is_available():
            pytest.skip("CUDA is here")
        arguments = ("good.onnx", *REFERENCE, *INPUTS, "--runtime", "ort-cuda")
        code, told = _json(capsys, *arguments)
        assert (code, told["error"]["type"]) == (2, "RuntimeUnusable")
        assert "CUDA" in told["error"]["message"]

    def test_a_reference_that_ends_the_process(self, capsys) -> None:
        arguments = ("good.onnx", "--reference", "small_models:leave", *INPUTS)
        assert _run(capsys, *arguments)[0] == 2

    def test_a_report_that_can_not_be_written(self, capsys, tmp_path: Path) -> None:
        (tmp_path / "report").write_text("a file")
        arguments = ("good.onnx", *REFERENCE, *INPUTS, "--report", str(tmp_path / "report"))
        code, told = _json(capsys, *arguments)
        assert (code, told["error"]["type"]) == (2, "StorageError")

    def test_samples_that_are_not_finite(self, capsys, tmp_path: Path) -> None:
        np.save(tmp_path / "nan.npy", np.full((4, 1, 8, 8), np.nan, np.float32))
        arguments = ("good.onnx", *REFERENCE, "--inputs", str(tmp_path / "nan.npy"))
        code, told = _json(capsys, *arguments)
        assert (code, told["error"]["type"]) == (2, "DataError")


def test_the_files_of_the_caller_stay_as_they_are(capsys, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(made(), own, ignore=shutil.ignore_patterns("__pycache__"))
    before = {path.name: path.read_bytes() for path in own.iterdir() if path.is_file()}
    arguments = [str(own / "bad.onnx"), *REFERENCE, "--inputs", str(own / "images.npy")]
    assert _json(capsys, *arguments)[0] == 1
    after = {path.name: path.read_bytes() for path in own.iterdir() if path.is_file()}
    assert after == before
