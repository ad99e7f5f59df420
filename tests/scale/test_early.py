"""A process that starts before anybody knows what it measures, and ends whatever becomes of it."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from gate.distributed.early import EarlyProcess, early_processes


def test_it_never_hears_of_ctrl_c() -> None:
    """Not even while it imports, nor the first one, with which Python starts a tracker: the whole
    group of a terminal gets it. It ends with its pipe."""
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    early = EarlyProcess.start()
    try:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
        status = Path(f"/proc/{early.process.pid}/status").read_text()
        blocked = int(next(line for line in status.splitlines() if "SigBlk" in line).split()[1], 16)
        assert blocked & 1 << (signal.SIGINT - 1)
    finally:
        early.end()
    assert early.process.exitcode is not None


def test_those_that_nobody_took_are_ended() -> None:
    with pytest.raises(KeyboardInterrupt), early_processes(2) as waiting:
        taken = waiting.popleft()
        raise KeyboardInterrupt
    assert multiprocessing.active_children() == [taken.process]
    taken.end()
    assert not multiprocessing.active_children()


def test_what_it_ended_with_is_heard_of() -> None:
    early = EarlyProcess.start()
    early.process.kill()
    assert early.ended() == -signal.SIGKILL
    early.end()
