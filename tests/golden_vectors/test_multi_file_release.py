"""Golden vectors of a multi-file release: each part is verified by its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from gate import cli
from gate.golden.folder import GOLDEN_JSON, read_golden
from gate.golden.manifest import GoldenManifest
from gate.golden.verify import verify_golden
from tests.registry import parts, releases
from tests.sandbox.in_process import read_in_process


@pytest.fixture
def release(tmp_path: Path) -> Path:
    path = parts.files(tmp_path)
    parts.golden(tmp_path / "golden", path)
    return path


def golden_of(path: Path) -> Path:
    return path.parent / "golden"


def test_each_part_is_executed(release: Path) -> None:
    result = verify_golden(release, golden_of(release))
    assert result.passed, result.problems
    assert [(o.part, o.name) for o in result.outputs] == [
        ("encoder", "logits"),
        ("head", "logits"),
    ]
    assert len(read_golden(golden_of(release)).golden.files) == 6


def _exchanged(path: Path) -> None:
    releases.onnx_file(path.with_name("head.onnx"), seed=7)


def _swapped(path: Path) -> None:
    swapped = path.read_text().replace("encoder.onnx", "?").replace("head.onnx", "encoder.onnx")
    path.write_text(swapped.replace("?", "head.onnx"))
    _renew(path)


def _added(path: Path) -> None:
    path.write_text(f"{path.read_text()}  neck: {{file: head.onnx}}\n")
    _renew(path)


def _forgotten(path: Path) -> None:
    def drop(golden: GoldenManifest) -> GoldenManifest:
        return golden.model_copy(update={"parts": {"encoder": golden.parts["encoder"]}})

    _edit(path, drop)


def _wrong(path: Path) -> None:
    """The head's vectors are the encoder's."""

    def mix(golden: GoldenManifest) -> GoldenManifest:
        head, encoder = golden.parts["head"], golden.parts["encoder"]
        mixed = head.model_copy(
            update={
                "outputs": tuple(
                    mine.model_copy(update={"sha256": its.sha256, "file": f"part-9{its.file[6:]}"})
                    for mine, its in zip(head.outputs, encoder.outputs, strict=True)
                )
            }
        )
        for its in encoder.outputs:
            copied = golden_of(path) / f"part-9{its.file[6:]}"
            copied.write_bytes((golden_of(path) / its.file).read_bytes())
        return golden.model_copy(update={"parts": golden.parts | {"head": mixed}})

    _edit(path, mix)


def _edit(path: Path, change: Callable[[GoldenManifest], GoldenManifest]) -> None:
    folder = golden_of(path)
    change(GoldenManifest.load(folder / GOLDEN_JSON)).save(folder / GOLDEN_JSON)


def _renew(path: Path) -> None:
    """Somebody who may write everything gives the vectors the digest of what he made."""
    sha256 = parts.subject(path).sha256
    _edit(
        path,
        lambda golden: golden.model_copy(
            update={"model": golden.model.model_copy(update={"sha256": sha256})}
        ),
    )


@pytest.mark.parametrize(
    ("tamper", "wanted"),
    [
        (_exchanged, r"the part head \(head.onnx\) differs"),
        (_swapped, "the release has the parts"),
        (_added, "the release has the parts .*neck"),
        (_forgotten, "the release has the parts"),
        (_wrong, "part head: output 'logits': max_abs_diff"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_changed_release_does_not_pass(
    release: Path, tamper: Callable[[Path], None], wanted: str
) -> None:
    tamper(release)
    result = verify_golden(release, golden_of(release))
    assert not result.passed
    assert re.search(wanted, "; ".join(result.problems)), result.problems


@pytest.mark.parametrize("name", ["../head.onnx", "/etc/passwd", "a\\b"])
def test_vectors_cannot_name_files_outside(release: Path, name: str) -> None:
    text = (golden_of(release) / GOLDEN_JSON).read_text()
    record = text.replace('"file": "head.onnx"', '"file": "' + name.replace("\\", "\\\\") + '"')
    assert record != text
    (golden_of(release) / GOLDEN_JSON).write_text(record)
    with pytest.raises(Exception, match="not a valid Golden.* record"):
        verify_golden(release, golden_of(release))


def test_command_lists_the_parts(
    release: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_in_process(monkeypatch)
    arguments = [str(release), "--golden", str(golden_of(release))]
    assert cli.main(["verify-release", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "head: logits" in printed
    assert "it is user code" in printed
