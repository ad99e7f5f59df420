"""Draw weights of the scale that training leaves.

Many models initialize projections with 0.02, layer scales with 1e-6 and position tables with zeros.
Untrained, their outputs are then the same for every sample.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.samples import Arrays
from benchmarks.corpus.trained import calibrate, center_logits

_PROJECTIONS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
_TABLE_STD = 0.4
"""Standard deviation of nearly constant tables: positions, class tokens, attention biases."""


def settle(model: nn.Module, architecture: Architecture, arrays: Arrays) -> None:
    """Redraw constant or tiny parameters, calibrate BatchNorm, and center the head's logits.

    Centers them only if the architecture names a head.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            _redraw(module, name, parameter)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx] = 0.0
    calibrate(model, arrays)
    if architecture.head:
        center_logits(model, model.get_submodule(architecture.head), arrays)


def _redraw(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if not parameter.is_floating_point() or parameter.numel() < 2:
        return
    if isinstance(module, _PROJECTIONS) and name == "weight":
        inputs = parameter[0].numel()
        nn.init.normal_(parameter, 0.0, (1.5 / inputs) ** 0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(parameter, 0.0, 1.0)
    elif parameter.ndim == 1 and bool((parameter == parameter[0]).all()):
        if float(parameter[0]) == 0.0:
            nn.init.normal_(parameter, 0.0, 0.1)
        else:  # Scales of norms, and of layers, which are initialized with 1e-6.
            nn.init.uniform_(parameter, 0.6, 1.4)
    elif float(parameter.std()) < 0.1 and name.endswith(("weight", "proj")):
        nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
    elif float(parameter.std()) < 0.1:
        parameter.add_(torch.randn_like(parameter) * _TABLE_STD)
