"""Where a file diverges from its model, layer by layer: the record of `gate locate`.

It explains a refusal. It is no evidence: no verdict depends on it.
"""

from __future__ import annotations

from typing import Literal

from gate.records.instruments import Count
from gate.records.runtime import RuntimeName
from gate.storage.record import Measured, Record, Sha256, later

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


class Localisation(Record):
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
    fault: str | None = later(None)
    """Of the first source alone: what is wrong with it, without a full stop."""
    optimiser: bool = later(False)
    """With optimisations off the file agrees."""
    remedy: str | None = None

    @property
    def diverges(self) -> bool:
        """True if a layer, or only the file as a whole, is not what the model computes."""
        return self.first_divergence is not None or any(
            row.verdict in ("source", "propagated") for row in self.layers
        )

    @property
    def unmapped(self) -> tuple[str, ...]:
        """The rows for which no ONNX tensor was found."""
        return tuple(row.title for row in self.layers if row.verdict == "unmapped")


class Explanation(Record):
    """What localisation adds to a verdict: nothing where none was needed, else the layers, or why
    they are not known."""

    schema_version: Literal[1] = 1
    localisation: Localisation | None = None
    failure: str | None = None
