"""Numbers that Python takes out of tensors and shapes: written into the file as constants."""

from __future__ import annotations

import ast

from gate.lint.scope import Arguments, FunctionScope
from gate.lint.value import Kind, StaticValue, common_axis, python
from gate.records.lint import LintLevel


def numbers_from(
    node: ast.Call, arguments: Arguments, scope: FunctionScope, *, by: str
) -> StaticValue:
    """The result of a call that computes outside of torch; `by`: its name."""
    if any(value.kind is Kind.TENSORS or (value.tensor and not value.constant)
           for value in arguments.all):  # fmt: skip
        scope.tell("TRC001", node, message=f"{by} computes outside of torch: the example's numbers "
                   "are written into the file as constants")  # fmt: skip
        return StaticValue(Kind.PYTHON, read=True)
    sizes = [value for value in arguments.all if value.kind in (Kind.SIZE, Kind.SHAPE)]
    if sizes:
        tell_size(node, sizes, scope)
    return python()


def tell_size(
    node: ast.Call, sizes: list[StaticValue], scope: FunctionScope, *, rewrite: str | None = None
) -> None:
    """The example's size becomes a constant: an error for the batch axis, which is dynamic."""
    fixed = common_axis(sizes) != 0
    level: LintLevel | None = "warning" if fixed else None
    message = None
    if fixed:
        message = (
            "the example's size is written into the file as a constant: wrong where that axis "
            "is dynamic"
        )
    scope.tell("TRC004", node, level=level, message=message, rewrite=rewrite)
