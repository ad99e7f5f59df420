"""Deviations of the model's layers, with fault codes and their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gate.records.runtime import RuntimeName
from gate.storage.record import Count, Measured, Params, Record, Sha256, added_field

# A localization explains a rejection; no verdict depends on it. Faults are codes and parameters,
# whose texts `gate.summary.render` renders. Records of version 1.0 have only texts.

FaultCode = Literal[
    "training_mode",
    "weights",
    "settings",
    "shape",
    "precision_cast",
    "int8",
    "tf32",
    "in_place",
    "code",
    "input_order",
    "output_order",
    "not_returned",
    "constant_output",
    "unread_input",
    "missing_value",
    "operators",
]
"""The kind of a fault. `code`: the code of forward between modules differs. `operators`: the nodes
compute something else for an unknown reason."""

LayerVerdict = Literal["ok", "source", "propagated", "unmapped"]


class LayerRow(Record):
    """One call of a module, or a function between modules, in execution order.

    A *source* is wrong although its inputs are right. A *propagated* layer is wrong because its
    inputs are.
    """

    module: str
    """Path in the torch module, `layer1.0.conv1`; for a function, the path of its module."""
    call: Count = 0
    """Number of the call of the module, from 0."""
    kind: str
    """Type of the module, or name of the function."""
    tensor: str | None = None
    """Name of the ONNX tensor; None: unmapped."""
    max_abs_diff: Measured | None = None
    mean_abs_diff: Measured | None = None
    noise_ratio: Measured | None = None
    """Error in units of PyTorch's rounding error up to this layer."""
    local_ratio: Measured | None = None
    """Error of this layer alone, computed from right inputs, in units of its rounding error."""
    amplification: Measured | None = None
    """noise_ratio divided by that of the previous row."""
    verdict: LayerVerdict
    detail: str | None = None
    """Further information: another shape, a weight that differs."""
    code: str | None = added_field(None)
    """The code of `detail`: that of a fault, or a key of `DETAILS` in `gate.decision.faults`."""
    params: Params = added_field({})

    @property
    def title(self) -> str:
        """The module, with the number of its call unless it is the first."""
        return f"{self.module}#{self.call}" if self.call else self.module or "(model)"


class LayerFault(Record):
    """A fault of one module, independent of faults elsewhere."""

    module: str
    """Path of the module at fault; empty for the model itself."""
    text: str = added_field("")
    """Description of the fault, without a full stop."""
    remedy: str = added_field("")
    code: FaultCode | None = added_field(None)
    params: Params = added_field({})
    """Values for its text in `gate.decision.faults`. `variant`: which text of the code; `details`:
    a list of `{"code": ..., ...}`."""


class OptimizerFault(Record):
    """The optimizers of ONNX Runtime that change the result of a file that is right without them.

    They are found by disabling optimizers. No verdict depends on them.
    """

    names: tuple[str, ...] = ()
    """Names for `disabled_optimizers`: the smallest set whose disabling makes the result right.
    Empty: none was found."""
    raises: str | None = None
    """Error of ONNX Runtime while they are enabled; None: it returns a wrong result."""
    level: str | None = None
    """The lowest `graph_optimization_level` with the wrong result."""
    below: str | None = None
    """The highest level with the right result."""
    before: tuple[str, ...] = ()
    """Nodes that these optimizers replace: at most 64."""
    after: tuple[str, ...] = ()
    """The nodes that replace them."""
    nodes_unread: str | None = None
    """Why the nodes could not be read."""
    nodes_unread_code: str | None = added_field(None)
    nodes_unread_params: Params = added_field({})
    reason: str | None = None
    """Why no optimizer is named, or why there may be more names than needed."""
    reason_code: str | None = added_field(None)
    reason_params: Params = added_field({})
    sessions: Count = 0
    """Number of sessions that were opened for the search."""


class Localization(Record):
    """The layers of one runtime compared with those of the model."""

    schema_version: Literal[1] = 1
    subject_sha256: Sha256
    runtime: RuntimeName
    samples: Count
    layers: tuple[LayerRow, ...]
    first_divergence: str | None
    """Path of the first module that is a source; None: no module is."""
    whole_ratio: Measured | None = None
    """noise_ratio of the outputs of the unmodified file. Intermediate tensors that are marked as
    outputs prevent fusions."""
    cause: str = added_field("")
    """Sentences that explain what diverges and why."""
    outcome: tuple[Params, ...] = added_field(())
    """Codes and parameters of the sentences of `cause`: `{"code": ..., ...}`."""
    fault: str | None = added_field(None)
    """What is wrong with the first source, without a full stop."""
    fault_code: FaultCode | None = added_field(None)
    """The kind of `fault`. None: there is no fault, or the record is older."""
    fault_params: Params = added_field({})
    """Like `LayerFault.params`."""
    faults: tuple[LayerFault, ...] = added_field(())
    """The first five independent faults in the order of execution. Each layer is computed from the
    model's values of its inputs, so that no fault hides or causes another one."""
    optimiser: bool = added_field(False)
    """True if the file agrees with optimizations off."""
    blame: OptimizerFault | None = added_field(None)
    """The optimizers at fault; None: no optimizer is."""
    remedy: str | None = None
    part: str | None = added_field(None)
    """The part of a release that has these layers; None: no part diverges, or it is one file."""
    probe: str | None = added_field(None)
    """The probe with whose input the layers were compared, because the samples agree. None: the
    layers were compared on samples."""
    seam: str | None = added_field(None)
    """What does not fit between the parts of a release; None: they fit."""
    seam_code: str | None = added_field(None)
    seam_params: Params = added_field({})

    @property
    def diverges(self) -> bool:
        """True if a layer, the file as a whole, or the connection of two parts differs from the
        model."""
        return (
            self.first_divergence is not None
            or self.has_seam
            or any(row.verdict in ("source", "propagated") for row in self.layers)
        )

    @property
    def blamed(self) -> str | None:
        """The name of the tensor or module at fault. Records of version 1.0 have no parameters:
        their fault begins with the name in backticks."""
        details = self.fault_params.get("details")
        first = details[0] if isinstance(details, list) and details else None
        if isinstance(first, dict) and isinstance(first.get("name"), str):
            return str(first["name"])
        if not self.outcome and (self.fault or "").startswith("`"):
            return str(self.fault).split("`")[1]
        return self.first_divergence or None

    @property
    def has_seam(self) -> bool:
        """True if something does not fit between the parts of a release."""
        return self.seam is not None or self.seam_code is not None

    def _repr_html_(self) -> str | None:
        """Return a chart of the errors by depth for notebooks; None if no layer was compared."""
        from gate.report.html_page import render_depth  # the import contract names this exception

        return render_depth(self)

    @property
    def unmapped(self) -> tuple[str, ...]:
        """The rows without an ONNX tensor."""
        return tuple(row.title for row in self.layers if row.verdict == "unmapped")


class Explanation(Record):
    """The localization that belongs to a verdict.

    Empty if none was needed; else the layers, or why they could not be compared.
    """

    schema_version: Literal[1] = 1
    localisation: Localization | None = None
    failure: str | None = None


def join_names(names: Sequence[str], *, limit: int | None = None) -> str:
    """Join names for a sentence: `a, b and c`, or `a, b and 4 more` beyond `limit`."""
    more = 0 if limit is None else len(names) - limit
    shown = [*names[:limit], *([f"{more} more"] if more > 0 else [])]
    return " and ".join(part for part in (", ".join(shown[:-1]), *shown[-1:]) if part)
