"""A model over 2 GB needs external data, because a protobuf cannot hold its weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The temporary folder, which is deleted after the test because it needs 4.5 GB."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.alone
@pytest.mark.timeout(600)
def test_model_larger_than_two_gigabytes_is_promoted(folder: Path) -> None:
    completed = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.end_to_end.two_gigabytes", str(folder)],
        cwd=REPOSITORY, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr[-3000:]
    result = json.loads(completed.stdout.splitlines()[-1])
    assert result["size_bytes"] > 2**31
    assert len(result["external_data"]) == 1
    assert result["sha256"] == result["manifest"] == result["ledger"]
    assert result["verdict"] == "PASS"
    assert result["promotion"] == "promoted"
