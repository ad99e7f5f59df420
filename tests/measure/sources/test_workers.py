"""Worker processes read samples ahead."""

import os

import numpy as np
import pytest

from gate import PreprocessSpec, SampleSet
from gate.data import open_samples
from gate.data.open_samples import Opening, ReadAheadReader, _WorkerSamples
from gate.errors import DataError, StorageError
from tests.measure.sources import factories
from tests.measure.sources.factories import HERE, X, Y

SPEC = PreprocessSpec()


@pytest.mark.proof
def test_workers_give_the_same_samples():
    alone = SampleSet.open(f"{HERE}:picture_bytes", preprocessing=SPEC)
    ahead = SampleSet.open(f"{HERE}:picture_bytes", preprocessing=SPEC, decode_workers=2)
    expected = [batch["input"] for batch in alone.batches(1)]

    interrupted = ahead.batches(1)
    next(interrupted), next(interrupted)
    interrupted.close()
    for size in (1, 2):
        result = np.concatenate([batch["input"] for batch in ahead.batches(size)])
        np.testing.assert_array_equal(result, np.concatenate(expected))
    concurrent = zip(ahead.batches(1), ahead.batches(1), strict=True)
    assert all((item["input"] == other_item["input"]).all() for item, other_item in concurrent)
    assert ahead.digest() == alone.digest()
    np.testing.assert_array_equal(ahead.labels(), alone.labels())


@pytest.mark.rows(3)
@pytest.mark.proof
@pytest.mark.parametrize(("factory", "error", "words"), [
    ("failing", DataError, r"^sample 4 of .* raised ValueError: cannot decode"),
    ("deadly", StorageError, "reads .* ahead ended.*--decode-workers 1"),
    ("other_in_each_process", DataError, "samples 2 to 3 .* others in another process"),
])  # fmt: skip
def test_error_in_a_worker_is_raised(factory, error, words, monkeypatch):
    monkeypatch.setattr(factories, "PID", os.getpid())
    samples = SampleSet.open(f"{HERE}:{factory}", decode_workers=1)
    with pytest.raises(error, match=words):
        list(samples.batches(2))


def test_worker_returns_arrays_or_the_error():
    opened = _WorkerSamples(Opening(f"{HERE}:pairs"))
    arrays, labels = opened[range(2, 5)]
    np.testing.assert_array_equal(arrays["input"], X[2:5])
    np.testing.assert_array_equal(labels, Y[2:5])
    kind, words = _WorkerSamples(Opening(f"{HERE}:failing"))[range(3, 5)]
    assert kind == "DataError"
    assert "sample 4" in words


@pytest.mark.parametrize(
    ("said", "error"), [("StorageError", StorageError), ("OSError", DataError)]
)
def test_error_of_a_worker_keeps_its_type(said, error, monkeypatch):
    monkeypatch.setattr(
        ReadAheadReader, "_results", lambda _, spans: [(said, "no room")] * len(spans)
    )
    samples = SampleSet.open(f"{HERE}:pairs", decode_workers=1)
    with pytest.raises(error, match="no room"):
        list(samples.batches(4))


@pytest.mark.parametrize(("wanted", "cores", "alone_s", "pays"), [
    (None, 8, 60.0, True),
    (None, 8, 1.0, False),
    (None, 1, 60.0, False),
    (2, 1, 0.1, True),
    (2, 1, 0.0, False),
    (0, 8, 60.0, False),
])  # fmt: skip
def test_workers_are_started_only_when_faster(wanted, cores, alone_s, pays, monkeypatch):
    monkeypatch.setattr(open_samples, "logical_cores", lambda: cores)
    opening = Opening(f"{HERE}:pairs")
    assert ReadAheadReader(opening.rows(), opening, wanted)._is_worthwhile(alone_s) is pays


@pytest.mark.parametrize("workers", [0, 2, None])
def test_first_batch_starts_no_worker(workers, monkeypatch):
    monkeypatch.setattr(
        ReadAheadReader, "_start_loader", lambda _: pytest.fail("workers were started")
    )
    samples = SampleSet.open(f"{HERE}:pairs", decode_workers=workers)
    next(samples.batches(4))
    samples.at([3, 8])
    samples.take([3])
    list(samples.slice(2, 6).batches(4))
