"""Deviation of each layer; fault code and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gate.records.runtime import RuntimeName
from gate.storage.record import Count, Measured, Params, Record, Sha256, added_field

# It explains a refusal. It is no evidence: no verdict depends on it. Faults are codes and
# parameters; `gate.summary.render` renders the texts. Records of version 1.0 have texts alone.

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
    "unread_input",
    "missing_value",
    "operators",
]
"""The kind of a fault. `code`: code of forward between modules differs. `operators`: the nodes
compute something else, and nothing more is known."""

LayerVerdict = Literal["ok", "source", "propagated", "unmapped"]


class LayerRow(Record):
    """One call of a module, or a function between modules, in execution order.

    A *source* is wrong although its inputs are right; what is wrong because its inputs are is
    *propagated*.
    """

    module: str
    """Path in the torch module, `layer1.0.conv1`; of a function, that of the module it is in."""
    call: Count = 0
    """Which call of the module, from 0."""
    kind: str
    """Type of the module, or name of the function."""
    tensor: str | None = None
    """The ONNX tensor; None: unmapped."""
    max_abs_diff: Measured | None = None
    mean_abs_diff: Measured | None = None
    noise_ratio: Measured | None = None
    """Error in units of the rounding error that PyTorch has made up to here."""
    local_ratio: Measured | None = None
    """Error of this layer alone, computed from right inputs, in units of its own rounding."""
    amplification: Measured | None = None
    """noise_ratio over that of the row before."""
    verdict: LayerVerdict
    detail: str | None = None
    """What else was found: another shape, a weight that differs."""
    code: str | None = added_field(None)
    """Of `detail`: a code of a fault, or of `DETAILS` in `gate.decision.faults`."""
    params: Params = added_field({})

    @property
    def title(self) -> str:
        """The module, with the number of its call where it has several."""
        return f"{self.module}#{self.call}" if self.call else self.module or "(model)"


class LayerFault(Record):
    """A fault of one module, independent of faults elsewhere."""

    module: str
    """Path of the module at fault; empty for the model itself."""
    text: str = added_field("")
    """What is wrong, without a full stop."""
    remedy: str = added_field("")
    code: FaultCode | None = added_field(None)
    params: Params = added_field({})
    """The values that its text in `gate.decision.faults` names. `variant`: which text of the code;
    `details`: a list of `{"code": ..., ...}`."""


class OptimizerFault(Record):
    """The optimizers of ONNX Runtime that change the answer of a file that is right without them.

    They are found by switching them off: a guess that no verdict depends on.
    """

    names: tuple[str, ...] = ()
    """As `disabled_optimizers` takes them: with all of these off the answer is right, and with
    fewer of them it is not. Empty: none was found."""
    raises: str | None = None
    """What ONNX Runtime raises while they are on; None: it answers something else."""
    level: str | None = None
    """The lowest `graph_optimization_level` at which it shows."""
    below: str | None = None
    """The highest one at which the answer is right."""
    before: tuple[str, ...] = ()
    """Nodes of the graph that is optimized without them, and not with them: at most 64."""
    after: tuple[str, ...] = ()
    """The nodes that they made of these."""
    nodes_unread: str | None = None
    """Why the nodes are not known."""
    nodes_unread_code: str | None = added_field(None)
    nodes_unread_params: Params = added_field({})
    reason: str | None = None
    """Why no optimizer is named, or why there may be more names than needed."""
    reason_code: str | None = added_field(None)
    reason_params: Params = added_field({})
    sessions: Count = 0
    """How many were opened to find it."""


class Localization(Record):
    """The layers of one runtime compared with those of the model."""

    schema_version: Literal[1] = 1
    subject_sha256: Sha256
    runtime: RuntimeName
    samples: Count
    layers: tuple[LayerRow, ...]
    first_divergence: str | None
    """Path of the first module that is a source; None: there is none."""
    whole_ratio: Measured | None = None
    """noise_ratio of the outputs of the file as it is, with no intermediate tensor marked: marking
    keeps the optimizer from fusing."""
    cause: str = added_field("")
    """What diverges and why, in sentences."""
    outcome: tuple[Params, ...] = added_field(())
    """The sentences of `cause`, as `{"code": ..., ...}`."""
    fault: str | None = added_field(None)
    """Of the first source alone: what is wrong with it, without a full stop."""
    fault_code: FaultCode | None = added_field(None)
    """The kind of `fault`. None: there is no fault, or the record is older."""
    fault_params: Params = added_field({})
    """As `LayerFault.params`."""
    faults: tuple[LayerFault, ...] = added_field(())
    """The first five independent faults, most upstream first: each layer is computed from the
    model's own values before it, so that no fault hides or makes another one."""
    optimiser: bool = added_field(False)
    """With optimizations off the file agrees."""
    blame: OptimizerFault | None = added_field(None)
    """Which optimizer it is; None: nothing is laid to one."""
    remedy: str | None = None
    part: str | None = added_field(None)
    """Of a release: the part that these layers are of; None: it has none that diverges, or it is
    one file."""
    probe: str | None = added_field(None)
    """The probe on whose input the layers were compared, because the samples agree; None: they
    were compared on samples."""
    seam: str | None = added_field(None)
    """Of a release: what does not fit between its parts; None: nothing."""
    seam_code: str | None = added_field(None)
    seam_params: Params = added_field({})

    @property
    def diverges(self) -> bool:
        """True if a layer, only the file as a whole, or the seam between the parts of a release is
        not what the model computes."""
        return (
            self.first_divergence is not None
            or self.has_seam
            or any(row.verdict in ("source", "propagated") for row in self.layers)
        )

    @property
    def blamed(self) -> str | None:
        """The tensor or the module at fault, by its name; of version 1.0, which has no parameters,
        the name in backticks that the fault begins with."""
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
        """Return the errors along the depth, for notebooks. None: no layer was compared."""
        from gate.report.html_page import render_depth  # the import contract names this exception

        return render_depth(self)

    @property
    def unmapped(self) -> tuple[str, ...]:
        """The rows for which no ONNX tensor was found."""
        return tuple(row.title for row in self.layers if row.verdict == "unmapped")


class Explanation(Record):
    """The localization that belongs to a verdict.

    Empty where none was needed, else the layers, or the reason why they are not known.
    """

    schema_version: Literal[1] = 1
    localisation: Localization | None = None
    failure: str | None = None


def listed(names: Sequence[str], *, most: int | None = None) -> str:
    """Join names for a sentence: `a, b and c`, or `a, b and 4 more` beyond `most`."""
    more = 0 if most is None else len(names) - most
    shown = [*names[:most], *([f"{more} more"] if more > 0 else [])]
    return " and ".join(part for part in (", ".join(shown[:-1]), *shown[-1:]) if part)
