"""Runtimes of kind `recorded`: what a policy may say of outputs that were computed elsewhere.

A recording gives one answer to each input. So it can't be repeated, and its samples can't be put
into other batches; a policy that bounds either of it is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict

from gate.policy.sections import RuntimePolicy
from gate.records.runtime import RECORDED, RuntimeName

UNREPEATED = (
    "repeatability",
    "repeatability_ratio",
    "batch_invariance",
    "batch_invariance_ratio",
)
"""Bounds on what takes more than one answer to an input."""


class RecordedOptions(BaseModel):
    """Of a runtime of this kind."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    probes: Literal["required", "when_recorded"] = "required"
    """`when_recorded`: what the recording has no outputs for is WAIVED, and shown."""


class _Demands(Protocol):
    @property
    def runtimes(self) -> Mapping[RuntimeName, RuntimePolicy]: ...


def check_recorded(runtime: RuntimePolicy) -> None:
    """Raise ValueError for options that it does not take, and for bounds that can't be measured."""
    RecordedOptions.model_validate(runtime.options)
    bounded = [name for name in UNREPEATED if getattr(runtime.bounds, name) is not None]
    if bounded and runtime.required != "never":
        raise ValueError(
            f"{', '.join(bounded)} can't be measured on a recording, which has one answer "
            "to each input; leave them out"
        )


def is_recorded(policy: _Demands, name: RuntimeName) -> bool:
    """Whether a recording measures under this name."""
    wanted = policy.runtimes.get(name)
    return wanted is not None and (wanted.kind or name) == RECORDED


def may_lack_probes(policy: _Demands, name: RuntimeName) -> bool:
    """Whether the policy says in words that this recording may have no outputs for probes."""
    return (
        is_recorded(policy, name) and policy.runtimes[name].options.get("probes") == "when_recorded"
    )
