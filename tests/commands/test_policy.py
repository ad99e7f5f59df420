"""`gate policy show`, `gate policy check` and `gate policy explain`."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate import Policy
from tests.commands.running import Capture, create_runner

PARAMS = str(Path(__file__).parents[2] / "params.yaml")
run, as_json = create_runner("policy")


def test_show_names_the_source_of_each_value(capsys: Capture) -> None:
    ratio = "runtimes.ort-cpu.bounds.noise_ratio"
    code, shown = as_json(
        capsys, "show", "--policy", PARAMS, "--set", f"{ratio}=2", "--task", "classification",
        "--runtime", "openvino",
    )  # fmt: skip
    values = {each["place"]: each for each in shown["values"]}
    assert code == 0
    assert (values[ratio]["value"], values[ratio]["origin"]) == (2.0, "--set")
    assert values["task"]["origin"] == "--task"
    assert values["runtimes.openvino.required"]["origin"] == "--runtime"
    assert values["min_samples"]["origin"].startswith(f"{PARAMS}:")
    line = int(values["min_samples"]["origin"].rpartition(":")[2])
    assert Path(PARAMS).read_text().splitlines()[line - 1].strip().startswith("min_samples:")
    assert values["environments"]["origin"] == "default"


def test_check_summarizes_the_requirements(capsys: Capture) -> None:
    code, checked = as_json(capsys, "check", PARAMS)
    assert code == 0
    assert checked["digest"] == str(Policy.from_file(Path(PARAMS)).digest())
    by_name = {each["name"]: each for each in checked["runtimes"]}
    assert "noise_ratio" in by_name["ort-cpu"]["bounds"]
    assert "ort-cpu (always): max_abs_diff" in run(capsys, "check", PARAMS)[1]


@pytest.mark.parametrize(
    ("text", "beside"),
    [
        ("gate: {task: auto}\nmetrics: []\ntrain: {task: 1}\n", ["metrics"]),
        ("task: auto\nmetrics: []\n", []),
    ],
)
def test_check_reports_settings_outside_the_section(
    capsys: Capture, tmp_path: Path, text: str, beside: list[str]
) -> None:
    (tmp_path / "gate.yaml").write_text(text)
    code, checked = as_json(capsys, "check", str(tmp_path / "gate.yaml"))
    assert (code, checked["not_read"]) == (0, beside)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gate:\n  tsk: tensors\n", "gate.yaml:2: gate.tsk"),
        ("gate:\n  runtimes:\n    ort-cpu: {required: always}\n", "everything would pass"),
        ("- 1\n", "expected a mapping"),
    ],
)
def test_check_refuses_an_invalid_policy(
    capsys: Capture, tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "gate.yaml").write_text(text)
    code, _, err = run(capsys, "check", str(tmp_path / "gate.yaml"))
    assert code == 2
    assert says in err


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("noise_ratio", ["rms(c - r64) / floor", "1.5 on CPU, 2 on CUDA", "ort-cpu.bounds.noise_ratio = 1.5"]),
        ("review", ["automatic | required | signed", 'default   "automatic"']),
        ("required", ["preprocessing.required", "none: required"]),
        ("confidence_over_5_percent", ["share of |max softmax(c)"]),
        ("probe_zero", ["max|c - r| / max|r|"]),
    ],
)  # fmt: skip
def test_explain_describes_a_name(capsys: Capture, name: str, says: list[str]) -> None:
    code, out, _ = run(capsys, "explain", name)
    assert code == 0
    for part in says:
        assert part in out
    code, explained = as_json(capsys, "explain", name)
    assert code == 0
    assert bool(explained["fields"]) != (explained["check"] is not None)


def test_explain_shows_the_line_in_a_file(capsys: Capture) -> None:
    _, explained = as_json(capsys, "explain", "min_samples", "--policy", PARAMS)
    (value,) = explained["values"]
    assert (value["value"], value["origin"].partition(":")[0]) == (400, PARAMS)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("keep_initializers_as_inputs", "section 'export:': see docs/export.md"),
        ("export.verbose", "section 'export:': see docs/export.md"),
        ("parts", "parts belongs in a release file or the section 'release:': docs/releases.md"),
    ],
)
def test_explain_refers_to_other_sections(capsys: Capture, name: str, says: str) -> None:
    code, _, err = run(capsys, "explain", name)
    assert code == 2
    assert says in " ".join(err.split())
