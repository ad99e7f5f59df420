"""Deviation of each layer; fault code and parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from gate.records.runtime import RuntimeName
from gate.storage.record import Count, Measured, Record, Sha256, added_field

# It explains a refusal. It is no evidence: no verdict depends on it.


_SHOWN = 6
"""Operators in a sentence."""

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
    """What else is known: another shape, a weight that differs."""

    @property
    def title(self) -> str:
        """The module, with the number of its call where it has several."""
        return f"{self.module}#{self.call}" if self.call else self.module or "(model)"


class LayerFault(Record):
    """What is wrong in one place, whatever is wrong elsewhere."""

    module: str
    """Path of the module at fault; empty for the model itself."""
    text: str
    """What is wrong, without a full stop."""
    remedy: str


class OptimizerFault(Record):
    """Which optimisers of ONNX Runtime change the answer of a file that is right without them, as
    found by switching them off: a guess that no verdict depends on."""

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
    """Nodes of the graph that is optimised without them, and not with them: at most 64."""
    after: tuple[str, ...] = ()
    """The nodes that they made of these."""
    nodes_unread: str | None = None
    """Why the nodes are not known."""
    reason: str | None = None
    """Why no optimiser is named, or why there may be more names than needed."""
    sessions: Count = 0
    """How many were opened to find it."""

    @property
    def text(self) -> str:
        """What it says, without a full stop."""
        if not self.names:
            return f"No optimiser is named: {self.reason}"
        many = len(self.names) > 1
        does = f"change{'' if many else 's'} the answer"
        if self.raises is not None:
            does = f"make{'' if many else 's'} the session fail"
        text = f"{listed(self.names)} {does}"
        if self.level is not None:
            text += f" from {self.level} on"
        if self.before or self.after:
            text += f": {_nodes(self.before)} became {_nodes(self.after)}"
        return text if self.reason is None else f"{text} ({self.reason})"

    @property
    def remedy(self) -> str | None:
        """How to serve the file all the same, as it was tried; None where that is not known."""
        if self.names:
            names = ", ".join(f'"{name}"' for name in self.names)
            how = f"disabled_optimizers=[{names}] (in the policy an option of the runtime)"
        elif self.below is not None:
            how = f"graph_optimization_level {self.below}"
        else:
            return None
        return f"Serve with {how}, or update ONNX Runtime."


class Localization(Record):
    """The layers of one runtime beside those of the model."""

    schema_version: Literal[1] = 1
    subject_sha256: Sha256
    runtime: RuntimeName
    samples: Count
    layers: tuple[LayerRow, ...]
    first_divergence: str | None
    """Path of the first module that is a source; None: there is none."""
    whole_ratio: Measured | None = None
    """noise_ratio of the outputs of the file as it is, with no intermediate tensor marked: marking
    keeps the optimiser from fusing."""
    cause: str
    """What diverges and what is known of it, in sentences."""
    fault: str | None = added_field(None)
    """Of the first source alone: what is wrong with it, without a full stop."""
    fault_code: FaultCode | None = added_field(None)
    """The kind of `fault`. None: there is no fault, or the record is older."""
    faults: tuple[LayerFault, ...] = added_field(())
    """The first five independent faults, most upstream first: each layer is computed from the
    model's own values before it, so that no fault hides or makes another one."""
    optimiser: bool = added_field(False)
    """With optimisations off the file agrees."""
    blame: OptimizerFault | None = added_field(None)
    """Which optimiser it is; None: nothing is laid to one."""
    remedy: str | None = None
    part: str | None = added_field(None)
    """Of a release: the part that these layers are of; None: it has none that diverges, or it is
    one file."""
    probe: str | None = added_field(None)
    """The probe on whose input the layers were compared, because the samples agree; None: they
    were compared on samples."""
    seam: str | None = added_field(None)
    """Of a release: what does not fit between its parts; None: nothing."""

    @property
    def diverges(self) -> bool:
        """True if a layer, only the file as a whole, or the seam between the parts of a release is
        not what the model computes."""
        return (
            self.first_divergence is not None
            or self.seam is not None
            or any(row.verdict in ("source", "propagated") for row in self.layers)
        )

    @property
    def unmapped(self) -> tuple[str, ...]:
        """The rows for which no ONNX tensor was found."""
        return tuple(row.title for row in self.layers if row.verdict == "unmapped")


class Explanation(Record):
    """What localisation adds to a verdict: nothing where none was needed, else the layers, or why
    they are not known."""

    schema_version: Literal[1] = 1
    localisation: Localization | None = None
    failure: str | None = None


def listed(names: Sequence[str], *, most: int | None = None) -> str:
    """Names as a sentence has them: `a, b and c`, or `a, b and 4 more` beyond so many; empty for
    none."""
    more = 0 if most is None else len(names) - most
    shown = [*names[:most], *([f"{more} more"] if more > 0 else [])]
    return " and ".join(part for part in (", ".join(shown[:-1]), *shown[-1:]) if part)


def _nodes(nodes: Sequence[str]) -> str:
    """The operators of nodes, those that come several times with their number."""
    counted = Counter(node.partition(" ")[0] for node in nodes)
    names = [name if count == 1 else f"{count} {name}" for name, count in counted.items()]
    return listed(names, most=_SHOWN) or "nothing"
