"""Functions that tell whether the model is being exported, by the strategy under which they do."""

from __future__ import annotations

from gate.lint.scope import FunctionScope
from gate.lint.value import Kind, StaticValue, of_object

_BY_STRATEGY: dict[str, tuple[str, ...]] = {
    "traced": ("is_tracing", "_is_tracing", "_get_tracing_state", "is_in_onnx_export"),
    "scripted": ("is_scripting", "is_in_onnx_export"),
    "dynamo": ("is_compiling", "is_dynamo_compiling", "is_exporting", "is_in_onnx_export"),
}
FLAGS = frozenset(name for names in _BY_STRATEGY.values() for name in names)
"""Their names, in torch and torchvision."""


def flag(name: str, scope: FunctionScope) -> StaticValue:
    """What the function of this name returns: False, or what only an export makes true."""
    strategy = "traced" if scope.walk.strategy == "direct" else scope.walk.strategy
    if name in _BY_STRATEGY[strategy]:
        return StaticValue(Kind.PYTHON, flag=name)
    return of_object(False)
