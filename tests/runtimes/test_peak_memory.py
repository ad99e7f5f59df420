"""The peak memory of one runtime is measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from gate.runtimes import peak_memory
from gate.runtimes.peak_memory import PeakMemory

SIZE = 64 * 2**20


def test_temporary_peak_is_counted() -> None:
    memory = PeakMemory()
    with memory.watched():
        freed_array = np.ones(SIZE, np.uint8)
        del freed_array
    assert memory.grown is not None
    assert memory.grown >= 0.9 * SIZE
    assert memory.peak is not None
    assert memory.peak > memory.grown


_WITHOUT_COUNTER = """
from pathlib import Path
import numpy as np
from gate.runtimes import peak_memory
peak_memory._CLEAR = Path("nowhere/clear_refs")
memory = peak_memory.PeakMemory()
with memory.watched():
    live_array = np.ones(2**26, np.uint8)
print(memory.grown, memory.peak)
with memory.watched():
    more = np.ones(2**26, np.uint8)
    del more
print(memory.grown, live_array.any())
"""


def test_final_memory_is_used_without_peak_counter() -> None:
    """A new process measures it: other tests change the memory of this one."""
    command = [sys.executable, "-c", _WITHOUT_COUNTER]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    grown, peak, later = map(int, output[:3])
    assert 0.9 * 2**26 <= grown < peak
    assert later < 1.5 * 2**26


def test_memory_held_by_the_allocator_is_counted() -> None:
    # allocated in glibc's heap, not by mmap
    small_arrays = [np.ones(100_000, np.uint8) for _ in range(400)]
    last = small_arrays[-1]
    del small_arrays[:-1]
    memory = PeakMemory()
    with memory.watched():
        used = [np.ones(100_000, np.uint8) for _ in range(399)]
    assert memory.grown is not None
    assert memory.grown >= 0.8 * 399 * 100_000
    assert last.any()
    assert used[0].any()


def test_unreadable_memory_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = PeakMemory()
    with memory.watched():
        pass
    assert memory.grown is not None
    status = peak_memory._STATUS
    monkeypatch.setattr(peak_memory, "_STATUS", tmp_path / "nowhere")
    with memory.watched():
        pass
    assert (memory.grown, memory.peak) == (None, None)
    monkeypatch.setattr(peak_memory, "_STATUS", status)
    with memory.watched():  # a missed measurement is not repeated
        pass
    assert (memory.grown, memory.peak) == (None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="of /proc")
def test_own_process_is_read_in_a_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def another(_: object = None) -> None:
        raise psutil.NoSuchProcess(1)

    monkeypatch.setattr(psutil, "Process", another)
    memory = PeakMemory()
    with memory.watched():
        live_array = np.ones(SIZE, np.uint8)
    assert memory.grown is not None
    assert memory.grown >= 0.9 * SIZE
    assert live_array.any()
