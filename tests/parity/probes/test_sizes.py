from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from gate.parity.probes.sizes import Axes, batch_probes, size_probes
from tests.parity.probes import benches

X = benches.images()
ALL = {2: "height", 3: "width"}


def sized(arrays, **axes):
    stand = benches.stand(nn.Identity(), arrays)
    seen = benches.observed(nn.Identity(), arrays)
    found = Axes.of(stand, seen, benches.specs(arrays, **axes))
    return {probe.name: probe.batch for probe in size_probes(found)}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["batch_1", "batch_4", "batch_7"]),
        ({"probe_batch_sizes": (2, 30)}, ["batch_2", "batch_30"]),
        ({"fixed": 6}, ["batch_6"]),
    ],
)
def test_batches(options, names):
    stand = benches.stand(nn.Identity(), {"x": X}, **options)
    probes = list(batch_probes(stand, benches.observed(nn.Identity(), {"x": X}, **options)))
    assert [probe.name for probe in probes] == names
    for probe in probes:
        assert len(probe.batch["x"]) == probe.size == int(probe.name.removeprefix("batch_"))
        assert np.array_equal(probe.batch["x"], X[np.arange(probe.size) % 12])


def test_no_dynamic_axis_no_probe():
    assert sized({"x": X}) == {}


def test_smaller_larger_odd_and_not_square():
    seen = sized({"x": X}, x=ALL)
    assert list(seen) == ["size_6x6", "size_10x10", "size_9x9", "size_6x10"]
    for name, batch in seen.items():
        height, width = map(int, name.removeprefix("size_").split("x"))
        assert batch["x"].shape == (1, 3, height, width)
    assert np.array_equal(seen["size_6x6"]["x"], X[:1, :, :6, :6])
    assert np.array_equal(seen["size_10x10"]["x"][..., 8:, :8], X[:1, :, :2])


def test_axes_of_one_name_change_together():
    arrays = {"tokens": benches.tokens(), "mask": benches.tokens() > 5}
    seen = sized(arrays, tokens={1: "length"}, mask={1: "length"})
    assert list(seen) == ["size_3", "size_6", "size_7", "size_10"]
    for batch in seen.values():
        assert batch["tokens"].shape == batch["mask"].shape


def test_axes_without_a_name_are_their_own():
    assert "size_6x10" in sized({"x": X}, x={2: "?", 3: "?"})


def test_an_axis_that_is_called_as_the_batch_is_left_to_it():
    assert sized({"x": X}, x={2: "batch"}) == {}


def test_a_size_of_one_stays_above_zero():
    arrays = {"x": np.ones((3, 1), np.float32)}
    assert {batch["x"].shape[1] for batch in sized(arrays, x={1: "n"}).values()} == {2, 3}
