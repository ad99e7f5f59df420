"""What all strategies share: the copy that is exported, switches, and how a rung fails."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from gate.errors import ExportError
from gate.export.custom import Symbolics
from gate.export.refusals.refusal import ExportRefusal, brief
from gate.export.refusals.unsupported import opset_for_all
from gate.export.request import Request

ExporterOptions = dict[str, bool | int | float | str | None]
"""Everything that an exporter was told, flat, for the record."""


class Strategy(Protocol):
    """One way from a model to a file."""

    def __call__(self, request: Request, path: Path, *, symbolics: Symbolics) -> ExporterOptions:
        """Write `path` in the opset of `symbolics`. Raises RungFailed, and OSError where the file
        can't be written."""
        ...


class RungFailed(Exception):
    """One strategy wrote no file, or a wrong one; another may."""

    def __init__(
        self,
        refusal: ExportRefusal,
        *,
        since: int | None = None,
        explain: Callable[[], ExportRefusal] | None = None,
    ) -> None:
        """`since`: the opset that would do, where that is known. `explain` finds more to tell,
        at the cost of several exports."""
        super().__init__(refusal.cause)
        self.refusal = refusal
        self.since = since
        self.explain = explain

    @classmethod
    def because(cls, cause: str, remedy: str, *, since: int | None = None) -> RungFailed:
        """A cause and a remedy of our own."""
        return cls(ExportRefusal(cause, remedy), since=since)

    @classmethod
    def of(
        cls,
        error: Exception,
        *,
        strategy: str,
        opset: int,
        explain: Callable[[], ExportRefusal] | None = None,
    ) -> RungFailed:
        """What an exporter raised."""
        refusal = ExportRefusal.of(error, strategy=strategy, opset=opset)
        since = opset_for_all(refusal.operators)
        return cls(refusal, since=since, explain=explain if refusal.operators else None)


def export_copy(model: nn.Module) -> nn.Module:
    """A deep copy on the CPU without gradients. Raises ExportError if it can't be copied."""
    try:
        with torch.no_grad():  # else copies of TorchScript's parameters are computed tensors
            copied = copy.deepcopy(model).cpu()
        for parameter in copied.parameters():  # not at once: a ScriptModule refuses that
            parameter.requires_grad_(False)
        return copied
    except Exception as error:
        raise ExportError(
            f"the model can't be copied: {brief(error)}. The export works on a copy, so that it "
            "can't change the model: remove what can't be copied (locks, open files, tensors "
            "that were computed)."
        ) from error


@contextlib.contextmanager
def neutral(model: nn.Module) -> Iterator[None]:
    """`model` in eval mode, no gradients; multi-head attention by its ordinary operators; all
    switches set back.

    The fused attention that torch takes without gradients can't be exported; what is computed is
    the same.
    """
    from torch.onnx import (  # type: ignore[attr-defined]  # deprecated, not in __all__
        TrainingMode,
        select_model_mode_for_export,
    )

    fused = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with select_model_mode_for_export(model, TrainingMode.EVAL):
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)


def settings_of(request: Request, keywords: dict[str, Any]) -> ExporterOptions:
    """What an exporter was told, with what holds for all of them."""
    names = {"input_names": request.input_names, "output_names": request.output_names}
    flat: ExporterOptions = {**keywords, **{key: ",".join(value) for key, value in names.items()}}
    return {**flat, "fused_attention": False, "grad": False}
