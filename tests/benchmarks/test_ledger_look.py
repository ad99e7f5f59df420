"""The benchmark of ledger reads on few entries. Counted reads replace times, which vary on a busy
machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ledger_look import Bench
from tests.exhaustive import exhaustive
from tests.ledger.rows import record_parsed_lines


@pytest.mark.proof
@pytest.mark.parametrize("lines", [6, pytest.param(120, marks=exhaustive)])
def test_a_look_parses_what_came_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int
) -> None:
    parsed = record_parsed_lines(monkeypatch)
    bench = Bench(tmp_path / "bench", lines)
    end = lines + 2  # promoted and deployed
    parsed.clear()
    bench.nothing_new()
    assert parsed == []
    bench.a_line_more()
    bench.a_line_more()
    # The writer and the service read: the writer had not read the service's entries.
    assert sorted(parsed) == [end, *[end + 1] * 2, *[end + 2] * 2]
    parsed.clear()
    bench.at_first()
    assert parsed == list(range(1, end + 3))
