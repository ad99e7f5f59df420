"""No verdict gets worse with more correct samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gate.api import check
from gate.data.samples import SampleSet
from gate.decision.check_result import Verdict
from gate.measure.job import EvaluationData, Reference
from gate.policy.policy import Policy
from gate.policy.sections import Instruments
from gate.records.evidence import Source
from tests.exhaustive import exhaustive
from tests.inferred_roles.nets import FEATURES, Net, exported

POLICY = Policy.default().model_copy(
    update={"instruments": Instruments(probes=False, search_inputs=0)}
)
COUNTS = (48, 300, 1500)
RANK = {Verdict.PASS: 0, Verdict.ERROR: 1, Verdict.FAIL: 2}


def heavy_tail(net: Net, x: torch.Tensor) -> object:
    return torch.exp(3.0 * x)


def rare_events(net: Net, x: torch.Tensor) -> object:
    return torch.sigmoid(x - 5.0)


def running(net: Net, x: torch.Tensor) -> object:
    return x.repeat(1, 50).cumsum(1)


def nearest(net: Net, x: torch.Tensor) -> object:
    """Integers of which rounding decides some, the scores of which it decides none."""
    return (x @ net.body[2].weight[:, :8]).argmax(1), torch.round(x * 4000.0).to(torch.int32)


def words(net: Net, x: torch.Tensor) -> object:
    return torch.log_softmax(6.0 * x, dim=1)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[nn.Module, Path]]:
    folder = tmp_path_factory.mktemp("more")
    heads: list[Callable[[Net, torch.Tensor], object]] = [
        heavy_tail, rare_events, running, nearest, words,
    ]  # fmt: skip
    nets = [(head.__name__, Net(head, seed=3)) for head in heads]
    return [(net, exported(net, folder / f"{name}.onnx")) for name, net in nets]


@exhaustive
@given(net=st.integers(0, 4), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10, derandomize=True)
@pytest.mark.proof
def test_no_verdict_gets_worse(files, net: int, seed: int) -> None:
    model, onnx = files[net]
    rows = np.random.default_rng(seed).normal(size=(COUNTS[-1], FEATURES)).astype(np.float32)
    verdicts = [verdict_of(model, onnx, rows[:count]) for count in COUNTS]
    ranks = [RANK[verdict] for verdict in verdicts]
    assert ranks == sorted(ranks, reverse=True), verdicts
    assert verdicts[-1] is Verdict.PASS


def verdict_of(model: nn.Module, onnx: Path, rows: np.ndarray) -> Verdict:
    workload = EvaluationData(SampleSet.from_arrays({"input": rows}), batch_size=50)
    reference = Reference(model, Source(factory="tests:net"))
    return check(onnx, reference=reference, data=workload, policy=POLICY).decision.verdict
