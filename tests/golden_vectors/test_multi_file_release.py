"""Each part of a multi-file release is verified by its own golden vectors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from gate import verify_golden
from gate.golden.folder import GOLDEN_JSON, read_golden
from gate.golden.manifest import GoldenManifest
from tests.registry import parts, releases


@pytest.fixture
def release(tmp_path: Path) -> Path:
    path = parts.write_release(tmp_path)
    parts.write_vectors(tmp_path / "golden", path)
    return path


def golden_folder(path: Path) -> Path:
    return path.parent / "golden"


def test_each_part_is_executed(release: Path) -> None:
    result = verify_golden(release, golden_folder(release))
    assert result.passed, result.problems
    assert [(o.part, o.name) for o in result.outputs] == [
        ("encoder", "logits"),
        ("head", "logits"),
    ]
    assert len(read_golden(golden_folder(release)).golden.files) == 6


def _replace_part(path: Path) -> None:
    releases.onnx_file(path.with_name("head.onnx"), seed=7)


def _swap_parts(path: Path) -> None:
    swapped = path.read_text().replace("encoder.onnx", "?").replace("head.onnx", "encoder.onnx")
    path.write_text(swapped.replace("?", "head.onnx"))
    _update_digest(path)


def _add_part(path: Path) -> None:
    path.write_text(f"{path.read_text()}  neck: {{file: head.onnx}}\n")
    _update_digest(path)


def _drop_part(path: Path) -> None:
    def drop(golden: GoldenManifest) -> GoldenManifest:
        return golden.model_copy(update={"parts": {"encoder": golden.parts["encoder"]}})

    _edit(path, drop)


def _exchange_vectors(path: Path) -> None:
    """Give the head the vectors of the encoder."""

    def mix(golden: GoldenManifest) -> GoldenManifest:
        head, encoder = golden.parts["head"], golden.parts["encoder"]
        mixed = head.model_copy(
            update={
                "outputs": tuple(
                    head_output.model_copy(
                        update={
                            "sha256": encoder_output.sha256,
                            "file": f"part-9{encoder_output.file[6:]}",
                        }
                    )
                    for head_output, encoder_output in zip(
                        head.outputs, encoder.outputs, strict=True
                    )
                )
            }
        )
        for encoder_output in encoder.outputs:
            copied = golden_folder(path) / f"part-9{encoder_output.file[6:]}"
            copied.write_bytes((golden_folder(path) / encoder_output.file).read_bytes())
        return golden.model_copy(update={"parts": golden.parts | {"head": mixed}})

    _edit(path, mix)


def _edit(path: Path, change: Callable[[GoldenManifest], GoldenManifest]) -> None:
    folder = golden_folder(path)
    change(GoldenManifest.load(folder / GOLDEN_JSON)).save(folder / GOLDEN_JSON)


def _update_digest(path: Path) -> None:
    """Write the digest of the changed release into the vectors, as an attacker could."""
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
        (_replace_part, r"the part head \(head.onnx\) differs"),
        (_swap_parts, "the release has the parts"),
        (_add_part, "the release has the parts .*neck"),
        (_drop_part, "the release has the parts"),
        (_exchange_vectors, "part head: output 'logits': max_abs_diff"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_changed_release_does_not_pass(
    release: Path, tamper: Callable[[Path], None], wanted: str
) -> None:
    tamper(release)
    result = verify_golden(release, golden_folder(release))
    assert not result.passed
    assert re.search(wanted, "; ".join(result.problems)), result.problems


@pytest.mark.parametrize("name", ["../head.onnx", "/etc/passwd", "a\\b"])
def test_vectors_cannot_name_files_outside(release: Path, name: str) -> None:
    text = (golden_folder(release) / GOLDEN_JSON).read_text()
    record = text.replace('"file": "head.onnx"', '"file": "' + name.replace("\\", "\\\\") + '"')
    assert record != text
    (golden_folder(release) / GOLDEN_JSON).write_text(record)
    with pytest.raises(Exception, match="not a valid Golden.* record"):
        verify_golden(release, golden_folder(release))
