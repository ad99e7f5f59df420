"""The runtimes that a policy asks for, found in the registry, and what each of them is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gate.errors import EvidenceError, PolicyError
from gate.policy.built_in import exact_bounds
from gate.policy.policy import Policy
from gate.policy.sections import RuntimePolicy
from gate.records.runtime import CUDA_PROVIDER, RUNTIMES, RuntimeIdentity, RuntimeName
from gate.runtimes import registry
from gate.runtimes.apart import Apart
from gate.runtimes.recorded import Recorded
from gate.runtimes.runtime import Batch, Conditions, Promises, Proof, RunnableFile, Session
from gate.storage.yaml_section import first_problem

_ON_CUDA = (CUDA_PROVIDER, "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider")
Installed = Mapping[RuntimeName, tuple[registry.Entry, ...]]


class ChosenRuntime:
    """One runtime under the name that a policy gives it."""

    def __init__(
        self, name: RuntimeName, wanted: RuntimePolicy, installed: Installed | None = None
    ) -> None:
        """`installed`: the entries of the registry, where they were read before.

        Raises PolicyError where there is no such runtime, or it does not take these options.
        """
        self.name = name
        self._kind = wanted.kind or name
        self._plain = dict(wanted.options)
        self._entry = registry.find(self._kind, installed or registry.entries())
        self.runtime = registry.load(self._entry)
        self._options = _checked(self.runtime.options, name, self._plain)
        self._promises: Promises | None = None

    @property
    def package(self) -> str:
        """That it comes with; empty: the gate itself."""
        return self._entry.package

    @property
    def promises(self) -> Promises:
        """What it claims to be; nothing where it can't even say that."""
        if self._promises is None:
            if isinstance(self.runtime, Apart):
                return Promises("")
            self._promises = self.runtime.promised(self._options)
        return self._promises

    @property
    def takes_cuda(self) -> bool:
        """Whether it is to compute on a CUDA device, from this process."""
        return not isinstance(self.runtime, Apart) and self.promises.provider in _ON_CUDA

    def absent_reason(self) -> str | None:
        """Why it can't run on this machine. Raises PolicyError for options that it does not take,
        and whatever it raises."""
        reason = self.runtime.absent_reason(self._options)
        self._promises = self.runtime.promised(self._options)
        return reason

    def take(self, recording: Path) -> None:
        """Give it what it answers from. Raises PolicyError where it computes by itself."""
        if not isinstance(self.runtime, Recorded):
            raise PolicyError(
                f"'{self.name}' is a runtime that computes here, and a recording was given for it. "
                "Give the recording another name, or say kind: recorded in the policy."
            )
        self.runtime.recording = recording

    def open(self, file: RunnableFile, *, conditions: Conditions, example: Batch) -> Session:
        """Raises whatever the runtime raises."""
        return self.runtime.open(
            file, options=self._options, conditions=conditions, example=example
        )

    def versions(self) -> dict[str, str]:
        """Of its libraries, where it can run."""
        if isinstance(self.runtime, Apart):
            return self.runtime.found_versions(self._options)
        return self.runtime.versions()

    def close(self) -> None:
        """End the process that it may have started."""
        if isinstance(self.runtime, Apart):
            self.runtime.close()

    def identity(self, proof: Proof | None = None) -> RuntimeIdentity | None:
        """What it was, for the evidence; None where its name alone says all."""
        if self.name in RUNTIMES and not self._plain:
            return None
        proof = proof or Proof()
        return RuntimeIdentity(
            kind=self._kind,
            options=self._plain,
            package=self._entry.package,
            provider=self.promises.provider,
            bounds=self.promises.bounds,
            versions=proof.versions,
            device=proof.device,
            precision=proof.precision,
        )


def chosen_of(
    policy: Policy, recordings: Mapping[RuntimeName, Path] | None = None
) -> list[ChosenRuntime]:
    """All that the policy asks for, in its order. `recordings`: a folder or zip by name.

    Raises PolicyError, before anything is measured."""
    installed, left = registry.entries(), dict(recordings or {})
    chosen = [
        ChosenRuntime(name, wanted, installed)
        for name, wanted in policy.runtimes.items()
        if wanted.required != "never"
    ]
    for runtime in chosen:
        if runtime.name in left:
            runtime.take(left.pop(runtime.name))
    if left:
        raise PolicyError(
            f"a recording was given for {', '.join(left)}, which the policy does not ask for. Add "
            "an entry of kind: recorded, or use gate check --recorded."
        )
    return chosen


def with_runtime(policy: Policy, name: RuntimeName) -> Policy:
    """The same policy, which asks for this runtime too: always, and within the built-in bounds that
    it promises to fit, where the policy has none for it.

    Raises PolicyError where there is no such runtime, and what it raises where it can't say what
    it is.
    """
    wanted = policy.runtimes.get(name, RuntimePolicy(required="never"))
    chosen = ChosenRuntime(name, wanted)
    try:
        chosen.absent_reason()
        fitting = exact_bounds(chosen.promises.bounds, classes=policy.task != "tensors")
    finally:
        chosen.close()
    bounds = wanted.bounds
    if bounds.empty:
        bounds = fitting.model_copy(update=bounds.costs)
    plain = policy.to_plain()
    plain["runtimes"][name] = {**wanted.to_plain(), "bounds": bounds.to_plain()}
    plain["runtimes"][name]["required"] = "always"
    try:
        return Policy.from_json(json.dumps(plain))
    except EvidenceError as error:
        raise PolicyError(f"the policy with the runtime {name}: {error}") from error


def _checked(options: type[Any], name: RuntimeName, plain: dict[str, Any]) -> Any:
    try:
        return options.model_validate_json(json.dumps(plain))
    except ValidationError as error:
        raise PolicyError(f"runtime {name}: options: {first_problem(error)}") from error
