"""The whole model of a release: its parts in PyTorch, run in order by the chain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gate.errors import ModelError
from gate.model.loading import imported
from gate.parity.runners.torch_runner import private_copy

ChainFunction = Callable[[Mapping[str, Callable[..., Any]], Mapping[str, torch.Tensor]], Any]
"""Parts by name and a batch of tensors by name in; what a forward returns out."""


class ChainedModel(nn.Module):
    """`function(parts, batch)` as a module, so that all that is done with a model can be done with
    it. Parts are registered: they move and copy as one."""

    def __init__(
        self, function: ChainFunction, parts: Mapping[str, nn.Module], inputs: Sequence[str]
    ) -> None:
        """`inputs`: names of the batch, in the order in which forward gets the tensors."""
        super().__init__()
        self.function = function
        self.parts = nn.ModuleDict(dict(parts))
        self.inputs = tuple(inputs)

    @classmethod
    def of(
        cls, model: nn.Module, *, chain: str, references: Mapping[str, str], inputs: Sequence[str]
    ) -> ChainedModel:
        """Of a copy of `model` on the CPU, in eval mode. `chain`: `package.module:function`;
        `references`: by part the module's path in the model; `inputs`: as in `__init__`.

        Raises ModelError.
        """
        copied = private_copy(model, device="cpu")
        modules = {name: module_of(copied, path, part=name) for name, path in references.items()}
        return cls(chain_function(chain), _apart(modules), inputs).eval()

    def forward(self, *tensors: torch.Tensor) -> Any:
        """What the function returns.

        Where the float64 reference is computed, a part takes in double precision what the code
        before it made in float32: numpy's zeros, a buffer of its own. That is rounded there, then,
        on both sides.
        """
        with contextlib.ExitStack() as hooked:
            for part in self.parts.values() if _in_double() else ():
                hooked.callback(part.register_forward_pre_hook(_widened, with_kwargs=True).remove)
            return self.function(
                dict(self.parts.items()), dict(zip(self.inputs, tensors, strict=True))
            )


def _in_double() -> bool:
    return torch.get_default_dtype() == torch.float64


def _widened(module: nn.Module, args: Any, named: Any) -> Any:
    own = {tensor.dtype for tensor in (*module.parameters(), *module.buffers())}
    if torch.float32 in own:  # it is not the part that is computed in double precision
        return args, named
    return pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.double() if tensor.dtype == torch.float32 else tensor,
        (args, named),
    )


def chain_function(named: str) -> ChainFunction:
    """Import `package.module:function`. Raises ModelError."""
    module_name, _, path = named.partition(":")
    found: Any = imported(module_name, wanted=f"the chain {named}")
    for name in path.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise ModelError(
            f"{module_name} has no function {path!r} for the chain {named}. Expected "
            "function(parts, batch), which calls parts['name'](...) and returns the outputs."
        )
    function: ChainFunction = found
    return function


def module_of(model: nn.Module, path: str, *, part: str) -> nn.Module:
    """The submodule that a part must compute like. Raises ModelError."""
    if ":" in path:
        raise ModelError(
            f"the reference of the part {part} is {path}, expected the path of a module in the one "
            "model that --reference builds, such as encoder: checkpoint, code and digest are of "
            "one model. Of two factories make one: return nn.ModuleDict({'encoder': ..., 'head': "
            "...})."
        )
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        offered = ", ".join(name for name, _ in model.named_children()) or "none"
        raise ModelError(
            f"the model has no submodule {path!r} for the part {part}: it has {offered}. Name it "
            "in the release file: parts: {" + part + ": {file: …, reference: PATH}}."
        ) from error


def _apart(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Two parts may be one module (two files of other sizes), or one a module of the other: a copy
    each, so that what the chain gives to one is not taken for the other's."""
    own: dict[str, nn.Module] = {}
    for name, module in modules.items():
        again = any(
            module in [*other.modules()] or other in [*module.modules()] for other in own.values()
        )
        own[name] = private_copy(module, device="cpu") if again else module
    return own
