"""onnxruntime-web is opened only if its files have the pinned digests."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile

import pytest

from gate import Digest
from gate.errors import DigestMismatch, StorageError
from gate.runtimes import browser_page

CONTENTS = {name: f"contents of {name}".encode() for name in browser_page.FILES}


@pytest.fixture(autouse=True)
def archive(tmp_path, monkeypatch):
    """Create a package whose files have the pinned digests, and an npm that downloads it."""
    monkeypatch.setenv("GATE_RUNTIMES", str(tmp_path / "runtimes"))
    path = tmp_path / "package.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for name, data in {**CONTENTS, "evil.mjs": b"evil"}.items():
            member = tarfile.TarInfo(f"package/dist/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    digest = base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()
    monkeypatch.setattr(browser_page, "INTEGRITY", f"sha512-{digest}")
    digests = {name: Digest.from_bytes(data).hex for name, data in CONTENTS.items()}
    monkeypatch.setattr(browser_page, "FILES", digests)
    write_npm(tmp_path, monkeypatch, f'cp {path} "$8/onnxruntime-web-1.30.0.tgz"')
    return path


def write_npm(tmp_path, monkeypatch, *lines):
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "npm").write_text("\n".join(("#!/bin/sh", "PATH=/bin:/usr/bin", *lines)) + "\n")
    (folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_package_is_installed_once():
    assert "is not installed" in browser_page.missing()
    assert browser_page.install()
    assert browser_page.missing() is None
    assert {name: browser_page.read(name) for name in CONTENTS} == CONTENTS
    assert {path.name for path in browser_page.folder().iterdir()} == set(CONTENTS)
    assert not browser_page.install()


def test_changed_file_is_refused_and_reinstalled():
    browser_page.install()
    changed = browser_page.folder() / "ort.wasm.min.mjs"
    changed.write_bytes(changed.read_bytes() + b"//")
    with pytest.raises(
        DigestMismatch, match=r"ort\.wasm\.min\.mjs has digest .* changed or damaged"
    ):
        browser_page.read("ort.wasm.min.mjs")
    assert browser_page.install()
    assert browser_page.read("ort.wasm.min.mjs") == CONTENTS["ort.wasm.min.mjs"]


def test_package_with_wrong_digest_is_not_unpacked(archive):
    archive.write_bytes(archive.read_bytes() + b"\0")
    with pytest.raises(DigestMismatch, match="It was not unpacked"):
        browser_page.install()
    assert not browser_page.folder().exists()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            ['echo "npm error code E404" >&2', "exit 1"],
            "can.t download onnxruntime-web .* code E404",
        ),
        (["exit 3"], "npm ended with code 3"),
    ],
)
def test_failing_npm_is_a_storage_error(tmp_path, monkeypatch, lines, words):
    write_npm(tmp_path, monkeypatch, *lines)
    with pytest.raises(StorageError, match=words):
        browser_page.install()


def test_missing_npm_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(browser_page, "find_spec", lambda _: None)
    with pytest.raises(StorageError, match=r"pip install 'parity-gate\[browser\]'"):
        browser_page.install()
