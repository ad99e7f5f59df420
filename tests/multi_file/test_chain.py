"""The chain as a PyTorch module, in float32 and float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gate.data.input_binding import bind_inputs
from gate.data.samples import SampleSet
from gate.errors import ModelError
from gate.multi_file.chain_model import ChainModel, module_of
from gate.reference.float64 import Float64Reference
from tests.multi_file import tiny

ROWS = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def model() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"encoder": nn.Linear(3, 3), "head": nn.Linear(3, 2)}).eval()


def scattered(parts: Any, batch: Any) -> Any:
    """Scatter the features with numpy into a new float32 array."""
    features = parts["encoder"](batch["input"]).numpy()
    grid = np.zeros((len(features), 3), np.float32)
    for row, feature in enumerate(features):
        grid[row, ::-1] += feature
    return parts["head"](torch.from_numpy(grid))


def narrowed(parts: Any, batch: Any) -> Any:
    return torch.from_numpy(scattered(parts, batch).numpy().astype(np.float32))


def make_chain(function: str) -> ChainModel:
    return ChainModel.from_model(
        model(), chain=f"{__name__}:{function}",
        references={"encoder": "encoder", "head": "head"}, inputs=["input"],
    )  # fmt: skip


def run_in_float64(chain: ChainModel) -> np.ndarray:
    samples = SampleSet.from_arrays({"input": ROWS})
    binding = bind_inputs(samples.specs, samples.specs, count=4, batch_size=4)
    with torch.no_grad():
        (result,) = Float64Reference(chain, binding).run({"input": ROWS})
    return result


def test_chain_with_numpy_has_a_float64_reference() -> None:
    """The result is rounded to float32 only between the parts."""
    result = run_in_float64(make_chain("scattered"))
    model64 = model().double()
    with torch.no_grad():
        features = model64["encoder"](torch.from_numpy(ROWS).double()).float().double().flip(1)
        expected = model64["head"](features).numpy()
    assert result.dtype == np.float64
    np.testing.assert_allclose(result, expected, rtol=1e-14)


def test_chain_that_casts_to_float32_has_no_float64_reference() -> None:
    with pytest.raises(ModelError, match="returns float32 even when it runs in float64"):
        run_in_float64(make_chain("narrowed"))


def test_float32_run_is_not_widened() -> None:
    chain = make_chain("scattered")
    with torch.no_grad():
        assert chain(torch.from_numpy(ROWS)).dtype == torch.float32
    assert not any(part._forward_pre_hooks for part in chain.parts.values())


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("neck", "has no submodule 'neck' for the part neck; its submodules: encoder, head"),
        ("pkg.models:build", "is pkg.models:build, expected the path of a submodule"),
    ],
)
def test_reference_is_a_submodule_of_the_model(path: str, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        module_of(tiny.build(), path, part="neck")
