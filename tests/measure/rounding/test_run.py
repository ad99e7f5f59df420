from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gate.measure.context import MeasurementContext
from gate.policy.sections import DeterminismPolicy
from gate.reference.random_rounding import RoundingRun
from tests.probes import benches


class Counting(nn.Module):
    """A model that records the number of threads of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        THREADS.append(torch.get_num_threads())
        return self.layer(x)


THREADS: list[int] = []


@pytest.fixture(autouse=True)
def use_two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    THREADS.clear()
    with torch.inference_mode():
        yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def rows(count: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).normal(size=(count, 8)).astype(np.float32)}


def context(*, determinism: DeterminismPolicy | None = None) -> MeasurementContext:
    default = benches.create_context(Counting(), rows(4))
    if determinism is None:
        return default
    policy = default.policy.model_copy(update={"determinism": determinism})
    return MeasurementContext(
        default.model,
        default.reference,
        default.truth,
        default.binding,
        default.samples,
        policy,
        default.tested_file,
    )


def test_rounded_runs_are_reproducible_by_draw():
    bench, batch = context(), rows(4)
    (exact,) = bench.reference.run(batch)
    (first,), (repeated,), (other_draw,) = (bench.rounded_run(batch, draw=n) for n in (0, 0, 1))
    assert np.array_equal(first, repeated)
    assert not np.array_equal(first, other_draw)
    assert not np.array_equal(first, exact)
    assert np.allclose(first, exact, rtol=1e-4)


class Wide(nn.Module):
    """A model that needs 8 MiB per sample; `company` mixes the samples of a batch."""

    def __init__(self, company=lambda x: x) -> None:
        super().__init__()
        self.company = company
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        wide = torch.ones(len(x), 2**21) * x[:, :1]
        return self.company(x[:, :4] * 1.1) + wide.amax(1, keepdim=True)


def list_batch_sizes(model: nn.Module) -> tuple[list[int], list[int]]:
    """Return the batch sizes of a forward under random rounding and of one in float64."""
    bench = benches.create_context(model, rows(6))
    bench.measure_sample_bytes()
    bench.truth.part_size = bench.part_size
    batch = rows(6)
    bench.part_size(batch)
    observed = bench.model.module.sizes
    observed.clear()
    unrounded = bench.rounding_run(batch, RoundingRun(scale=0.0))
    assert np.allclose(unrounded[0], bench.answers.reference(batch)[0], rtol=1e-6)
    change = bench.rounded_run(batch, draw=0)[0] - unrounded[0]
    assert not np.array_equal(change[0], change[1])
    rounded, double = list(observed), bench.truth._float64.model.sizes
    double.clear()
    assert bench.truth.extra_outputs(batch)[0].shape == unrounded[0].shape
    return rounded, double


def test_large_tensors_are_computed_one_sample_at_a_time():
    rounded, double = list_batch_sizes(Wide())
    assert set(rounded) == set(double) == {1}


@pytest.mark.further
@pytest.mark.parametrize("company", [
    lambda x: x - x.mean(0),
    lambda x: x / x.abs().max(),
    lambda x: x.cumsum(0),
    lambda x: x + len(x),
    lambda x: x.mean(0, keepdim=True),
    lambda x: x + x[:1],
], ids=["mean", "largest", "sum of those before", "count", "one row", "the first"])  # fmt: skip
def test_batch_is_not_split_when_samples_depend_on_each_other(company):
    rounded, double = list_batch_sizes(Wide(company))
    assert set(rounded) == set(double) == {6}
