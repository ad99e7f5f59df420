"""Reading samples needs memory that does not grow with their number."""

import gc
import tracemalloc

import numpy as np
import pytest

from gate import SampleSet
from tests.measure.sources.factories import HERE

ROW = np.zeros(64, np.float32)


@pytest.fixture(autouse=True)
def use_default_gc_threshold():
    """Use Python's default threshold; the test suite sets a higher one."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def measure_peak_memory(source):
    """Return the peak memory in bytes of opening, digesting and reading a source."""
    tracemalloc.start()
    try:
        samples = SampleSet.open(source)
        samples.digest()
        for _ in samples.batches(32):
            pass
        samples.at([0, len(samples) - 1])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["", "streamed_"])
def test_memory_of_data_sets(name, monkeypatch):
    monkeypatch.setattr("gate.data.reader._CHUNK_BYTES", 1 << 13)
    monkeypatch.setattr("gate.data.array_files._CHUNK_BYTES", 1 << 13)
    measure_peak_memory(f"{HERE}:{name}few")  # Warm up: imports take memory too.
    few, many = (measure_peak_memory(f"{HERE}:{name}{count}") for count in ("few", "many"))
    assert many < few + 64_000 < 4000 * ROW.nbytes
