"""A mismatch is confirmed by a second download of the same bytes after a pause."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate import Digest
from gate.errors import DigestMismatch, TooLarge
from gate.registry.registered_model import MismatchMemory, RegisteredModel
from gate.registry.version_files import ExpectedDigests, received_digest
from tests.registry.promoting import promote
from tests.registry.releases import NAME
from tests.registry.simulator import Simulator

DIGEST, OTHER_DIGEST = Digest.from_bytes(b"one"), Digest.from_bytes(b"other")
EXPECTED_DIGEST = "right"
EXPECTED = ExpectedDigests(sha256=DIGEST)
VERSION_1 = ("digits", "1", EXPECTED)


@pytest.mark.parametrize(
    ("downloads", "confirmed"),
    [
        ([(0, DIGEST)], False),
        ([(0, DIGEST), (60, DIGEST)], True),
        ([(0, DIGEST), (59, DIGEST)], False),
        ([(0, DIGEST), (59, DIGEST), (61, DIGEST)], True),
        ([(0, DIGEST), (60, OTHER_DIGEST)], False),
        ([(0, DIGEST), (60, OTHER_DIGEST), (120, DIGEST)], False),
        ([(0, DIGEST), (30, OTHER_DIGEST), (61, DIGEST), (121, DIGEST)], True),
        ([(0, DIGEST), (60, EXPECTED_DIGEST), (120, DIGEST)], False),
    ],
)
def test_only_the_same_digest_after_the_pause_confirms_a_mismatch(downloads, confirmed):
    clock = [0.0]
    memory = MismatchMemory(60, clock=lambda: clock[0])
    confirmed_calls = []
    for at, digest in downloads:
        clock[0] = at
        if digest == EXPECTED_DIGEST:
            memory.forget(VERSION_1)
        else:
            confirmed_calls.append(memory.confirms(VERSION_1, digest))
    assert confirmed_calls[-1] is confirmed
    assert not any(confirmed_calls[:-1])
    assert memory.unconfirmed("digits") == {"1"}
    assert memory.unconfirmed("letters") == set()
    assert memory.confirms(("digits", "2", EXPECTED), DIGEST) is False


def test_command_waits_for_at_most_three_mismatches_and_service_never():
    slept: list[float] = []
    command = MismatchMemory(5, wait=slept.append)
    assert [command.waits() for _ in range(5)] == [True, True, True, False, False]
    assert slept == [5, 5, 5]
    assert MismatchMemory(5, wait=None).waits() is False


def test_downloads_aborted_at_different_sizes_confirm_one_mismatch(ledger, first) -> None:
    registry, sizes = Simulator(), iter((1, 2))
    promote(registry, first, ledger=ledger)
    model = RegisteredModel(registry, ledger, NAME)
    entry = model.history().approving_entry("1")

    def abort_download(name: str, number: str, folder: Path, **_: object) -> Path:
        (folder / "part").write_bytes(b"x" * next(sizes))
        raise TooLarge("it has more bytes than allowed")

    registry.__dict__["download"] = abort_download
    with pytest.raises(DigestMismatch, match="more bytes than allowed"):
        model.verify_version("1", ExpectedDigests.needed(entry))


def test_digest_covers_all_downloaded_files(tmp_path: Path):
    def write_folder(name: str, **files: bytes) -> Digest:
        for location, data in files.items():
            path = tmp_path / name / location / "file"
            path.parent.mkdir(parents=True)
            path.write_bytes(data)
        return received_digest(tmp_path / name)

    first = write_folder("1", a=b"x", b=b"y")
    assert write_folder("2", b=b"y", a=b"x") == first
    different = [
        write_folder("3", a=b"y", b=b"x"),
        write_folder("4", a=b"x"),
        write_folder("5", a=b"x", c=b"y"),
    ]
    (tmp_path / "1" / "link").symlink_to("/dev/zero")
    different.append(received_digest(tmp_path / "1"))
    assert len({first, *different}) == 5
