"""Reading samples needs memory that does not grow with their number."""

import gc
import subprocess
import sys
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from gate import SampleSet
from tests.measure.sources import written
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


def test_memory_of_many_small_samples():
    """Limit the memory of scalar samples, whose Python objects are larger than their data."""
    samples = SampleSet.open(f"{HERE}:scalars")
    tracemalloc.start()
    try:
        samples.digest()
        assert tracemalloc.get_traced_memory()[1] < 2000 * 300
    finally:
        tracemalloc.stop()


@pytest.mark.further
def test_memory_of_tars(tmp_path, monkeypatch):
    monkeypatch.setattr("gate.data.reader._CHUNK_BYTES", 1 << 13)

    def shards(count):
        folder = tmp_path / str(count)
        folder.mkdir()
        for number in range(count):
            members = (written.member(f"{row}.npy", written.npy(ROW)) for row in range(40))
            written.tar(folder / f"{number:03}.tar", members)
        return folder

    few, many = shards(4), shards(20)
    measure_peak_memory(few)  # Warm up: imports take memory too.
    # The position of each row takes another hundred bytes.
    assert measure_peak_memory(many) < measure_peak_memory(few) + 16 * 40 * ROW.nbytes * 0.75


@pytest.mark.parametrize("write", [written.parquet, written.arrow])
def test_memory_of_columns(write, tmp_path, monkeypatch):
    """Read one group of incompressible rows in parts."""
    monkeypatch.setattr("gate.data.reader._CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr("gate.data.columnar_files._BATCH_BYTES", 1 << 18)
    values = np.random.default_rng(0).normal(size=(4000, 1024)).astype(np.float32)
    path = write(tmp_path / f"x.{write.__name__}", pa.table({"input": written.fixed(values)}))
    samples = SampleSet.open(path)
    before, most = pa.total_allocated_bytes(), 0
    for _ in samples.batches(32):
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < values.nbytes / 4


@pytest.mark.further
def test_tar_is_read_without_torch(tmp_path):
    """Read a tar without torch, which takes 0.5 GB in each worker process."""
    path = written.tar(tmp_path / "x.tar", written.members())
    code = (
        "import sys; from gate.data.samples import SampleSet\n"
        f"samples = SampleSet.open({str(path)!r}); samples.digest(); list(samples.batches(4))\n"
        "print({'torch', 'PIL.Image'} & set(sys.modules))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "set()"
