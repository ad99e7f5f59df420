"""Write a layer in PyTorch as a script that computes the expected values of a reproducer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from gate.localize.reduce import ReducedFailure
from gate.storage.arrays import OutputArray

AGREES = "agrees"
"""Last line of the script's output if the layer computes the expected values."""

_SCRIPT = '''"""Compute expected.npz by the layer in PyTorch. Needs numpy and torch."""
import sys
from pathlib import Path
import numpy as np
import torch
from torch import nn
{definition}
here = Path(__file__).resolve().parent
layer = {layer}.eval()
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
    """The text of `layer.py`, and the arrays that it loads from `weights.npz`."""

    text: str
    weights: Mapping[str, OutputArray]

    @classmethod
    def from_layer(cls, layer: nn.Module, failure: ReducedFailure) -> LayerScript | None:
        """Create the script of a layer of torch.nn, or of a module that torch can trace.

        Return None for a layer that its text does not reproduce, and weights with a dtype that
        NumPy lacks."""
        if failure.arguments is None:
            return None
        try:
            is_of_torch = type(layer).__module__.startswith("torch.nn.modules.")
            inputs = [torch.from_numpy(failure.inputs[name]) for name in failure.arguments]
            is_class = is_of_torch and not any(layer.children())
            written = _of_torch(layer) if is_class else _traced(layer, inputs)
            if written is None:
                return None
            definition, text, tensors = written
            # NumPy has no bfloat16.
            state = {name: tensor.detach().numpy() for name, tensor in tensors.items()}
        except Exception:  # of fx and of the module's code, without a common base
            return None
        output, tolerance = next(iter(failure.tolerances.items()))
        script = _SCRIPT.format(
            definition=definition,
            layer=text,
            output=output,
            arguments=list(failure.arguments),
            tolerance=tolerance.largest,
            agrees=AGREES,
        )
        return cls(script, state)


_Written = tuple[str, str, Mapping[str, torch.Tensor]]
"""A class definition, the expression that creates the layer, and its weights by name."""


def _of_torch(layer: nn.Module) -> _Written:
    """Return a layer of torch.nn. Raises if its `repr` does not create an equal layer."""
    text = f"nn.{layer!r}"
    # The repr of some classes of torch.nn omits arguments; then loading the weights fails.
    copy = eval(text, {"nn": nn})
    state = layer.state_dict()
    copy.load_state_dict(state)
    return "", text, state


_BUILTINS = {"torch", "inf", "nan", "device", "NoneType", "fx_pytree", "pytree"}
"""Names that code of torch.fx may use; `_CLASS` and the script define some of them."""

_MAX_LENGTH = 200
"""Maximum length of an argument in characters; longer ones may be tables of weights."""

_CLASS = """
inf, nan, device = float("inf"), float("nan"), torch.device


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        {weights}

{forward}
"""


def _trace(layer: nn.Module, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Return the operations of a module, from its code or, if that has branches, loops or
    submodules, from a run on the inputs."""
    with suppress(Exception):  # of fx and of the module's code, without a common base
        if not any(layer.children()):
            return fx.symbolic_trace(layer)
    with torch.no_grad():
        return make_fx(layer, _error_on_data_dependent_ops=False)(*inputs)


def _traced(layer: nn.Module, inputs: Sequence[torch.Tensor]) -> _Written | None:
    """Return a class with the traced operations of a module; None if they need more than torch.

    Raises the exceptions of torch.fx."""
    graph = _trace(layer, inputs)
    for node in graph.graph.nodes:
        node.type = None  # annotations may name anything
    code = graph.graph.python_code("self")
    arguments = (a for node in graph.graph.nodes for a in (node.args, node.kwargs))
    if not set(code.globals) <= _BUILTINS or any(len(str(a)) > _MAX_LENGTH for a in arguments):
        return None
    state = graph.state_dict()
    weights = "\n        ".join(
        f"self.register_buffer({name!r}, torch.zeros({list(tensor.shape)}, dtype={tensor.dtype}))"
        for name, tensor in state.items()
    )
    lines = (line.partition(";  ")[0] for line in code.src.strip().splitlines())
    forward = "\n".join(f"    {line}" for line in lines)
    return _CLASS.format(weights=weights or "pass", forward=forward), "Layer()", state
