from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gate.errors import EvidenceError
from gate.measure.context import MeasurementContext
from gate.policy.sections import DeterminismPolicy
from gate.reference.random_rounding import seed
from tests.parity.probes import benches


class Counting(nn.Module):
    """Notes with how many threads it is run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        THREADS.append(torch.get_num_threads())
        return self.layer(x)


THREADS: list[int] = []


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    THREADS.clear()
    with torch.inference_mode():
        yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def rows(count: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).normal(size=(count, 8)).astype(np.float32)}


def stand(*, determinism: DeterminismPolicy | None = None) -> MeasurementContext:
    made = benches.stand(Counting(), rows(4))
    if determinism is None:
        return made
    policy = made.policy.model_copy(update={"determinism": determinism})
    return MeasurementContext(
        made.model,
        made.reference,
        made.truth,
        made.binding,
        made.samples,
        policy,
        made.tested_file,
    )


def test_runs_are_reproducible_by_their_number_and_move_what_is_computed() -> None:
    bench, batch = stand(), rows(4)
    (still,) = bench.reference.run(batch)
    (one,), (again,), (other,) = (bench.rounded_run(batch, draw=n) for n in (0, 0, 1))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    assert not np.array_equal(one, still)
    assert np.allclose(one, still, rtol=1e-4)


@pytest.mark.parametrize(
    ("count", "asked", "threads"), [(4, None, 1), (2**15 + 1, None, 2), (4, 2, 2), (4, 1, 2)]
)
def test_a_small_batch_has_one_thread_unless_the_policy_says_how_many(
    count: int, asked: int | None, threads: int
) -> None:
    """The policy's own number is set before, around the whole measurement."""
    bench = stand(determinism=DeterminismPolicy(threads=asked))
    THREADS.clear()
    bench.rounded_run(rows(count), draw=0)
    assert threads == THREADS[0]


def test_threads_are_restored_where_the_model_fails() -> None:
    with pytest.raises(EvidenceError):
        stand().rounded_run({"x": np.zeros((2, 7), np.float32)}, draw=0)


@pytest.mark.parametrize("own", [-1, 2**63 + 5])
def test_any_seed_of_a_policy_is_one_of_a_generator(own: int) -> None:
    assert 0 <= seed(DeterminismPolicy(seed=own), 3) < 2**64
