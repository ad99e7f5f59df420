"""Probes of integer inputs: ranges, table lookups, masks and compared values."""

import numpy as np
import pytest
import torch
from torch import nn

from gate.probes.integer_probes import integer_probes, lookups
from gate.probes.probe import SampleProfile
from tests.probes import benches

TOKENS = benches.tokens()
"""Integers in [3, 20] of shape (12, 5)."""


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


class Table(nn.Module):
    def __init__(self, *sizes, offset=0, reads="embedding"):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 2) for size in sizes)
        self.offset, self.reads = offset, reads

    def forward(self, x):
        x = x.reshape(len(x), -1) + self.offset
        if len(self.tables) > 1:
            return torch.cat([t(x[:, index]) for index, t in enumerate(self.tables)], -1)
        weight = self.tables[0].weight
        if self.reads == "bag":
            return nn.functional.embedding_bag(x, weight)
        if self.reads == "index":
            return weight[x]
        if self.reads == "select":
            return weight.index_select(0, x.flatten())
        if self.reads == "gather":
            return weight.gather(0, x.reshape(-1, 1).expand(-1, 2))
        return self.tables[0](x)


def create_probes(model, arrays, **options):
    context = benches.create_context(model, arrays, **options)
    return {
        probe.name: probe for probe in integer_probes(context, SampleProfile.from_source(context))
    }


def probe_values(model, array, name="values_x", **options):
    return create_probes(model, {"x": array}, **options)[name].batch["x"]


@pytest.mark.parametrize("reads", ["embedding", "bag", "index", "select", "gather"])
def test_probe_reads_each_row_of_a_table(reads):
    model = Table(40, reads=reads)
    observed = create_probes(model, {"x": TOKENS})
    rows = observed["values_x"].batch["x"]
    assert set(rows.ravel()) == set(range(40))
    assert rows.dtype == TOKENS.dtype
    assert observed["values_x"].size == len(rows) <= 64
    assert set(observed) == {"values_x", "below_x"}
    assert (observed["below_x"].batch["x"] == -1).all()


def test_probe_of_a_large_table_reads_ends_and_samples():
    rows = probe_values(Table(30000), TOKENS)
    assert rows.shape == (8, 5)
    assert {0, 21, 22, 29998, 29999} <= set(rows.ravel())
    assert rows.max() == 29999
    assert ((rows > 100) & (rows < 29000)).sum() > 5


def test_each_column_has_its_own_table():
    x = np.random.default_rng(0).integers(0, 3, (12, 3))
    rows = probe_values(Table(3, 11, 50), x)
    for index, size in enumerate((3, 11, 50)):
        assert set(rows[:, index]) == set(range(size))
    assert set(probe_values(Table(3, 400), x[:, :2])[:, 1]) == set(range(400))


def test_columns_without_lookup_keep_their_range():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(30, 2)

        def forward(self, x):
            return self.table(x[:, 0]) + x[:, 1:2]

    x = np.random.default_rng(0).integers(0, 9, (12, 2))
    rows = probe_values(Half(), x)
    assert set(rows[:, 0]) == set(range(30))
    assert set(rows[:, 1]) == set(range(x[:, 1].min(), x[:, 1].max() + 1))


def test_numbers_without_lookup_go_beyond_the_range():
    class Counts(nn.Module):
        def forward(self, x):
            return x * 1.5

    observed = create_probes(Counts(), {"x": TOKENS})
    assert set(observed) == {"values_x", "zero_x", "above_x", "far_x", "below_x", "less_x"}
    assert set(observed["values_x"].batch["x"].ravel()) == set(range(3, 21))
    reported = {
        name: set(observed[name].batch["x"].ravel()) for name in observed if name != "values_x"
    }
    assert reported == {
        "zero_x": {0},
        "above_x": {21},
        "far_x": {41},
        "below_x": {-1},
        "less_x": {1, 2},
    }
    signed = create_probes(Counts(), {"x": TOKENS - 10})
    assert (signed["below_x"].batch["x"] == -8).all()


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [(np.uint8, 0, 255), (np.int8, -128, 127)]
)  # fmt: skip
def test_8_bit_integers_are_tried_completely(dtype, low, high):
    x = np.random.default_rng(0).integers(40, 90, (12, 3, 10, 10)).astype(dtype)
    observed = create_probes(nn.Flatten(), {"x": x})
    assert set(observed) == {"values_x"}
    rows = observed["values_x"].batch["x"]
    assert rows.dtype == dtype
    assert set(rows.ravel()) == set(range(low, high + 1))
    assert rows.shape == (1, 3, 10, 10)
    few = probe_values(nn.Flatten(), x[:, 0, 0, :2])
    assert {low, high} <= set(probe_values(nn.Flatten(), x[:, 0, 0, 0]))
    assert len(few) <= 64


def test_range_ending_at_the_dtype_limit_is_not_exceeded():
    class Counts(nn.Module):
        def forward(self, x):
            return x * 1.5

    x = np.array([[0, 2**31 - 1]] * 3, np.int32)
    assert set(create_probes(Counts(), {"x": x})) == {"values_x", "below_x"}


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int32, np.uint32])
@pytest.mark.parametrize("shape", [(40,), (40, 3)])
def test_full_dtype_range_is_probed_within_the_samples(dtype, shape):
    limits = np.iinfo(dtype)
    x = np.random.default_rng(0).integers(limits.min, limits.max, shape, dtype, endpoint=True)
    x.flat[:2] = limits.min, limits.max
    observed = create_probes(nn.Identity(), {"x": x})
    rows = observed["values_x"].batch["x"]
    assert rows.dtype == dtype
    assert len(set(np.mod(rows.ravel().astype(object), 8))) > 3
    assert all(probe.batch["x"].dtype == dtype for probe in observed.values())


def test_hashes_are_probed_within_the_sample_range():
    x = np.random.default_rng(0).integers(2**60, 2**61, 40)
    observed = create_probes(nn.Identity(), {"x": x})
    assert set(observed) == {"values_x"}
    rows = observed["values_x"].batch["x"]
    assert x.min() <= rows.min()
    assert rows.max() <= x.max()


def test_integers_that_float32_cannot_hold_are_probed():
    x = np.array([0, 5, 2**24 + 6] * 4)
    rows = probe_values(nn.Identity(), x)
    assert (rows.astype(np.float32).astype(np.int64) != rows).any()
    assert rows.max() <= x.max()


MASKS = {
    "int": np.ones((6, 9), np.int64),
    "bool": np.ones((6, 9), np.bool_),
    "float": np.ones((6, 9), np.float32),
    "uint8": np.ones((6, 9), np.uint8),
    "square": np.ones((6, 1, 9, 9), np.float32),
    "types": np.zeros((6, 9), np.int64),
}


@pytest.mark.parametrize("name", MASKS)
def test_constant_mask_is_changed_in_places(name):
    mask = MASKS[name]
    observed = create_probes(nn.Identity(), {"x": mask})
    emptied = {"types": {"full_x"}, "float": set(), "square": set()}.get(name, {"empty_x"})
    assert set(observed) == {"masked_x", *emptied}
    for title in emptied:
        assert (observed[title].batch["x"] != mask[:1]).all()
    rows = observed["masked_x"].batch["x"]
    assert rows.dtype == mask.dtype
    first, second = rows
    assert (first[..., :6] == mask[0][..., :6]).all()
    assert (first[..., 6:] != mask[0][..., 6:]).all()
    assert (second[..., 0] == mask[0][..., 0]).all()
    assert 0 < (second != mask[0]).sum() < second.size


def test_looked_up_types_cover_their_table():
    assert set(create_probes(Table(2), {"x": MASKS["types"]})) == {"masked_x", "full_x"}
    rows = probe_values(Table(6), MASKS["types"])
    assert set(rows.ravel()) == set(range(6))


def test_varying_mask_becomes_empty_and_full():
    assert set(create_probes(nn.Identity(), {"x": TOKENS % 2})) == {"empty_x", "full_x"}


def test_mask_is_not_an_index_of_positions():
    class Placed(nn.Module):
        def __init__(self):
            super().__init__()
            self.places = nn.Embedding(50, 2)

        def forward(self, x):
            return self.places(torch.arange(x.shape[1]))[None] * x[..., None]

    assert set(create_probes(Placed(), {"x": MASKS["int"]})) == {"masked_x", "empty_x"}


def test_other_inputs_stay_samples():
    class Both(nn.Module):
        def forward(self, x, mask):
            return x * mask

    arrays = {"x": TOKENS, "mask": np.ones_like(TOKENS)}
    probe = create_probes(Both(), arrays)["masked_mask"]
    assert np.array_equal(probe.batch["x"], TOKENS[:2])


def test_fixed_batch_is_probed_in_parts():
    observed = create_probes(Table(20), {"x": TOKENS % 10}, fixed=6)
    parts = [observed[f"values_x_{part}"] for part in (1, 2, 3, 4)]
    assert {probe.size for probe in parts} == {6}
    assert {len(probe.batch["x"]) for probe in parts} == {6}
    assert set(np.concatenate([p.batch["x"] for p in parts]).ravel()) == set(range(20))


def test_values_refused_by_the_model_are_skipped():
    class Strict(Table):
        def forward(self, x):
            if x.max() > 25:
                raise ValueError("too far")
            return super().forward(x)

    observed = create_probes(Strict(40), {"x": TOKENS})
    assert set(observed) == {"values_x", "zero_x", "above_x", "far_x", "below_x", "less_x"}
    assert observed["values_x"].batch["x"].max() == 20


def test_failing_model_has_no_lookups():
    class Breaks(nn.Module):
        def forward(self, x):
            raise ValueError

    context = benches.create_context(Breaks(), {"x": TOKENS})
    assert lookups(context, {"x": TOKENS}) == []


def test_lookups_have_the_table_size():
    context = benches.create_context(Table(40, offset=3), {"x": TOKENS})
    (first,) = lookups(context, {"x": TOKENS})
    assert first.size == 40
    assert np.array_equal(first.indices, TOKENS.ravel() + 3)


@pytest.mark.parametrize("value", [0, 1])
def test_constant_number_per_sample_is_changed(value):
    arrays = {"x": benches.vectors(), "task": np.full(12, value)}

    class Tasks(nn.Module):
        def forward(self, x, task):
            return x + task[:, None]

    assert create_probes(Tasks(), arrays)["masked_task"].batch["task"].tolist() == [
        value,
        1 - value,
    ]


class CompareWithBounds(nn.Module):
    def __init__(self, *bounds, dtype=torch.int64):
        super().__init__()
        self.bounds, self.dtype = bounds, dtype

    def forward(self, x):
        return sum((x.to(self.dtype) < bound).float() for bound in self.bounds)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("bounds", [(9,), (7, 15), (9.5, 15.0)])
def test_compared_numbers_are_tried(dtype, bounds):
    tried = probe_values(CompareWithBounds(*bounds, dtype=dtype), TOKENS, "bounds_x")
    for bound in bounds:
        for column in tried.T:
            assert {int(bound) - 1, int(bound), int(bound) + 1} <= set(column)


def test_number_that_may_mark_padding_leaves_one_other_position():
    rows = probe_values(CompareWithBounds(9), TOKENS, "bounds_x")
    kept_indices = [np.flatnonzero(row != 9).tolist() for row in rows]
    assert {(0,), (TOKENS.shape[1] - 1,)} <= set(map(tuple, kept_indices))


def test_bound_is_taken_from_the_same_sample():
    class Within(nn.Module):
        def forward(self, x, last):
            return (x <= last[:, None]).float()

    last = np.arange(6, 18)
    batch = create_probes(Within(), {"x": TOKENS, "last": last})["bounds_x"].batch
    for x, bound in zip(batch["x"], batch["last"], strict=True):
        assert {bound - 1, bound, bound + 1} <= set(x)
    assert len(set(batch["last"])) == 4
