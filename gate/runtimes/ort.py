"""ONNX Runtime: with the provider and level that a name promises, or with those of the options."""

from __future__ import annotations

import difflib
import time
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from gate.errors import OutputMismatch, PolicyError
from gate.onnxfile.placement import read_placement
from gate.onnxfile.session import NO_SPINNING, open_session, session_options
from gate.package.loaded import onnx_runtime
from gate.policy.ort_options import OrtOptions, OrtSettings, OrtSetup
from gate.records.runtime import CPU_PROVIDER, CUDA_PROVIDER, ORT, RUNTIMES, RuntimeName
from gate.runtimes.precision import normal, precision_of
from gate.runtimes.runtime import (
    Array,
    Batch,
    Conditions,
    Promises,
    Proof,
    RunnableFile,
    Runtime,
    Session,
)
from gate.storage.temporary import temporary_folder

_ON_CUDA_DEVICES = (
    CUDA_PROVIDER,
    "TensorrtExecutionProvider",
    "NvTensorRTRTXExecutionProvider",
)


class OrtSession(Session):
    """One session of ONNX Runtime, with its node placement from a profiled run beforehand."""

    def __init__(
        self, file: RunnableFile, setup: OrtSetup, *, conditions: Conditions, example: Batch
    ) -> None:
        """Open the file, and profile one run of `example` in the session that computes all else:
        once a profile is ended, a session computes as one that had none, bit for bit.

        Raises EvidenceError where the provider doesn't load, OutputMismatch where the file's
        inputs or outputs are not the subject's, and whatever ONNX Runtime raises.
        """
        self._file = file
        self._setup = setup
        self._conditions = conditions
        with temporary_folder() as folder:
            options = self._options()
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(folder) / "placement")
            self._session = self._create(options)
            self._session.run(None, dict(example))
            self._placement = read_placement(Path(self._session.end_profiling()))

    def run(self, batch: Batch) -> list[Array]:
        """Compute the outputs of `batch`."""
        return list(self._session.run(None, dict(batch)))

    def proof(self) -> Proof:
        """Options as the session reports them back."""
        options, setup = self._session.get_session_options(), self._setup
        reported = {
            "graph_optimization_level": options.graph_optimization_level.name,
            "execution_mode": options.execution_mode.name,
            "intra_op_num_threads": str(options.intra_op_num_threads),
            "use_deterministic_compute": str(int(options.use_deterministic_compute)),
        }
        for key in (NO_SPINNING[0], *setup.settings.config):
            reported[key] = options.get_session_config_entry(key)
        if setup.disabled:  # which no session reports
            reported["disabled_optimizers"] = setup.disabled
        by_provider = self._session.get_provider_options()
        for provider in setup.providers:
            if provider != CPU_PROVIDER:
                given = by_provider.get(provider, {})
                reported |= {setup.key(provider, k): normal(given[k]) for k in sorted(given)}
        stray = () if CPU_PROVIDER in setup.providers else self._placement.cpu_compute_nodes
        return Proof(
            providers_active=tuple(self._session.get_providers()),
            nodes_per_provider=self._placement.nodes_per_provider,
            fallback_nodes=stray,
            session_options=reported,
            versions=_versions(),
            precision=precision_of(setup, by_provider),
        )

    def _options(self) -> Any:
        return session_options(
            self._setup,
            threads=self._conditions.threads,
            deterministic=self._conditions.deterministic,
        )

    def _create(self, options: Any) -> Any:
        """A session of the file that was described, with the provider that was asked for."""
        loadable, start = self._file.candidate.loadable(), time.perf_counter()
        session = open_session(loadable, options, self._setup)
        self.open_seconds = time.perf_counter() - start
        self._check_names(session)
        return session

    def _check_names(self, session: Any) -> None:
        subject = self._file.subject
        for side, got, specs in (
            ("inputs", session.get_inputs(), subject.inputs),
            ("outputs", session.get_outputs(), subject.outputs),
        ):
            names, wanted = [value.name for value in got], [spec.name for spec in specs]
            if names != wanted:
                raise OutputMismatch(
                    f"the file has the {side} {names}, the record of it says {wanted}. "
                    "Read the file again: it is not the one that was described."
                )


class _OnnxRuntime(Runtime):
    """What all of them have in common: they are opened by a setup."""

    apart: ClassVar[bool] = False

    def absent_reason(self, options: Any) -> str | None:
        """Without the device that the promised provider needs."""
        if self._setup(options, Conditions()).provider not in _ON_CUDA_DEVICES:
            return None
        from gate.runtimes.cuda import cuda_absent_reason

        return cuda_absent_reason()

    def versions(self) -> dict[str, str]:
        """Of the package that is imported."""
        return _versions()

    def open(
        self, file: RunnableFile, *, options: Any, conditions: Conditions, example: Batch
    ) -> Session:
        """Raises EvidenceError where the provider doesn't load, and what ONNX Runtime raises."""
        setup = self._setup(options, conditions)
        return OrtSession(file, setup, conditions=conditions, example=example)

    def promised(self, options: Any) -> Promises:
        """The first provider; CUDA's bounds for all that are no CPU's."""
        setup = self._setup(options, Conditions())
        on_cpu = setup.provider in (CPU_PROVIDER, "XnnpackExecutionProvider")
        return Promises(setup.provider, "cpu" if on_cpu else "cuda")

    @abstractmethod
    def _setup(self, options: Any, conditions: Conditions) -> OrtSetup: ...


class NamedOrt(_OnnxRuntime):
    """By one of the gate's own names."""

    name: ClassVar[RuntimeName]
    options = OrtSettings

    def _setup(self, options: Any, conditions: Conditions) -> OrtSetup:
        given = options.model_dump(mode="json")
        return OrtSetup.of_traits(RUNTIMES[self.name], given, conditions.cuda_options)


class OrtCpu(NamedOrt):
    """The CPU, optimisations off: the export alone."""

    name = "ort-cpu"


class OrtCpuOptimized(NamedOrt):
    """The CPU, all optimisations: as it is served."""

    name = "ort-cpu-optimized"


class OrtCuda(NamedOrt):
    """CUDA, optimisations off."""

    name = "ort-cuda"


class OrtCudaOptimized(NamedOrt):
    """CUDA, all optimisations."""

    name = "ort-cuda-optimized"


class Ort(_OnnxRuntime):
    """The providers, and the level, that the options name."""

    name: ClassVar[RuntimeName] = ORT
    options = OrtOptions

    def absent_reason(self, options: Any) -> str | None:
        """In a build of ONNX Runtime without the providers, or without the device. Raises
        PolicyError for a provider that no build has."""
        missing = _missing(self._setup(options, Conditions()).providers)
        return missing or super().absent_reason(options)

    def _setup(self, options: Any, conditions: Conditions) -> OrtSetup:
        return OrtSetup.of_options(options.model_dump(mode="json"), conditions.cuda_options)


def _missing(providers: Sequence[str]) -> str | None:
    """Which provider this build does not have; None: it has all of them."""
    onnxruntime = onnx_runtime()
    there, anywhere = onnxruntime.get_available_providers(), onnxruntime.get_all_providers()
    version = f"ONNX Runtime {onnxruntime.__version__}"
    missing = [name for name in providers if name not in there]
    for name in missing:
        if name not in anywhere:
            stems = {_stem(each): each for each in (*there, *anywhere)}
            near = difflib.get_close_matches(_stem(name), stems, n=1, cutoff=0.5)
            hint = f" Did you mean '{stems[near[0]]}'?" if near else ""
            raise PolicyError(
                f"{version} knows no {name}, expected one of {', '.join(anywhere)}.{hint}"
            )
    if not missing:
        return None
    return (
        f"this build of {version} has no {missing[0]}: it has {', '.join(there)}. Install the "
        "package of ONNX Runtime that has it."
    )


def _stem(provider: str) -> str:
    return provider.removesuffix("ExecutionProvider").lower()


def _versions() -> dict[str, str]:
    return {"onnxruntime": str(onnx_runtime().__version__)}
