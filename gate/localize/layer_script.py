"""Write a layer of torch.nn as a script that computes the expected values of a reproducer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from gate.localize.reduce import ReducedFailure
from gate.storage.arrays import OutputArray

AGREES = "agrees"
"""The last line that the script prints where the layer computes the expected values."""

_SCRIPT = '''"""Compute expected.npz by the layer in PyTorch. Needs numpy and torch."""
import sys
from pathlib import Path
import numpy as np
import torch
from torch import nn

here = Path(__file__).resolve().parent
layer = nn.{layer}.eval()
weights = np.load(here / "weights.npz")
layer.load_state_dict({{name: torch.from_numpy(weights[name]) for name in weights.files}})
inputs, expected = np.load(here / "inputs.npz"), np.load(here / "expected.npz")["{output}"]
with torch.no_grad():
    got = layer(*(torch.from_numpy(inputs[name]) for name in {arguments}))
got = (got[0] if isinstance(got, tuple) else got).numpy()
worst = np.abs(got.astype(np.float64) - expected).max(initial=0.0)
print("PyTorch: worst difference to the expected values", worst)
agrees = got.shape == expected.shape and worst <= {tolerance}
print("{agrees}" if agrees else "differs")
sys.exit(0 if agrees else 1)
'''


@dataclass(frozen=True)
class LayerScript:
    """The text of `layer.py`, and what it loads from `weights.npz`."""

    text: str
    weights: Mapping[str, OutputArray]

    @classmethod
    def from_layer(cls, layer: nn.Module, failure: ReducedFailure) -> LayerScript | None:
        """Return the script of a layer of torch.nn; None for a module of other code, for one with
        modules inside, and where its text makes another layer or NumPy
        lacks the dtype of a weight."""
        kind = type(layer)
        is_of_torch = kind.__module__.startswith("torch.nn.modules.")
        if not is_of_torch or any(layer.children()) or failure.arguments is None:
            return None
        text = repr(layer)
        try:
            # NumPy has no bfloat16.
            state = {name: tensor.detach().numpy() for name, tensor in layer.state_dict().items()}
            # The text that a class of torch.nn has for itself; some of them leave arguments out.
            made = eval(f"nn.{text}", {"nn": nn})
            made.load_state_dict({n: torch.from_numpy(np.array(a)) for n, a in state.items()})
        except Exception:
            return None
        output, tolerance = next(iter(failure.tolerances.items()))
        script = _SCRIPT.format(
            layer=text,
            output=output,
            arguments=list(failure.arguments),
            tolerance=tolerance.largest,
            agrees=AGREES,
        )
        return cls(script, state)
