"""The runtimes of a policy: what of them can be checked without having them, and how ONNX Runtime
is set up for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from pydantic import BaseModel, ConfigDict, JsonValue

from gate.policy.ort_options import OrtSetup
from gate.policy.recorded import check_recorded
from gate.policy.sections import CudaProviderPolicy, DeterminismPolicy, RuntimePolicy
from gate.records.runtime import ORT, OWN, RECORDED, RUNTIMES, RuntimeName

_TAKEN = ("reference", "export", "dataset", "self_check", "train")
"""What stands in a runtime's place before numbers on the pages of runs."""


class _Demands(Protocol):
    """What of a policy decides how a runtime is set up."""

    @property
    def runtimes(self) -> Mapping[RuntimeName, RuntimePolicy]: ...
    @property
    def determinism(self) -> DeterminismPolicy: ...
    @property
    def cuda_provider(self) -> CudaProviderPolicy: ...


class NoOptions(BaseModel):
    """Of a runtime that takes none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def check_runtime(name: RuntimeName, runtime: RuntimePolicy, *, exact: bool) -> None:
    """Raise ValueError for a kind or options that can't be those of the gate's own runtimes, and,
    where the precision is to be `exact`, for options that lower it.

    Of the others only the registry knows, where they are measured.
    """
    traits = RUNTIMES.get(name)
    kind = runtime.kind or name
    if name in _TAKEN:
        raise ValueError(f"{name}: numbers beside those of runtimes have this name; take another")
    if name in OWN and kind != name:
        raise ValueError(
            f"{name}: kind is '{kind}', and this name promises something else; take another name"
        )
    if traits is None and kind in RUNTIMES:
        raise ValueError(
            f"{name}: kind is '{kind}', which measures under its own name only; take kind: {ORT} "
            "with the providers and the level that you want"
        )
    try:
        if traits is not None and traits.engine == "torch":
            NoOptions.model_validate(runtime.options)
        elif kind == RECORDED:
            check_recorded(runtime)
        else:
            setup = _setup(name, runtime, {})
            if exact and setup is not None:
                setup.settings.check_exact()
    except ValueError as error:
        raise ValueError(f"{name}: options: {error}") from error


def ort_setup(policy: _Demands, name: RuntimeName) -> OrtSetup | None:
    """How ONNX Runtime is set up for a runtime of this policy; None for one of another engine."""
    cuda = policy.cuda_provider.provider_options(tf32=policy.determinism.tf32)
    return _setup(name, policy.runtimes.get(name), cuda)


def setup_of(
    name: RuntimeName, kind: RuntimeName, options: Mapping[str, JsonValue], cuda: Mapping[str, str]
) -> OrtSetup | None:
    """The same, of a runtime by its kind and options. Raises ValidationError."""
    traits = RUNTIMES.get(name)
    if traits is not None:
        return OrtSetup.of_traits(traits, options, cuda) if traits.engine != "torch" else None
    return OrtSetup.of_options(options, cuda) if kind == ORT else None


def plain_setup(name: RuntimeName) -> OrtSetup:
    """Of one of the gate's own names, with nothing set."""
    return OrtSetup.of_traits(RUNTIMES[name], {}, {})


def _setup(
    name: RuntimeName, runtime: RuntimePolicy | None, cuda: Mapping[str, str]
) -> OrtSetup | None:
    options = {} if runtime is None else runtime.options
    return setup_of(name, runtime.kind or name if runtime else name, options, cuda)
