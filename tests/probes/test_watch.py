from __future__ import annotations

import numpy as np
import pytest
import torch

from gate.probes.branches import BranchRecorder

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def reads(function):
    with BranchRecorder() as watch:
        function(X)
    return [(read.branch, read.margin) for read in watch.reads]


@pytest.mark.parametrize(
    ("function", "branch", "margin"),
    [
        (lambda x: bool(x.sum() > 7), True, 3.0),
        (lambda x: bool(x.sum() > 12), False, -2.0),
        (lambda x: bool(x.sum() >= 10), True, 0.0),
        (lambda x: bool(x.sum() < 7), False, -3.0),
        (lambda x: bool(torch.lt(torch.tensor(7), x.sum())), True, 3.0),
        (lambda x: bool(x.max() <= x.sum()), True, 6.0),
        (lambda x: bool(torch.gt(x.max(), 3)), True, 1.0),
        (lambda x: bool((x > 3.5).any()), True, 0.5),
        (lambda x: bool((x > 3.5).all()), False, -2.5),
        (lambda x: bool((x > 5).any()), False, -1.0),
        (lambda x: bool(~(x.sum() > 7)), False, -3.0),
        (lambda x: bool((x.sum() > 7) & (x.max() > 1)), True, 3.0),
        (lambda x: bool((x.sum() > 7) | (x.max() > 9)), True, 3.0),
        (lambda x: bool(x.sum() == 9), False, -1.0),
        (lambda x: bool(x.sum() != 9), True, 1.0),
        (lambda x: bool(x[0, 0]), True, None),
        (lambda x: bool((x > 3.5).any(dim=1)[0]), False, None),
        (lambda x: (x.sum() > 7).item(), True, 3.0),
        (lambda x: 2.0 in x, True, None),
        (lambda x: torch.equal(x, x), True, None),
        (lambda x: torch.allclose(x, x + 1), False, None),
        (lambda x: bool((x > 0).isnan().any()), False, None),
    ],
)
def test_branches_and_how_near_they_are(function, branch, margin):
    assert reads(function) == [(branch, margin)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: float(x.max()),
        lambda x: int(x.max()),
        lambda x: x.max().item(),
        lambda x: [0] * int(x.argmax()),
        lambda x: "abcd"[x.argmax()],
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: np.asarray(x) > 2,
        lambda x: complex(x.max()),
    ],
)
def test_numbers_that_are_read(function):
    assert reads(function) == [(None, None)]


def test_what_is_no_read():
    assert (
        reads(lambda x: (len(x), x.shape[0], x.sum() > 3, x.dim(), torch.where(x > 1, x, 0))) == []
    )


def test_the_path():
    with BranchRecorder() as watch:
        if X.sum() > 1:
            float(X.max())
        if X.sum() > 100:
            raise AssertionError
    assert watch.path == (True, False)
