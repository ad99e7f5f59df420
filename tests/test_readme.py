"""Every command in README.md and CONTRIBUTING.md runs, or at least exists."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gate import cli
from gate.commands.result import ExitCode
from gate.export.export import export_model
from gate.model.checkpoint import load_checkpoint
from gate.model.loading import build_model
from gate.records.export import ExportSettings
from tests.reused_charts import reused_charts

__all__ = ["reused_charts"]

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")
}


def _blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def _lines(text: str, program: str) -> list[list[str]]:
    """Return the commands of a program in fenced blocks, as words without comments."""
    lines = [
        line
        for block in _blocks("bash", text)
        for line in re.sub(r"\\\n\s*", " ", block).splitlines()
    ]
    matches = [shlex.split(line, comments=True) for line in lines]
    return [words for words in matches if words and words[0] == program]


def _inline(text: str, program: str) -> list[list[str]]:
    """Return the commands of a program in inline code."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [shlex.split(code) for code in re.findall(rf"`({program} [^`]+)`", outside)]


def write_modules(folder: Path, page: str) -> None:
    """Write the modules that a page shows, named by their first lines."""
    named = re.compile(r"# (\w+\.py)\n")
    matches = {
        match[1]: block for block in _blocks("python", page) if (match := named.match(block))
    }
    assert set(matches) == {"mymodel.py", "standins.py"}
    for name, block in matches.items():
        (folder / name).write_text(block)


def _enter_project(folder: Path, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder with the model and the samples of a page."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("DVC_EXP_NAME", raising=False)
    monkeypatch.chdir(folder)
    write_modules(folder, page)
    sys.modules.pop("mymodel", None)
    subprocess.run([sys.executable, "standins.py"], check=True)


@pytest.fixture
def readme_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the README's mymodel.py, samples, weights and ONNX file."""
    _enter_project(tmp_path, README, monkeypatch)
    model = build_model("mymodel:build").eval()
    load_checkpoint(model, Path("weights.safetensors"))
    samples = np.load("samples.npy")
    export_model(
        model, {"input": samples[:4]}, settings=ExportSettings(), output=Path("model.onnx")
    )
    return tmp_path


@pytest.mark.proof
def test_first_page_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the commands in a folder with the files that the page assumes. tests/first_hour runs the
    README's commands, each in its own process."""
    page = (ROOT / "docs/getting-started.md").read_text(encoding="utf-8")
    _enter_project(tmp_path, page, monkeypatch)
    commands = _lines(page, "gate")
    assert [words[1] for words in commands] == [
        "doctor", "export", "check", "init", "policy", "policy", "check",
    ]  # fmt: skip
    for words in commands:
        assert cli.main(words[1:]) == 0, (words, capsys.readouterr().err)
    assert capsys.readouterr().out.count("PASS   Within every bound") == 2
    assert (tmp_path / "report/report.html").is_file()
    assert (tmp_path / "report/decision.json").is_file()


def test_library_example_runs(readme_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [block for block in _blocks("python") if "from gate import" in block]
    (readme_folder / "example.py").write_text(example)
    runpy.run_path("example.py")
    assert capsys.readouterr().out == "PASS\n"


def test_inline_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    inline = [words for page in PAGES.values() for words in _inline(page, "gate")]
    assert inline
    for words in inline:
        command = [] if words[1].startswith("-") else words[1:2]
        options = [word for word in words if word.startswith("--")]
        assert cli.main([*command, "--help"]) == 0
        captured = capsys.readouterr().out
        assert all(option in captured for option in options)


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    text = PAGES[page]
    named = [words[1] for words in _lines(text, "make") + _inline(text, "make")]
    assert named
    assert set(named) <= targets


@pytest.mark.parametrize("page", [*PAGES, "docs/adr/README.md"])
def test_links_are_valid(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text(encoding="utf-8"))
    assert links or page == "CONTRIBUTING.md"
    for link in links:
        assert (path.parent / link).is_file(), link


def test_exit_codes_match_the_command_line() -> None:
    page = (ROOT / "docs/json.md").read_text(encoding="utf-8")
    reported = {int(code) for code in re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE)}
    assert reported == set(ExitCode)


def test_picture_loads_nothing_external() -> None:
    picture = (ROOT / "docs/caught-fault.svg").read_text(encoding="utf-8")
    addresses = re.findall(r"https?://[^\"'\s)]+", picture)
    assert set(addresses) <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
    assert "layer3.conv2.weight" in picture


@pytest.mark.proof
def test_each_picture_has_alt_text_and_is_small() -> None:
    pictures = re.findall(r"!\[([^\]]*)\]\(([^)]+\.png)\)", README)
    assert len(pictures) == 1
    for words, path in pictures:
        assert len(words) > 40
        assert (ROOT / path).stat().st_size < 150_000
