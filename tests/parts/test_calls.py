"""What parts were given while the chain ran is what their files are judged on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gate.errors import DataError
from gate.parts.calls import Calls
from gate.parts.chain import ChainedModel


def chain(function: Any, **parts: nn.Module) -> ChainedModel:
    return ChainedModel(function, parts, ["x"])


def batches(*sizes: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(size, 3)).astype(np.float32)} for size in sizes]


def test_all_calls_are_samples_in_their_order() -> None:
    calls, one = Calls(), nn.Identity()
    doubled = chain(lambda parts, batch: parts["one"](batch["x"] * 2), one=one)
    given = batches(4, 4, 2)
    for batch in given:
        calls.record(doubled, batch)
    samples = calls.of("one").samples(("y",))
    rows = np.concatenate([batch["x"] * 2 for batch in given])
    assert len(samples) == 10
    assert np.array_equal(next(samples.batches(10))["y"], rows)


def test_steps_that_grow_are_left_out_and_counted() -> None:
    """A decoder is called again with what it gave."""

    def steps(parts: Any, batch: Any) -> Any:
        x = batch["x"]
        for _ in range(3):
            x = torch.cat([x, parts["one"](x)], dim=1)
        return x

    calls = Calls()
    for batch in batches(4, 4):
        calls.record(chain(steps, one=nn.Identity()), batch)
    of_one = calls.of("one")
    assert (of_one.rows, of_one.left_out) == (8, 4)
    assert of_one.samples(("y",)).specs[0].shape == ("samples", 3)


@pytest.mark.parametrize(
    "given", [(torch.zeros(()),), (torch.zeros(4, 2), torch.zeros(3, 2)), ()], ids=str
)
def test_what_has_no_axis_of_samples_is_refused(given: tuple[torch.Tensor, ...]) -> None:
    class Takes(nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return torch.zeros(1)

    odd = chain(lambda parts, _: parts["one"](*given), one=Takes())
    with pytest.raises(DataError, match="the part one .* no common axis of samples"):
        Calls().record(odd, batches(4)[0])


def test_what_is_changed_in_place_was_noted_before() -> None:
    def shift(parts: Any, batch: Any) -> Any:
        y = parts["one"](batch["x"])
        return y.add_(1)

    calls, (batch,) = Calls(), batches(4)
    calls.record(chain(shift, one=nn.Identity()), batch)
    assert np.array_equal(next(calls.of("one").samples(("y",)).batches(4))["y"], batch["x"])


def test_the_files_go_with_the_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    calls = Calls()
    calls.record(chain(lambda parts, b: parts["one"](b["x"]), one=nn.Identity()), batches(4)[0])
    assert list(tmp_path.rglob("0.bin"))
    del calls
    assert not list(tmp_path.rglob("0.bin"))


class Takes(nn.Module):
    def forward(self, image: torch.Tensor, mask: Any, *more: torch.Tensor, bias: Any = None) -> Any:
        return image


@pytest.mark.parametrize(
    ("run", "names"),
    [
        (lambda part, x: part(x, x), ("image", "mask")),
        (lambda part, x: part(mask=x, image=x), ("mask", "image")),
        (lambda part, x: part(x, {"one": x, "two": (x, x)}), ("image", "mask.one", "mask.two.0", "mask.two.1")),
        (lambda part, x: part(x, None, x, bias=x), ("image", "input_2", "bias")),
    ],
)  # fmt: skip
def test_inputs_have_the_names_of_the_arguments(run: Any, names: tuple[str, ...]) -> None:
    calls = Calls()
    calls.record(
        chain(lambda parts, batch: run(parts["one"], batch["x"]), one=Takes()), batches(4)[0]
    )
    of_one = calls.of("one")
    assert of_one.names == names
    assert list(of_one.named_example) == list(names)
