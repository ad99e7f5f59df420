"""ONNX Runtime session options, and the options that a policy may set for a runtime."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, model_validator

from gate.policy.sections import PolicyRecord, RuntimePolicy
from gate.records.runtime import (
    BUILTIN_NAMES,
    CPU_PROVIDER,
    CUDA_PROVIDER,
    ORT,
    RECORDED,
    RUNTIMES,
    SERVER,
    RuntimeName,
    RuntimeTraits,
)

if TYPE_CHECKING:
    from gate.policy.policy import Policy

OPTIMIZATIONS_OFF = "ORT_DISABLE_ALL"

BASIC = "ORT_ENABLE_BASIC"
"""The level to try if a file can't be opened with optimizations off."""

_MODEL_ENTRIES = (
    "session.load_model_format",
    "session.model_external_initializers_file_folder_path",
)
"""Config entries that decide which bytes are the model. These must be the bytes of the digest."""

_COMPILED = (
    "trt_engine_cache_enable", "trt_dump_ep_context_model", "trt_ep_context_file_path",
    "trt_weight_stripped_engine_enable", "trt_onnx_", "trt_external_data_bytestream",
    "nv_runtime_cache_path", "cache_dir", "cachedir", "cache_key", "cachekey", "load_config",
    "modelcachedirectory", "migraphx_model_cache_dir", "migraphx_load_", "qnn_context_cache_",
    "context_file_path", "context_enable", "share_ep_contexts",
)  # fmt: skip
"""Lower-case prefixes of options that make a provider run a model compiled earlier or loaded from
elsewhere. The key of TensorRT's engine cache does not include the weights. OpenVINO's `load_config`
may name a cache. TensorRT's timing cache is allowed, because it contains only timings."""

_LOWERING = {"mlas.enable_gemm_fastmath_arm64_bfloat16": "bfloat16"}
"""Config entries that lower the precision on the CPU, with that precision."""

_FALSE = ("", "0", "false")

Provider = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]+ExecutionProvider$")]

Level = Literal["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_LAYOUT",
                "ORT_ENABLE_ALL"]  # fmt: skip


class OrtSettings(PolicyRecord):
    """The options that every ONNX Runtime session accepts."""

    disabled_optimizers: tuple[str, ...] = ()
    """Names of graph optimizations to disable, for example `MatmulTransposeFusion`."""
    config: dict[str, str] = Field(default_factory=dict)
    """Config entries, for example `session.disable_prepacking: "1"`."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """`intra_op_num_threads`. None: `determinism.threads`, or PyTorch's default."""

    @model_validator(mode="after")
    def _same_model(self) -> Self:
        if reserved := [key for key in self.config if key in _MODEL_ENTRIES]:
            raise ValueError(f"config: {reserved[0]} decides which file is read; leave it out")
        for key, value in self.config.items():
            _check_compiled(key.rpartition(".")[2], value, where=f"config: {key}: ")
        return self

    @property
    def reduced_precision(self) -> str | None:
        """The precision below float32 that a config entry requests, or None."""
        on = (_LOWERING[key] for key in self.config if self._lowers(key))
        return next(on, None)

    def check_exact(self) -> None:
        """Raise ValueError for a config entry that contradicts `precision: exact`."""
        for key in filter(self._lowers, self.config):
            raise ValueError(
                f"config: {key} computes in {_LOWERING[key]}, but precision is 'exact'. Leave it "
                "out, or set precision: reduced with suitable bounds (gate init --precision "
                "reduced)"
            )

    def _lowers(self, key: str) -> bool:
        return key in _LOWERING and self.config[key].lower() not in _FALSE


class OrtOptions(OrtSettings):
    """The options of the kind `ort`, including the providers that run the nodes."""

    providers: Annotated[tuple[Provider, ...], Field(min_length=1)]
    """Execution providers by priority. The first must be active and run nodes. Compute nodes on a
    provider that is not listed are refused, so list CPUExecutionProvider if it may run some."""
    provider_options: dict[Provider, dict[str, str]] = Field(default_factory=dict)
    """Options by provider, as ONNX Runtime accepts them: strings."""
    graph_optimization_level: Level = "ORT_ENABLE_ALL"

    @model_validator(mode="after")
    def _listed(self) -> Self:
        if len(set(self.providers)) < len(self.providers):
            raise ValueError(f"providers {list(self.providers)}: list each once")
        if CPU_PROVIDER in self.providers[:-1]:
            raise ValueError(f"{CPU_PROVIDER} runs every node: list it last")
        if unlisted := sorted(set(self.provider_options) - set(self.providers)):
            raise ValueError(f"provider_options are for {unlisted[0]}, which is not in providers")
        if self.provider_options.get(CPU_PROVIDER):
            raise ValueError(f"provider_options: {CPU_PROVIDER} has none; leave them out")
        for provider, options in self.provider_options.items():
            for option, value in options.items():
                _check_compiled(option, value, provider=provider)
        return self


@dataclass(frozen=True)
class OrtSetup:
    """How a session is opened, and therefore what it must report."""

    providers: tuple[str, ...]
    """As listed, without the CPU provider that ONNX Runtime adds."""
    optimization: str
    provider_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    settings: OrtSettings = field(default_factory=OrtSettings)
    several: bool = False
    """True if options are recorded with their provider, because two may have options of one
    name."""

    @classmethod
    def from_traits(
        cls, traits: RuntimeTraits, options: Mapping[str, JsonValue], cuda: Mapping[str, str]
    ) -> Self:
        """Create the setup of a built-in runtime name. `cuda`: options of the CUDA provider."""
        return cls(
            (traits.provider,),
            str(traits.optimization),
            {CUDA_PROVIDER: cuda} if traits.cuda else {},
            OrtSettings.model_validate_json(json.dumps(dict(options))),
        )

    @classmethod
    def from_options(cls, options: Mapping[str, JsonValue], cuda: Mapping[str, str]) -> Self:
        """Create the setup of a runtime of the kind `ort`. Raises ValidationError."""
        requested = OrtOptions.model_validate_json(json.dumps(dict(options)))
        by_provider = {name: dict(values) for name, values in requested.provider_options.items()}
        if CUDA_PROVIDER in requested.providers:
            by_provider[CUDA_PROVIDER] = {**cuda, **by_provider.get(CUDA_PROVIDER, {})}
        level = requested.graph_optimization_level
        return cls(requested.providers, level, by_provider, requested, several=True)

    @property
    def provider(self) -> str:
        """The first provider, which must be active."""
        return self.providers[0]

    @property
    def on_cpu(self) -> bool:
        """True if only the CPU is requested."""
        return self.providers == (CPU_PROVIDER,)

    @property
    def cuda(self) -> bool:
        """True if CUDA is the first provider."""
        return self.provider == CUDA_PROVIDER

    @property
    def optimized(self) -> Self:
        """The setup with its optimizations, or with all of them if they are off."""
        return self if self != self.plain else replace(self, optimization="ORT_ENABLE_ALL")

    @property
    def plain(self) -> Self:
        """The setup with optimizations off."""
        return replace(self, optimization=OPTIMIZATIONS_OFF)

    @property
    def is_named_plain(self) -> bool:
        """True for a built-in runtime with optimizations off, which is never deployed."""
        return self.optimization == OPTIMIZATIONS_OFF and not self.several

    def reported(self) -> Iterator[tuple[str, str]]:
        """Yield the options that a session with this setup reports, without threads."""
        yield "graph_optimization_level", self.optimization
        for provider in self.providers:
            for option, value in self.provider_options.get(provider, {}).items():
                yield self.key(provider, option), value
        yield from self.settings.config.items()
        if self.settings.disabled_optimizers:
            yield "disabled_optimizers", self.disabled

    def key(self, provider: str, option: str) -> str:
        """Return the name under which a provider's option is recorded."""
        return f"{provider}.{option}" if self.several else option

    @property
    def disabled(self) -> str:
        """The disabled optimizations as text."""
        return ", ".join(sorted(self.settings.disabled_optimizers))


def _check_compiled(
    option: str, value: str, *, provider: str = "a provider", where: str = ""
) -> None:
    if option.lower().startswith(_COMPILED) and value.lower() not in _FALSE:
        raise ValueError(
            f"{where}{option} makes {provider} run a model that was compiled earlier, not the file "
            "with this digest; leave it out"
        )


# A recording has one answer per input. Bounds on repeated runs and on other batches can't be
# measured on it, so such a policy is refused.
UNREPEATED = (
    "repeatability",
    "repeatability_ratio",
    "batch_invariance",
    "batch_invariance_ratio",
)
"""Bounds that need more than one answer to an input."""


class RecordedOptions(BaseModel):
    """The options of a runtime of the kind `recorded`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    probes: Literal["required", "when_recorded"] = "required"
    """`when_recorded`: probes without recorded outputs are WAIVED and shown."""


def check_recorded(runtime: RuntimePolicy) -> None:
    """Raise ValueError for unknown options, and for bounds that can't be measured on a
    recording."""
    RecordedOptions.model_validate(runtime.options)
    bounded = runtime.bounds.configured(UNREPEATED)
    if bounded and runtime.required != "never":
        raise ValueError(
            f"{', '.join(bounded)} can't be measured on a recording, which has one answer "
            "per input; leave them out"
        )


def _has_kind(policy: Policy, name: RuntimeName, kind: RuntimeName) -> bool:
    runtime = policy.runtimes.get(name)
    return runtime is not None and (runtime.kind or name) == kind


def is_recorded(policy: Policy, name: RuntimeName) -> bool:
    """Return whether the runtime of this name is a recording."""
    return _has_kind(policy, name, RECORDED)


def is_server(policy: Policy, name: RuntimeName) -> bool:
    """Return whether the runtime of this name is a model server."""
    return _has_kind(policy, name, SERVER)


def servers_of(policy: Policy) -> list[RuntimeName]:
    """Return the names of the model servers of a policy."""
    return [name for name in policy.runtimes if is_server(policy, name)]


def may_lack_probes(policy: Policy, name: RuntimeName) -> bool:
    """Return whether the policy allows this recording to have no outputs for probes."""
    return (
        is_recorded(policy, name) and policy.runtimes[name].options.get("probes") == "when_recorded"
    )


_RESERVED_NAMES = ("reference", "export", "dataset", "self_check", "train")
"""Names that stand in the position of a runtime in MLflow metric names."""


class NoOptions(BaseModel):
    """The options of a runtime that accepts none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def check_runtime(name: RuntimeName, runtime: RuntimePolicy, *, exact: bool) -> None:
    """Raise ValueError for a kind or options that a built-in runtime does not accept.

    With `exact`, also for options that lower the precision. The registry of runtimes checks the
    options of other runtimes when they are measured.
    """
    traits = RUNTIMES.get(name)
    kind = runtime.kind or name
    if name in _RESERVED_NAMES:
        raise ValueError(f"{name}: this name is reserved for metrics; use another")
    if name in BUILTIN_NAMES and kind != name:
        raise ValueError(
            f"{name}: kind is '{kind}', but this name is that of another kind; use another name"
        )
    if runtime.exceeded == "warn" and (traits is None or traits.engine != "torch"):
        raise ValueError(
            f"{name}: exceeded is 'warn', but this runtime runs the file. Set it for torch-cuda, "
            "or widen the bounds"
        )
    if traits is None and kind in RUNTIMES:
        raise ValueError(
            f"{name}: kind is '{kind}', which can only be used under its own name. Use kind: {ORT} "
            "with the providers and the level that you need"
        )
    try:
        if traits is not None and traits.engine == "torch":
            NoOptions.model_validate(runtime.options)
        elif kind == RECORDED:
            check_recorded(runtime)
        else:
            setup = setup_of(name, kind, runtime.options, {})
            if exact and setup is not None:
                setup.settings.check_exact()
    except ValueError as error:
        raise ValueError(f"{name}: options: {error}") from error


def ort_setup(policy: Policy, name: RuntimeName) -> OrtSetup | None:
    """Return the setup of an ONNX Runtime runtime of this policy; None for another engine."""
    cuda = policy.cuda_provider.provider_options(tf32=policy.determinism.tf32)
    runtime = policy.runtimes.get(name)
    if runtime is None:
        return setup_of(name, name, {}, cuda)
    return setup_of(name, runtime.kind or name, runtime.options, cuda)


def setup_of(
    name: RuntimeName, kind: RuntimeName, options: Mapping[str, JsonValue], cuda: Mapping[str, str]
) -> OrtSetup | None:
    """Return the setup of a runtime by its kind and options; None for another engine.

    Raises ValidationError.
    """
    traits = RUNTIMES.get(name)
    if traits is not None:
        return OrtSetup.from_traits(traits, options, cuda) if traits.engine != "torch" else None
    return OrtSetup.from_options(options, cuda) if kind == ORT else None


def plain_setup(name: RuntimeName) -> OrtSetup:
    """Return the setup of a built-in runtime name without options."""
    return OrtSetup.from_traits(RUNTIMES[name], {}, {})
