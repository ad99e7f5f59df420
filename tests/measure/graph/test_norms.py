"""BatchNorms as folding takes them: exactly, and by arithmetic in 16 bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gate.weights.model_tensors import norms


def batch_norm(**settings) -> nn.BatchNorm1d:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(64, **settings).eval()
    nn.init.uniform_(norm.running_var, 1e-7, 3.0)
    nn.init.normal_(norm.running_mean)
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_the_steps_are_those_of_pytorch(dtype, affine):
    module = nn.Sequential(batch_norm(affine=affine, eps=1e-6))
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    (norm,) = norms(module, name)
    mean, variance, gamma, beta, bias, rows = (
        tensor.detach().to(dtype or torch.float64)
        for tensor in (
            module[0].running_mean,
            module[0].running_var,
            module[0].weight if affine else torch.ones(64),
            module[0].bias if affine else torch.zeros(64),
            torch.randn(64),
            torch.randn(64, 5),
        )
    )
    scale = gamma / torch.sqrt(variance + 1e-6)
    assert norm.path == "0"
    offset = (bias - mean) * scale + beta
    made = (norm.scale, norm.offset(bias.double().numpy()), norm.folded(rows.float().numpy()))
    for one, other in zip(made, (scale, offset, rows * scale[:, None]), strict=True):
        # In float64 the two differ by a last bit; a product is of float32.
        assert np.allclose(one, other.double(), rtol=0.0 if dtype else 1e-7, atol=0.0)


def test_what_keeps_no_statistics_is_no_norm():
    others = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3))
    assert list(norms(others)) == []
