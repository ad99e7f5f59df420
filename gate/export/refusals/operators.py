"""Finding every operator of a model that an exporter can't write, not only the first.

An exporter stops at the first one. Here each is found with its place, so that the user knows the
whole of what is to be done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gate.export.capture import captured
from gate.export.refusals.dynamo_operators import untranslated
from gate.export.refusals.legacy_operators import LegacyExport, unwritten
from gate.export.refusals.messages import operator_in
from gate.export.refusals.refusal import ExportRefusal
from gate.export.refusals.unsupported import UnsupportedOperator
from gate.records.strategy import Strategy


def unsupported(
    module: nn.Module,
    arguments: tuple[Any, ...],
    *,
    strategy: Strategy,
    opset: int,
    exporter_keywords: Mapping[str, Any] | None = None,
) -> tuple[UnsupportedOperator, ...]:
    """Every operator of `module` that `strategy` can't write at `opset`, in order of execution.

    `exporter_keywords` are the others of the export that failed (`dynamic_axes`, `kwargs`, a
    custom translation table …). Call it under the same switches (eval mode, attention's fast path,
    custom symbolics). Prints nothing and never raises: what can't be captured at all has no
    operators, and gives an empty tuple.
    """
    keywords = {key: value for key, value in (exporter_keywords or {}).items() if key != "f"}
    with captured(), torch.no_grad():
        try:
            if strategy == "dynamo":
                return untranslated(module, arguments, opset, keywords)
            export = LegacyExport(arguments, opset, keywords)
            handed = _handed(module, export, strategy)
            return unwritten(export, handed, original=module if handed is not module else None)
        except Exception:  # whatever torch raises; the first error is told in any case
            return ()


def refused(
    error: BaseException,
    module: nn.Module,
    arguments: tuple[Any, ...],
    *,
    strategy: Strategy,
    exporter_keywords: Mapping[str, Any],
) -> ExportRefusal:
    """Explain an error of `torch.onnx.export(module, arguments, **told)`.

    Looks for more operators only if the error is about one: that costs an export for each.
    """
    opset = int(exporter_keywords["opset_version"])
    found: tuple[UnsupportedOperator, ...] = ()
    if operator_in(error) is not None:
        found = unsupported(
            module, arguments, strategy=strategy, opset=opset, exporter_keywords=exporter_keywords
        )
    return ExportRefusal.of(error, operators=found, strategy=strategy, opset=opset)


def _handed(module: nn.Module, export: LegacyExport, strategy: Strategy) -> nn.Module:
    """What the strategy hands to the exporter."""
    if strategy == "direct" or isinstance(module, torch.jit.ScriptModule):
        return module
    if strategy == "scripted":
        scripted: nn.Module = torch.jit.script(module)
        return scripted
    traced: nn.Module = torch.jit.trace(  # type: ignore[no-untyped-call]
        module,
        export.arguments,
        example_kwarg_inputs=export.keywords.get("kwargs"),
        check_trace=False,
    )
    return traced
