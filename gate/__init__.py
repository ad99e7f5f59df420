"""parity-gate: the gate between an ONNX export and the model registry.

`__all__` is the public API; everything else is private and may change without notice. Names are
imported on first use, so that `import gate` is fast.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # typing is imported later: Ctrl-C during its import would show a traceback

if TYPE_CHECKING:
    from typing import Any

    from gate.api import EvaluationResult, check, collect_evidence
    from gate.data.samples import SampleSet
    from gate.decision.check_result import CheckResult, Verdict
    from gate.decision.decide import Decision, decide
    from gate.errors import GateError
    from gate.golden.verify import verify_golden
    from gate.localize.locate import locate
    from gate.measure.job import EvaluationData, MeasurementJob, Reference
    from gate.onnx_file.tested_file import TestedFile
    from gate.policy.policy import Policy
    from gate.preprocess.spec import PreprocessSpec
    from gate.records.evidence import Evidence
    from gate.records.localization import Localization
    from gate.storage.digest import Digest

__version__ = "0.2.0"

__all__ = [
    "CheckResult",
    "Decision",
    "Digest",
    "EvaluationData",
    "EvaluationResult",
    "Evidence",
    "GateError",
    "Localization",
    "MeasurementJob",
    "Policy",
    "PreprocessSpec",
    "Reference",
    "SampleSet",
    "TestedFile",
    "Verdict",
    "check",
    "collect_evidence",
    "decide",
    "locate",
    "verify_golden",
]

_WHERE = {
    "gate.api": (
        "EvaluationResult",
        "check",
        "collect_evidence",
    ),
    "gate.data.samples": ("SampleSet",),
    "gate.decision.check_result": (
        "CheckResult",
        "Verdict",
    ),
    "gate.decision.decide": (
        "Decision",
        "decide",
    ),
    "gate.errors": ("GateError",),
    "gate.golden.verify": ("verify_golden",),
    "gate.localize.locate": ("locate",),
    "gate.measure.job": (
        "EvaluationData",
        "MeasurementJob",
        "Reference",
    ),
    "gate.onnx_file.tested_file": ("TestedFile",),
    "gate.policy.policy": ("Policy",),
    "gate.preprocess.spec": ("PreprocessSpec",),
    "gate.records.evidence": ("Evidence",),
    "gate.records.localization": ("Localization",),
    "gate.storage.digest": ("Digest",),
}
_MODULES = {name: module for module, names in _WHERE.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'gate' has no public name {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted([*__all__, "__version__"])
