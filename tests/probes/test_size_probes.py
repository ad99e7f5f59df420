"""The profile of the samples, and probes of other batch sizes and input sizes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from gate import Digest
from gate.policy.sections import DeterminismPolicy
from gate.probes.probe import SampleProfile
from gate.probes.size_probes import DynamicAxes, batch_probes, length_probes, size_probes
from gate.reference.random_rounding import seed as rounding_seed
from tests.modules import Layers
from tests.probes import benches

DIGEST = Digest.from_bytes(b"file")
"""This digest selects the batch sizes 8 and 44."""
X = benches.images()
ALL = {2: "height", 3: "width"}


def create_size_probes(arrays, **axes):
    context = benches.create_context(nn.Identity(), arrays)
    observed = benches.create_profile(nn.Identity(), arrays)
    result = DynamicAxes.from_inputs(context, observed, benches.specs(arrays, **axes))
    return {probe.name: probe.batch for probe in size_probes(result)}


@pytest.mark.parametrize(("options", "names"), [
    ({}, ["batch_1", "batch_4", "batch_7", "batch_8", "batch_44"]),
    ({"probe_batch_sizes": (2, 30)}, ["batch_2", "batch_30", "batch_15", "batch_44"]),
    ({"probe_batch_sizes": (16, 44)}, ["batch_16", "batch_44", "batch_14"]),
    ({"fixed": 6}, ["batch_6"]),
])  # fmt: skip
def test_batch_probes(options, names):
    context = benches.create_context(nn.Identity(), {"x": X}, **options)
    observed = benches.create_profile(nn.Identity(), {"x": X}, **options)
    probes = list(batch_probes(context, observed, DIGEST))
    assert [probe.name for probe in probes] == names
    for probe in probes:
        assert len(probe.batch["x"]) == probe.size == int(probe.name.removeprefix("batch_"))
        assert {row.tobytes() for row in probe.batch["x"]} <= {row.tobytes() for row in X[:8]}
        if probe.size in context.policy.instruments.probe_batch_sizes:
            assert np.array_equal(probe.batch["x"], X[np.arange(probe.size) % 8])


def test_drawn_batches_are_reproducible():
    context, observed = (
        benches.create_context(nn.Identity(), {"x": X}),
        benches.create_profile(nn.Identity(), {"x": X}),
    )
    *_, first = batch_probes(context, observed, DIGEST)
    *_, second = batch_probes(context, observed, DIGEST)
    assert np.array_equal(first.batch["x"], second.batch["x"])
    assert not np.array_equal(first.batch["x"][:8], X[:8])
    assert len(np.unique(first.batch["x"], axis=0)) > 5


def test_no_size_probe_without_dynamic_axis():
    assert create_size_probes({"x": X}) == {}


def test_sizes_of_two_dynamic_axes():
    observed = create_size_probes({"x": X}, x=ALL)
    assert list(observed) == [
        "size_6x6", "size_10x10", "size_9x9", "size_6x10", "size_25x8", "size_8x25",
    ]  # fmt: skip
    for name, batch in observed.items():
        height, width = map(int, name.removeprefix("size_").split("x"))
        assert batch["x"].shape == (1, 3, height, width)
    assert np.array_equal(observed["size_6x6"]["x"], X[:1, :, :6, :6])
    assert np.array_equal(observed["size_10x10"]["x"][..., 8:, :8], X[:1, :, :2])


@pytest.mark.parametrize(("names", "together"), [
    (("?", "?"), True),
    (("s27", "s55"), True),
    (("tokens_dynamic_axes_1", "mask_dynamic_axes_1"), True),
    (("unk__0", "?"), True),
    (("question", "answer"), False),
    (("length", "?"), False),
])  # fmt: skip
def test_unnamed_axes_of_equal_length_change_together(names, together):
    arrays = {"tokens": benches.tokens(), "mask": benches.tokens() > 5}
    observed = create_size_probes(arrays, tokens={1: names[0]}, mask={1: names[1]})
    assert (
        all((batch["tokens"].shape == batch["mask"].shape) for batch in observed.values())
        == together
    )


def test_unnamed_axes_of_different_length_change_separately():
    arrays = {"tokens": benches.tokens(), "mask": benches.tokens()[:, :-1] > 5}
    observed = create_size_probes(arrays, tokens={1: "s27"}, mask={1: "s55"})
    lengths = {(batch["tokens"].shape[1], batch["mask"].shape[1]) for batch in observed.values()}
    assert len({item - second for item, second in lengths}) > 1


def test_axes_with_equal_name_change_together():
    arrays = {"tokens": benches.tokens(), "mask": benches.tokens() > 5}
    observed = create_size_probes(arrays, tokens={1: "length"}, mask={1: "length"})
    assert list(observed) == [
        "size_3",
        "size_6",
        "size_7",
        "size_1",
        "size_2",
        "size_10",
        "size_16",
        "size_50",
    ]
    for batch in observed.values():
        assert batch["tokens"].shape == batch["mask"].shape


@pytest.mark.parametrize(("name", "width", "holds"), [
    ("past + length", 13, True),
    ("past + length + 2", 15, True),
    ("past + length", 14, False),
    ("past + 5", 13, True),
    ("past + width", 13, False),
    ("total", 13, False),
])  # fmt: skip
def test_axis_named_as_a_sum_is_as_long_as_its_addends(name, width, holds):
    arrays = {
        "tokens": benches.tokens(),
        "cache": np.ones((len(benches.tokens()), 8, 3), np.float32),
        "mask": np.ones((len(benches.tokens()), width), np.int64),
    }
    observed = create_size_probes(arrays, tokens={1: "length"}, cache={1: "past"}, mask={1: name})
    kept = {
        batch["mask"].shape[1]
        == width
        + (batch["cache"].shape[1] - 8)
        + ("length" in name) * (batch["tokens"].shape[1] - arrays["tokens"].shape[1])
        for batch in observed.values()
    }
    assert (kept == {True}) == holds


def _mask_follows(observed):
    return {
        batch["mask"].shape[1] == batch["cache"].shape[1] + batch["tokens"].shape[1]
        for batch in observed
    } == {True}


@pytest.mark.parametrize(("tokens", "mask", "refuses", "follows"), [
    (5, np.ones, lambda total, addends: total != addends, True),
    (1, np.ones, lambda total, addends: total != addends, True),  # one static token
    (5, np.ones, lambda total, addends: False, False),
    (5, np.ones, lambda total, addends: total != 13, False),  # a length that the trace baked in
    (5, lambda shape, dtype: np.full(shape, 7, dtype), lambda total, addends: total != addends,
     False),  # no mask
])  # fmt: skip
def test_mask_is_as_long_as_cache_and_tokens_if_the_file_requires_it(
    tokens, mask, refuses, follows
):
    arrays = {
        "tokens": np.arange(6 * tokens).reshape(6, tokens),
        "cache": np.ones((6, 8, 3), np.float32),
        "mask": mask((6, 8 + tokens), np.int64),
    }
    named = {"cache": {1: "past"}, "mask": {1: "total"}}
    if tokens > 1:
        named["tokens"] = {1: "length"}
    context = benches.create_context(nn.Identity(), arrays)
    profile = benches.create_profile(nn.Identity(), arrays)
    axes = DynamicAxes.from_inputs(context, profile, benches.specs(arrays, **named))

    def runs(batch):
        addends = batch["cache"].shape[1] + batch["tokens"].shape[1]
        return not refuses(batch["mask"].shape[1], addends)

    batches = [probe.batch for probe in size_probes(axes.with_masks(runs))]
    assert len(batches) > 2
    assert _mask_follows(batches) == follows


def test_mask_whose_length_another_axis_adds_stays_an_axis():
    sizes = {"tokens": 5, "cache": 8, "mask": 13, "wide": 15}
    arrays = {name: np.ones((6, size), np.int64) for name, size in sizes.items()}
    arrays["tokens"] += np.arange(5)
    named = {"tokens": {1: "length"}, "cache": {1: "past"}, "mask": {1: "total"},
             "wide": {1: "total + 2"}}  # fmt: skip
    context = benches.create_context(nn.Identity(), arrays)
    profile = benches.create_profile(nn.Identity(), arrays)
    axes = DynamicAxes.from_inputs(context, profile, benches.specs(arrays, **named))

    def runs(batch):
        return batch["mask"].shape[1] == batch["cache"].shape[1] + batch["tokens"].shape[1]

    batches = [probe.batch for probe in size_probes(axes.with_masks(runs))]
    assert {batch["wide"].shape[1] - batch["mask"].shape[1] for batch in batches} == {2}


def test_unnamed_axes_of_one_input_change_separately():
    assert "size_6x10" in create_size_probes({"x": X}, x={2: "?", 3: "?"})


def test_axis_named_batch_has_no_size_probe():
    assert create_size_probes({"x": X}, x={2: "batch"}) == {}


def test_size_of_one_stays_positive():
    arrays = {"x": np.ones((3, 1), np.float32)}
    assert {batch["x"].shape[1] for batch in create_size_probes(arrays, x={1: "n"}).values()} == {
        2,
        3,
        4,
        10,
    }


def test_long_sizes_are_probed_for_large_samples():
    small = {"x": np.ones((3, 20, 10), np.float32)}
    large = {"x": np.ones((3, 20, 2**14), np.float32)}
    assert "size_61" in create_size_probes(small, x={1: "length"})
    assert "size_61" in create_size_probes(large, x={1: "length"})
    wide = {"x": np.ones((3, 20, 20), np.float32)}
    assert {"size_61x20", "size_20x61"} <= set(create_size_probes(wide, x={1: "a", 2: "b"}))


def make_position_embedding(most, *, first=0) -> nn.Module:
    return Layers(
        lambda m, tokens: m.words(tokens) + m.places(torch.arange(tokens.shape[1]) + first),
        words=lambda: nn.Embedding(3000, 2),
        places=lambda: nn.Embedding(most, 2),
    )


@pytest.mark.parametrize(("model", "names"), [
    (make_position_embedding(40), ["size_40"]),
    (make_position_embedding(42, first=2), ["size_40"]),
    (make_position_embedding(5), []),
    (make_position_embedding(2000), ["size_1024"]),
    (nn.Embedding(3000, 2), []),
])  # fmt: skip
def test_length_probe_uses_the_number_of_positions(model, names):
    arrays = {"tokens": benches.tokens()}
    with torch.inference_mode():
        context = benches.create_context(model, arrays)
        axes = DynamicAxes.from_inputs(
            context, SampleProfile.from_source(context), benches.specs(arrays, tokens={1: "length"})
        )
        probes = list(length_probes(context, axes))
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
def test_mask_of_another_size_is_constant(mask, usual):
    arrays = {"tokens": benches.tokens()[:2], "mask": mask}
    observed = create_size_probes(arrays, tokens={1: "length"}, mask={1: "length"})
    for name, batch in observed.items():
        length = int(name.removeprefix("size_"))
        expected = mask[:1, np.arange(length) % 5] if usual is None else np.full((1, length), usual)
        assert np.array_equal(batch["mask"], expected)
        assert batch["mask"].dtype == mask.dtype


@pytest.mark.parametrize("count", [80, 256])
def test_range_is_taken_from_256_samples(count):
    x = np.zeros((count, 2), np.float32)
    x[10, 0], x[-1, 0] = -3.0, 100.0
    observed = benches.create_profile(nn.Identity(), {"x": x})
    assert (observed.low["x"], observed.high["x"]) == (-3.0, 100.0)
    assert observed.low["x"].dtype == np.float32


def test_range_of_more_samples_is_spread():
    x = np.arange(4000, dtype=np.float32).reshape(2000, 2)
    observed = benches.create_profile(nn.Identity(), {"x": x})
    assert (observed.low["x"], observed.high["x"]) == (0.0, 3999.0)
    assert len(observed.spread["x"]) == len(observed.rows["x"]) == 8
    assert np.array_equal(observed.spread["x"][[0, -1]], x[[0, -1]])


def test_of_large_samples_fewer_are_looked_at():
    x = np.zeros((200, 1, 300, 300), np.float16)
    x[1], x[-1] = 1.0, 2.0
    observed = benches.create_profile(nn.Identity(), {"x": x})
    assert (observed.low["x"], observed.high["x"]) == (0.0, 2.0)


@pytest.mark.parametrize(("count", "options", "rows", "small"), [
    (20, {}, 8, 1),
    (3, {}, 3, 1),
    (20, {"probe_batch_sizes": (1, 16)}, 8, 1),
    (12, {"fixed": 4}, 4, 4),
])  # fmt: skip
def test_rows_and_smallest_batch_of_the_profile(count, options, rows, small):
    x = benches.vectors(count)
    observed = benches.create_profile(nn.Identity(), {"x": x}, **options)
    assert (len(observed.rows["x"]), observed.small) == (rows, small)


def test_batch_repeats_samples_and_is_a_copy():
    x = benches.vectors(3)
    observed = benches.create_profile(nn.Identity(), {"x": x})
    batch = observed.batch(5, start=1)["x"]
    assert np.array_equal(batch, x[[1, 2, 0, 1, 2]])
    batch[:] = 0.0
    assert np.array_equal(observed.batch(3)["x"], x)


@pytest.mark.parametrize("seed", [-1, 0, 2**64 - 1])
def test_any_policy_seed_is_accepted(seed):
    observed = benches.create_profile(nn.Identity(), {"x": benches.vectors()})
    accepted = rounding_seed(DeterminismPolicy(seed=seed), 0)
    assert 0.0 <= replace(observed, seed=accepted).random("a").random() < 1.0


def test_random_numbers_depend_on_seed_and_name():
    observed = benches.create_profile(nn.Identity(), {"x": benches.vectors()})
    first = observed.random("a").random()
    assert observed.random("b").random() != first
    assert observed.random("a").random() == first
