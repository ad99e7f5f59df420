"""What is observed of samples, and probes of other batches and sizes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from gate import Digest
from gate.probes.probe import SampleProfile
from gate.probes.size_probes import DynamicAxes, batch_probes, length_probes, size_probes
from tests.probes import benches

DIGEST = Digest.from_bytes(b"file")
"""Draws the batch sizes 8 and 44."""
X = benches.images()
ALL = {2: "height", 3: "width"}


def sized(arrays, **axes):
    stand = benches.stand(nn.Identity(), arrays)
    seen = benches.observed(nn.Identity(), arrays)
    found = DynamicAxes.from_inputs(stand, seen, benches.specs(arrays, **axes))
    return {probe.name: probe.batch for probe in size_probes(found)}


@pytest.mark.parametrize(("options", "names"), [
    ({}, ["batch_1", "batch_4", "batch_7", "batch_8", "batch_44"]),
    ({"probe_batch_sizes": (2, 30)}, ["batch_2", "batch_30", "batch_15", "batch_44"]),
    ({"probe_batch_sizes": (16, 44)}, ["batch_16", "batch_44", "batch_14"]),
    ({"fixed": 6}, ["batch_6"]),
])  # fmt: skip
def test_batches(options, names):
    stand = benches.stand(nn.Identity(), {"x": X}, **options)
    seen = benches.observed(nn.Identity(), {"x": X}, **options)
    probes = list(batch_probes(stand, seen, DIGEST))
    assert [probe.name for probe in probes] == names
    for probe in probes:
        assert len(probe.batch["x"]) == probe.size == int(probe.name.removeprefix("batch_"))
        assert {row.tobytes() for row in probe.batch["x"]} <= {row.tobytes() for row in X[:8]}
        if probe.size in stand.policy.instruments.probe_batch_sizes:
            assert np.array_equal(probe.batch["x"], X[np.arange(probe.size) % 8])


def test_drawn_batches_mix_the_samples_the_same_way_every_time():
    stand, seen = benches.stand(nn.Identity(), {"x": X}), benches.observed(nn.Identity(), {"x": X})
    *_, one = batch_probes(stand, seen, DIGEST)
    *_, other = batch_probes(stand, seen, DIGEST)
    assert np.array_equal(one.batch["x"], other.batch["x"])
    assert not np.array_equal(one.batch["x"][:8], X[:8])
    assert len(np.unique(one.batch["x"], axis=0)) > 5


def test_no_dynamic_axis_no_probe():
    assert sized({"x": X}) == {}


def test_smaller_larger_odd_and_not_square():
    seen = sized({"x": X}, x=ALL)
    assert list(seen) == [
        "size_6x6", "size_10x10", "size_9x9", "size_6x10", "size_25x8", "size_8x25",
    ]  # fmt: skip
    for name, batch in seen.items():
        height, width = map(int, name.removeprefix("size_").split("x"))
        assert batch["x"].shape == (1, 3, height, width)
    assert np.array_equal(seen["size_6x6"]["x"], X[:1, :, :6, :6])
    assert np.array_equal(seen["size_10x10"]["x"][..., 8:, :8], X[:1, :, :2])


@pytest.mark.parametrize(("names", "together"), [
    (("?", "?"), True),
    (("s27", "s55"), True),
    (("tokens_dynamic_axes_1", "mask_dynamic_axes_1"), True),
    (("unk__0", "?"), True),
    (("question", "answer"), False),
    (("length", "?"), False),
])  # fmt: skip
def test_axes_that_nobody_named_change_together(names, together):
    arrays = {"tokens": benches.tokens(), "mask": benches.tokens() > 5}
    seen = sized(arrays, tokens={1: names[0]}, mask={1: names[1]})
    assert (
        all((batch["tokens"].shape == batch["mask"].shape) for batch in seen.values()) == together
    )


def test_axes_that_nobody_named_of_other_lengths_change_alone():
    arrays = {"tokens": benches.tokens(), "mask": benches.tokens()[:, :-1] > 5}
    seen = sized(arrays, tokens={1: "s27"}, mask={1: "s55"})
    lengths = {(batch["tokens"].shape[1], batch["mask"].shape[1]) for batch in seen.values()}
    assert len({one - other for one, other in lengths}) > 1


def test_axes_of_one_name_change_together():
    arrays = {"tokens": benches.tokens(), "mask": benches.tokens() > 5}
    seen = sized(arrays, tokens={1: "length"}, mask={1: "length"})
    assert list(seen) == [
        "size_3",
        "size_6",
        "size_7",
        "size_1",
        "size_2",
        "size_10",
        "size_16",
        "size_50",
    ]
    for batch in seen.values():
        assert batch["tokens"].shape == batch["mask"].shape


def test_axes_without_a_name_are_their_own():
    assert "size_6x10" in sized({"x": X}, x={2: "?", 3: "?"})


def test_an_axis_that_is_called_as_the_batch_is_left_to_it():
    assert sized({"x": X}, x={2: "batch"}) == {}


def test_a_size_of_one_stays_above_zero():
    arrays = {"x": np.ones((3, 1), np.float32)}
    assert {batch["x"].shape[1] for batch in sized(arrays, x={1: "n"}).values()} == {2, 3, 4, 10}


def test_of_large_samples_none_becomes_much_longer():
    small = {"x": np.ones((3, 20, 10), np.float32)}
    large = {"x": np.ones((3, 20, 2**14), np.float32)}
    assert "size_61" in sized(small, x={1: "length"})
    assert "size_61" in sized(large, x={1: "length"})
    wide = {"x": np.ones((3, 20, 20), np.float32)}
    assert {"size_61x20", "size_20x61"} <= set(sized(wide, x={1: "a", 2: "b"}))


class Placed(nn.Module):
    def __init__(self, most, *, first=0):
        super().__init__()
        self.words, self.places = nn.Embedding(3000, 2), nn.Embedding(most, 2)
        self.first = first

    def forward(self, tokens):
        return self.words(tokens) + self.places(torch.arange(tokens.shape[1]) + self.first)


@pytest.mark.parametrize(("model", "names"), [
    (Placed(40), ["size_40"]),
    (Placed(42, first=2), ["size_40"]),
    (Placed(5), []),
    (Placed(2000), ["size_1024"]),
    (nn.Embedding(3000, 2), []),
])  # fmt: skip
def test_as_long_as_the_places_that_are_counted(model, names):
    arrays = {"tokens": benches.tokens()}
    with torch.inference_mode():
        stand = benches.stand(model, arrays)
        axes = DynamicAxes.from_inputs(
            stand, SampleProfile.from_source(stand), benches.specs(arrays, tokens={1: "length"})
        )
        probes = list(length_probes(stand, axes))
    assert [probe.name for probe in probes] == names
    assert [f"size_{probe.batch['tokens'].shape[1]}" for probe in probes] == names


@pytest.mark.parametrize(("mask", "usual"), [
    (np.array([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]]), 1),
    (np.array([[True, False, False, False, False]] * 2), True),
    (np.array([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]), 0),
    (np.array([[1, 0, 0, 0, 1], [0, 0, 0, 1, 1]]), 1),
    (np.array([[1, 0, 0, 1, 1], [1, 1, 1, 1, 1]], np.float32), 1.0),
    (np.array([[0, 2, 0, 1, 1], [1, 1, 1, 1, 1]]), None),
])  # fmt: skip
def test_a_mask_is_the_same_everywhere_in_another_size(mask, usual):
    arrays = {"tokens": benches.tokens()[:2], "mask": mask}
    seen = sized(arrays, tokens={1: "length"}, mask={1: "length"})
    for name, batch in seen.items():
        length = int(name.removeprefix("size_"))
        expected = mask[:1, np.arange(length) % 5] if usual is None else np.full((1, length), usual)
        assert np.array_equal(batch["mask"], expected)
        assert batch["mask"].dtype == mask.dtype


@pytest.mark.parametrize("count", [80, 256])
def test_the_range_is_that_of_256_samples(count):
    x = np.zeros((count, 2), np.float32)
    x[10, 0], x[-1, 0] = -3.0, 100.0
    seen = benches.observed(nn.Identity(), {"x": x})
    assert (seen.low["x"], seen.high["x"]) == (-3.0, 100.0)
    assert seen.low["x"].dtype == np.float32


def test_of_more_it_is_that_of_samples_from_everywhere():
    x = np.arange(4000, dtype=np.float32).reshape(2000, 2)
    seen = benches.observed(nn.Identity(), {"x": x})
    assert (seen.low["x"], seen.high["x"]) == (0.0, 3999.0)
    assert len(seen.spread["x"]) == len(seen.rows["x"]) == 8
    assert np.array_equal(seen.spread["x"][[0, -1]], x[[0, -1]])


def test_of_large_samples_fewer_are_looked_at():
    x = np.zeros((200, 1, 300, 300), np.float16)
    x[1], x[-1] = 1.0, 2.0
    seen = benches.observed(nn.Identity(), {"x": x})
    assert (seen.low["x"], seen.high["x"]) == (0.0, 2.0)


@pytest.mark.parametrize(("count", "options", "rows", "small"), [
    (20, {}, 8, 1),
    (3, {}, 3, 1),
    (20, {"probe_batch_sizes": (1, 16)}, 8, 1),
    (12, {"fixed": 4}, 4, 4),
])  # fmt: skip
def test_material(count, options, rows, small):
    x = benches.vectors(count)
    seen = benches.observed(nn.Identity(), {"x": x}, **options)
    assert (len(seen.rows["x"]), seen.small) == (rows, small)


def test_a_batch_goes_round_and_belongs_to_the_caller():
    x = benches.vectors(3)
    seen = benches.observed(nn.Identity(), {"x": x})
    batch = seen.batch(5, start=1)["x"]
    assert np.array_equal(batch, x[[1, 2, 0, 1, 2]])
    batch[:] = 0.0
    assert np.array_equal(seen.batch(3)["x"], x)


@pytest.mark.parametrize("seed", [-1, 0, 2**70])
def test_any_seed_of_a_policy_will_do(seed):
    seen = benches.observed(nn.Identity(), {"x": benches.vectors()})
    assert 0.0 <= replace(seen, seed=seed).random("a").random() < 1.0


def test_randomness_depends_on_seed_and_name_alone():
    seen = benches.observed(nn.Identity(), {"x": benches.vectors()})
    first = seen.random("a").random()
    assert seen.random("b").random() != first
    assert seen.random("a").random() == first
