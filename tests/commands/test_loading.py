"""The collector rests while a command loads, and it is said what is loaded."""

from __future__ import annotations

import gc

import pytest

from gate.commands.progress import loading


def test_the_collector_rests_meanwhile_and_nothing_is_said_where_nobody_looks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with loading():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert capsys.readouterr() == ("", "")
