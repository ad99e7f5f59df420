"""The service as a process: how many connections it takes, and what it does when all are taken."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.deploy.forged import store_of
from tests.service.deliveries import SECRET, body, until
from tests.service.processes import process
from tests.service.test_connection import connected, is_closed


def _soft_limit(pid: int) -> int:
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Max open files")).split()[3])


@pytest.mark.proof
def test_strangers_use_up_no_files(tmp_path: Path) -> None:
    """More come than the process may have files: it accepts fewer, and can write its inbox."""
    with process(tmp_path, files=300) as service, connected(service, 400) as strangers:
        until(lambda: sum(map(is_closed, strangers)) > 300)
        for number in range(5):
            assert service.send(body(), delivery=f"d-{number}").status_code == 202
        assert len(list(Path(f"/proc/{service.popen.pid}/fd").iterdir())) < 200
        log = service.log.read_text()
    assert "this process may open 300 files, 512 connections need 1216" in log
    assert "Traceback" not in log
    assert SECRET not in log


def test_it_takes_as_many_files_as_it_may(tmp_path: Path) -> None:
    with process(tmp_path, "--connections", "1000", "--downloads", "72") as service:
        assert _soft_limit(service.popen.pid) >= 2200
        assert "may open" not in service.log.read_text()


def test_damage_that_a_client_finds_is_looked_at(tmp_path: Path) -> None:
    _store, path = store_of(tmp_path / "store", b"a model")
    with process(tmp_path, "--store", str(tmp_path / "store")) as service:
        url = f"{service.address}/models/digits/model.onnx"
        assert httpx.get(url).content == b"a model"
        path.write_bytes(b"another")
        assert httpx.get(url).status_code == 503
        assert httpx.get(url).status_code == 503
        assert service.lines("doubt") == ["digits"]
        assert service.log.read_text().count("not served") == 1
