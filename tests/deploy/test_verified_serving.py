"""Changed files and links are not served, and unchanged files are hashed once."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gate import Digest
from gate.deploy.deploy import deploy, is_serving, rollback_deployment, verify_slot
from gate.deploy.store import ModelStore
from tests.deploy import models
from tests.deploy.handmade_store import make_store
from tests.deploy.models import NAME
from tests.deploy.servers import serve_store

MODEL = f"{NAME}/model.onnx"


class ReadCounter:
    """Counts the hashed files and the positioned reads of the store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hashed, self.parts = 0, 0
        self.may_hash = threading.Event()
        self.may_hash.set()
        of_stream, pread = Digest.from_stream, os.pread

        def count_hash(stream) -> Digest:
            self.hashed += 1
            self.may_hash.wait(20)
            return of_stream(stream)

        def count_read(descriptor: int, size: int, offset: int) -> bytes:
            self.parts += 1
            return pread(descriptor, size, offset)

        monkeypatch.setattr(Digest, "from_stream", staticmethod(count_hash))
        monkeypatch.setattr(os, "pread", count_read)


@pytest.fixture
def read_counter(monkeypatch: pytest.MonkeyPatch) -> ReadCounter:
    return ReadCounter(monkeypatch)


class ServedModel:
    """A deployed model behind a server, and the damage that the server reported."""

    def __init__(self, store: ModelStore, source) -> None:
        self.store, self.source = store, source
        self.damaged: Counter[str] = Counter()
        slot = store.live(NAME).slots["exact"]
        self.path = store.file(slot.sha256, slot.model)
        self.sha256 = slot.model.sha256

    def get(self, path: str = MODEL, **options) -> httpx.Response:
        return self.client.get(path, **options)

    def serves_right_bytes(self) -> bool:
        response = self.get()
        return response.status_code == 200 and Digest.from_bytes(response.content) == self.sha256


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedModel]:
    store, source = ModelStore(tmp_path / "srv", keep=1), models.source(tmp_path, 1)
    deploy(store, NAME, {"exact": source})
    created = ServedModel(store, source)
    with serve_store(store, damaged=lambda name: created.damaged.update([name])) as created.client:
        yield created


def _flip_bit(path: Path) -> bytes:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    return bytes(data)


def edit_in_place(path: Path) -> None:
    """Flip a bit and restore the times; the size stays the same."""
    before, data = path.stat(), _flip_bit(path)
    path.chmod(0o644)
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_file(path: Path) -> None:
    replacement = path.with_name("other")
    replacement.write_bytes(_flip_bit(path))
    replacement.replace(path)


def append_to_file(path: Path) -> None:
    path.chmod(0o644)
    with path.open("ab") as stream:
        stream.write(b"x")


def replace_by_symlink(path: Path) -> None:
    """Link to the same bytes in a file that others can replace."""
    target = path.parents[3] / "elsewhere.onnx"
    target.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(target)


def replace_folder_by_symlink(path: Path) -> None:
    target = path.parents[3] / "elsewhere"
    path.parent.rename(target)
    path.parent.symlink_to(target)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CHANGES = [
    edit_in_place,
    replace_file,
    append_to_file,
    replace_by_symlink,
    replace_folder_by_symlink,
    replace_by_pipe,
]


@pytest.mark.rows(5)
@pytest.mark.parametrize("tamper", CHANGES)
@pytest.mark.parametrize("warm", [True, False])
def test_changed_file_is_not_served_and_reported_once(
    served: ServedModel,
    tamper: Callable[[Path], None],
    warm: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if warm:
        assert served.serves_right_bytes()
    tamper(served.path)
    tag = f'"sha256-{served.sha256.hex}"'
    for requested in ({}, {"Range": "bytes=0-3"}, {"If-None-Match": '"another"'}, {}):
        response = served.get(headers=requested)
        assert (response.status_code, response.headers["cache-control"]) == (503, "no-store")
        assert int(response.headers["retry-after"]) > 0
        assert response.headers.get("etag") != tag
    assert served.damaged == {NAME: 1}
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "not served" in errors[0].getMessage()
    # The periodic thorough check finds the change, and the next deployment repairs it.
    assert verify_slot(served.store, served.store.live(NAME).slots["exact"]) is not None
    assert deploy(served.store, NAME, {"exact": served.source}).outcome == "deployed"
    assert served.serves_right_bytes()
    assert not any(part.is_symlink() for part in (served.path, served.path.parent))


def remove_manifest(served: ServedModel) -> None:
    (served.store.live_link(NAME) / "manifest.json").unlink()


def truncate_manifest(served: ServedModel) -> None:
    path = served.store.live_link(NAME) / "manifest.json"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])


def remove_file(served: ServedModel) -> None:
    served.path.unlink()


def remove_content_folder(served: ServedModel) -> None:
    shutil.rmtree(served.path.parent)


def break_live_link(served: ServedModel) -> None:
    shutil.rmtree(served.store.live_link(NAME).resolve())


def remove_releases(served: ServedModel) -> None:
    shutil.rmtree(served.store.root / "releases")


@pytest.mark.parametrize(
    "tamper",
    [
        remove_manifest,
        truncate_manifest,
        remove_file,
        remove_content_folder,
        break_live_link,
        remove_releases,
    ],
)
def test_missing_content_is_unavailable_until_redeployed(
    served: ServedModel, tmp_path: Path, tamper: Callable[[ServedModel], None], caplog
) -> None:
    deploy(served.store, NAME, {"exact": models.source(tmp_path, 2)})
    deploy(served.store, NAME, {"exact": served.source})
    assert served.store.damage(NAME) is None
    assert served.serves_right_bytes()
    before = served.store.live(NAME)
    tamper(served)
    for _ in range(3):
        response = served.get()
        assert (response.status_code, response.headers["cache-control"]) == (503, "no-store")
        assert int(response.headers["retry-after"]) > 0
        assert served.get(f"{NAME}/sha256/{'0' * 64}/model.onnx").status_code in (404, 503)
    assert served.damaged[NAME] in (1, 2)  # once by name, and once by digest
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == served.damaged[NAME]
    assert served.store.damage(NAME) is not None
    assert not is_serving(served.store, NAME, {"exact": served.source})
    assert deploy(served.store, NAME, {"exact": served.source}).outcome == "deployed"
    assert served.serves_right_bytes()
    assert served.store.damage(NAME) is None
    after = models.assert_complete(served.store)
    assert after.release > before.release
    if tamper is not remove_releases:
        assert rollback_deployment(served.store, NAME).outcome == "rolled_back"
        assert models.assert_complete(served.store)


def test_copied_live_folder_is_replaced_by_a_link(served: ServedModel, tmp_path: Path) -> None:
    link = served.store.live_link(NAME)
    copy = tmp_path / "copy"
    shutil.copytree(link, copy)
    link.unlink()
    copy.rename(link)
    assert served.serves_right_bytes()
    deploy(served.store, NAME, {"exact": models.source(tmp_path, 2)})
    assert link.is_symlink()
    assert models.assert_complete(served.store).release == 2


def test_damaged_earlier_release_does_not_affect_serving(
    served: ServedModel, tmp_path: Path
) -> None:
    deploy(served.store, NAME, {"exact": models.source(tmp_path, 2)})
    (served.store.releases(NAME)[1] / "manifest.json").unlink()
    live = served.store.live(NAME).slots["exact"]
    assert served.get(f"{NAME}/{live.model.url}").status_code == 200
    assert served.get(f"{NAME}/sha256/{'0' * 64}/model.onnx").status_code == 404
    assert served.damaged == {}


def test_file_is_hashed_once_per_change(served: ServedModel, read_counter: ReadCounter) -> None:
    for _ in range(3):
        assert served.serves_right_bytes()
    assert read_counter.hashed == 1
    served.path.chmod(0o644)  # the change time differs, the bytes do not
    assert served.serves_right_bytes()
    assert served.serves_right_bytes()
    assert read_counter.hashed == 2
    edit_in_place(served.path)
    for _ in range(3):
        assert served.get().status_code == 503
    assert read_counter.hashed == 3


def test_concurrent_requests_hash_the_file_once(
    served: ServedModel, read_counter: ReadCounter
) -> None:
    read_counter.may_hash.clear()
    with ThreadPoolExecutor(20) as pool:
        requests = [pool.submit(served.serves_right_bytes) for _ in range(20)]
        # All 20 requests wait for one hash; other requests are answered meanwhile.
        while _count_open(served.path) < 20:
            assert served.get(f"{NAME}/manifest.json").status_code == 200
        read_counter.may_hash.set()
        assert all(item.result() for item in requests)
    assert read_counter.hashed == 1


def _count_open(path: Path) -> int:
    result = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            result += link.readlink() == path
        except OSError:
            continue
    return result


def test_head_and_304_read_no_file(served: ServedModel, read_counter: ReadCounter) -> None:
    tag = f'"sha256-{served.sha256.hex}"'
    assert served.client.head(MODEL).headers["etag"] == tag
    assert served.get(headers={"If-None-Match": tag}).status_code == 304
    assert (read_counter.hashed, read_counter.parts) == (0, 0)


def test_file_changed_during_download_is_aborted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = os.urandom(32 << 20)
    store, path = make_store(tmp_path / "srv", data)
    with serve_store(store) as client, client.stream("GET", MODEL) as response:
        pieces = response.iter_raw(1 << 16)
        received = next(pieces)
        with path.open("r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            stream.write(bytes([data[-1] ^ 1]))
        with pytest.raises(httpx.RemoteProtocolError):
            for piece in pieces:
                received += piece
    assert len(received) < len(data)
    assert data.startswith(received)
    assert "was aborted" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_aborted_download_stops_reading(
    tmp_path: Path, read_counter: ReadCounter, how: str
) -> None:
    store, _path = make_store(tmp_path / "srv", bytes(64 << 20))
    with serve_store(store) as requests:
        url = requests.base_url
        assert requests.get(MODEL, headers={"Range": "bytes=0-0"}).content == b"\0"
        read_counter.parts = 0
        for _ in range(50):
            with socket.create_connection((url.host, url.port)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                client.sendall(f"GET /models/{MODEL} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                assert client.recv(1000)
                if how == "reset":
                    linger = struct.pack("ii", 1, 0)
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        requested = requests.get(MODEL, headers={"Range": "bytes=-1"})
        assert requested.content == b"\0"
    # A complete download needs 512 reads. The socket buffers accept only some of them.
    assert read_counter.parts < 50 * 64


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_local_read_error_is_not_reported_as_damage(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def raise_error(*_arguments: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    assert served.serves_right_bytes()
    monkeypatch.setattr(served.store, "open", raise_error)
    assert served.get().status_code == 503
    assert served.damaged == {}


def test_verification_error_without_message_fails() -> None:
    def raise_memory_error(_path: object) -> None:
        raise MemoryError

    store: Any = SimpleNamespace(file=lambda *_: None, open=raise_memory_error)
    slot: Any = SimpleNamespace(files=[SimpleNamespace()], sha256=None, golden_sha256=None)
    assert verify_slot(store, slot)
