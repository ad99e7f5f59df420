"""Worker processes read samples ahead."""

import os

import numpy as np
import pytest

from gate import PreprocessSpec, SampleSet
from gate.errors import DataError, StorageError
from tests.measure.sources import factories
from tests.measure.sources.factories import HERE

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
