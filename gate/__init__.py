"""parity-gate: the gate between an ONNX export and the model registry.

What stands in `__all__` is the public API; all else is private and may change without notice.
Nothing is imported before it is used, so that `import gate` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gate.decision.checks import CheckResult, Verdict
    from gate.decision.decision import Decision, decide
    from gate.errors import GateError
    from gate.front_door import Reference, Verdicted, check
    from gate.golden.verify import verify_golden
    from gate.localisation.locate import locate
    from gate.onnxfile.candidate import Candidate
    from gate.parity.arrays.samples import Samples
    from gate.parity.case import Case
    from gate.parity.measure import Measurement, measure
    from gate.parity.workload import Workload
    from gate.policy.policy import Policy
    from gate.preprocess.spec import PreprocessSpec
    from gate.records.evidence import Evidence
    from gate.records.localisation import Localisation
    from gate.storage.digest import Digest

__version__ = "0.1.0"

__all__ = [
    "Candidate",
    "Case",
    "CheckResult",
    "Decision",
    "Digest",
    "Evidence",
    "GateError",
    "Localisation",
    "Measurement",
    "Policy",
    "PreprocessSpec",
    "Reference",
    "Samples",
    "Verdict",
    "Verdicted",
    "Workload",
    "check",
    "decide",
    "locate",
    "measure",
    "verify_golden",
]

_WHERE = {
    "gate.decision.checks": ("CheckResult", "Verdict"),
    "gate.decision.decision": ("Decision", "decide"),
    "gate.errors": ("GateError",),
    "gate.front_door": ("Reference", "Verdicted", "check"),
    "gate.parity.workload": ("Workload",),
    "gate.golden.verify": ("verify_golden",),
    "gate.localisation.locate": ("locate",),
    "gate.onnxfile.candidate": ("Candidate",),
    "gate.parity.arrays.samples": ("Samples",),
    "gate.parity.case": ("Case",),
    "gate.parity.measure": ("Measurement", "measure"),
    "gate.policy.policy": ("Policy",),
    "gate.preprocess.spec": ("PreprocessSpec",),
    "gate.records.evidence": ("Evidence",),
    "gate.records.localisation": ("Localisation",),
    "gate.storage.digest": ("Digest",),
}
_MODULES = {name: module for module, names in _WHERE.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module 'gate' has no public name {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
