"""Recorded calls of the modules become the samples of their files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gate.errors import DataError, ModelError
from gate.multi_file.chain_model import CallRecorder, ChainModel


def make_chain(function: Any, **parts: nn.Module) -> ChainModel:
    return ChainModel(function, parts, ["x"])


def batches(*sizes: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(size, 3)).astype(np.float32)} for size in sizes]


def test_calls_become_samples_in_order() -> None:
    calls, first = CallRecorder(), nn.Identity()
    chain = make_chain(lambda parts, batch: parts["one"](batch["x"] * 2), one=first)
    arguments = batches(4, 4, 2)
    for batch in arguments:
        calls.record(chain, batch)
    samples = calls.for_part("one").samples(("y",), part="one")
    rows = np.concatenate([batch["x"] * 2 for batch in arguments])
    assert len(samples) == 10
    assert np.array_equal(next(samples.batches(10))["y"], rows)


def test_growing_steps_are_skipped_and_counted() -> None:
    """A decoder is called again with its own output."""

    def steps(parts: Any, batch: Any) -> Any:
        x = batch["x"]
        for _ in range(3):
            x = torch.cat([x, parts["one"](x)], dim=1)
        return x

    calls = CallRecorder()
    for batch in batches(4, 4):
        calls.record(make_chain(steps, one=nn.Identity()), batch)
    part_calls = calls.for_part("one")
    assert (part_calls.rows, part_calls.left_out) == (8, 4)
    assert part_calls.samples(("y",), part="one").specs[0].shape == ("samples", 3)


@pytest.mark.parametrize(
    "given", [(torch.zeros(()),), (torch.zeros(4, 2), torch.zeros(3, 2)), ()], ids=str
)
def test_call_without_a_sample_axis_is_refused(given: tuple[torch.Tensor, ...]) -> None:
    class Takes(nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return torch.zeros(1)

    calls = CallRecorder()
    calls.record(make_chain(lambda parts, _: parts["one"](*given), one=Takes()), batches(4)[0])
    part_calls = calls.for_part("one")
    assert len(part_calls.example) == len(
        given
    )  # the example is enough if samples are given, and for the chain
    with pytest.raises(DataError, match="the part one: they share no batch axis"):
        part_calls.samples(part_calls.names, part="one")


def test_arguments_are_recorded_before_in_place_changes() -> None:
    def shift(parts: Any, batch: Any) -> Any:
        y = parts["one"](batch["x"])
        return y.add_(1)

    calls, (batch,) = CallRecorder(), batches(4)
    calls.record(make_chain(shift, one=nn.Identity()), batch)
    assert np.array_equal(
        next(calls.for_part("one").samples(("y",), part="one").batches(4))["y"], batch["x"]
    )


class DoublesInPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


@pytest.mark.parametrize("copied", [False, True])
def test_inputs_are_recorded_before_the_module_changes_them(copied: bool) -> None:
    calls, (batch,) = CallRecorder(), batches(4)
    chain = make_chain(
        lambda parts, b: parts["one"](b["x"].clone() if copied else b["x"]), one=DoublesInPlace()
    )
    calls.record(chain, batch)
    part_calls = calls.for_part("one")
    (recorded,) = part_calls.samples(("x",), part="one").batches(4)
    assert np.array_equal(recorded["x"], batch["x"])
    assert part_calls.overwritten == "x"
    unchanged = CallRecorder()
    unchanged.record(make_chain(lambda parts, b: parts["one"](b["x"]), one=nn.ReLU()), batch)
    assert unchanged.for_part("one").overwritten is None


class Takes(nn.Module):
    def forward(self, image: torch.Tensor, mask: Any = None) -> torch.Tensor:
        return image


@pytest.mark.parametrize(
    ("returns", "text"),
    [
        (lambda y: y.numpy(), "the chain returned ndarray"),
        (lambda y: {"y": y, "count": 3}, "the chain returned int"),
    ],
)
def test_chain_must_return_tensors(returns: Any, text: str) -> None:
    invalid_chain = make_chain(
        lambda parts, batch: returns(parts["one"](batch["x"])), one=nn.Identity()
    )
    with pytest.raises(ModelError, match=text):
        CallRecorder().record(invalid_chain, batches(4)[0])
