"""ONNX Runtime session options; what a policy may set for a runtime."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, model_validator

from gate.policy.sections import CudaProviderPolicy, DeterminismPolicy, PolicyRecord, RuntimePolicy
from gate.records.runtime import (
    CPU_PROVIDER,
    CUDA_PROVIDER,
    ORT,
    OWN,
    RECORDED,
    RUNTIMES,
    SERVER,
    RuntimeName,
    RuntimeTraits,
)

OPTIMIZATIONS_OFF = "ORT_DISABLE_ALL"

BASIC = "ORT_ENABLE_BASIC"
"""What is tried where a file does not open with optimizations off."""

_OURS = ("session.load_model_format", "session.model_external_initializers_file_folder_path")
"""They decide which bytes are the model: those of the digest, and no others."""

_COMPILED = (
    "trt_engine_cache_enable", "trt_dump_ep_context_model", "trt_ep_context_file_path",
    "trt_weight_stripped_engine_enable", "trt_onnx_", "trt_external_data_bytestream",
    "nv_runtime_cache_path", "cache_dir", "cachedir", "cache_key", "cachekey", "load_config",
    "modelcachedirectory", "migraphx_model_cache_dir", "migraphx_load_", "qnn_context_cache_",
    "context_file_path", "context_enable", "share_ep_contexts",
)  # fmt: skip
"""How options begin, in small letters, by which a provider computes what was compiled before, or
was read from elsewhere: the key of TensorRT's engines has no weights in it. OpenVINO's
`load_config` may name a cache. TensorRT's timing cache only has times."""

_LOWERING = {"mlas.enable_gemm_fastmath_arm64_bfloat16": "bfloat16"}
"""Config entries that lower the precision on the CPU, and to what."""

_OFF = ("", "0", "false")

Provider = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]+ExecutionProvider$")]

Level = Literal["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_LAYOUT",
                "ORT_ENABLE_ALL"]  # fmt: skip


class OrtSettings(PolicyRecord):
    """The options that every ONNX Runtime session accepts."""

    disabled_optimizers: tuple[str, ...] = ()
    """Optimizations of the graph that are left out, by name: `MatmulTransposeFusion`."""
    config: dict[str, str] = Field(default_factory=dict)
    """Config entries, such as `session.disable_prepacking: "1"`."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """`intra_op_num_threads`; None: as `determinism.threads`, else as PyTorch has them."""

    @model_validator(mode="after")
    def _same_model(self) -> Self:
        if taken := [key for key in self.config if key in _OURS]:
            raise ValueError(f"config: {taken[0]} decides which file is read; leave it out")
        for key, value in self.config.items():
            _check_compiled(key.rpartition(".")[2], value, where=f"config: {key}: ")
        return self

    @property
    def lowered(self) -> str | None:
        """The precision below float32 that config asks for; None: it asks for none."""
        on = (_LOWERING[key] for key in self.config if self._lowers(key))
        return next(on, None)

    def check_exact(self) -> None:
        """Raise ValueError for config that is not `precision: exact`."""
        for key in filter(self._lowers, self.config):
            raise ValueError(
                f"config: {key} computes in {_LOWERING[key]}, and precision is 'exact'; leave it "
                "out, or set precision: reduced, and bounds that fit it (gate init --precision "
                "reduced)"
            )

    def _lowers(self, key: str) -> bool:
        return key in _LOWERING and self.config[key].lower() not in _OFF


class OrtOptions(OrtSettings):
    """The options of the kind `ort`, including the providers that run the nodes."""

    providers: Annotated[tuple[Provider, ...], Field(min_length=1)]
    """The first is the promise: it must be active and run nodes. Compute nodes on one that is not
    listed are a fallback, and refused; so list CPUExecutionProvider where it may have some."""
    provider_options: dict[Provider, dict[str, str]] = Field(default_factory=dict)
    """By provider; as ONNX Runtime takes them: texts."""
    graph_optimization_level: Level = "ORT_ENABLE_ALL"

    @model_validator(mode="after")
    def _listed(self) -> Self:
        if len(set(self.providers)) < len(self.providers):
            raise ValueError(f"providers {list(self.providers)}: name each once")
        if CPU_PROVIDER in self.providers[:-1]:
            raise ValueError(f"{CPU_PROVIDER} runs every node: list it last")
        if strangers := sorted(set(self.provider_options) - set(self.providers)):
            raise ValueError(f"provider_options are for {strangers[0]}, which providers don't list")
        if self.provider_options.get(CPU_PROVIDER):
            raise ValueError(f"provider_options: {CPU_PROVIDER} takes none; leave them out")
        for provider, options in self.provider_options.items():
            for option, value in options.items():
                _check_compiled(option, value, provider=provider)
        return self


@dataclass(frozen=True)
class OrtSetup:
    """How a session is opened, and so what it must report."""

    providers: tuple[str, ...]
    """As listed, without the CPU that ONNX Runtime always adds."""
    optimization: str
    provider_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    settings: OrtSettings = field(default_factory=OrtSettings)
    several: bool = False
    """True if options are recorded by provider: two providers have options of one name."""

    @classmethod
    def from_traits(
        cls, traits: RuntimeTraits, options: Mapping[str, JsonValue], cuda: Mapping[str, str]
    ) -> Self:
        """Create the setup of a built-in runtime name. `cuda`: options of the CUDA provider."""
        return cls(
            (traits.provider,),
            str(traits.optimization),
            {CUDA_PROVIDER: cuda} if traits.cuda else {},
            OrtSettings.model_validate_json(_json(options)),
        )

    @classmethod
    def from_options(cls, options: Mapping[str, JsonValue], cuda: Mapping[str, str]) -> Self:
        """Create the setup of a runtime of the kind `ort`. Raises ValidationError."""
        wanted = OrtOptions.model_validate_json(_json(options))
        given = {name: dict(values) for name, values in wanted.provider_options.items()}
        if CUDA_PROVIDER in wanted.providers:
            given[CUDA_PROVIDER] = {**cuda, **given.get(CUDA_PROVIDER, {})}
        level = wanted.graph_optimization_level
        return cls(wanted.providers, level, given, wanted, several=True)

    @property
    def provider(self) -> str:
        """The promised one."""
        return self.providers[0]

    @property
    def on_cpu(self) -> bool:
        """Return whether only the CPU is requested."""
        return self.providers == (CPU_PROVIDER,)

    @property
    def cuda(self) -> bool:
        """Return True if CUDA is what is promised."""
        return self.provider == CUDA_PROVIDER

    @property
    def optimized(self) -> Self:
        """Return the setup with its optimizations; with all of them where none is on."""
        return self if self != self.plain else replace(self, optimization="ORT_ENABLE_ALL")

    @property
    def plain(self) -> Self:
        """Return the setup with optimizations off."""
        return replace(self, optimization=OPTIMIZATIONS_OFF)

    @property
    def is_named_plain(self) -> bool:
        """Return whether it is a built-in name with optimizations off, which is never deployed."""
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
        """How an option of a provider is recorded."""
        return f"{provider}.{option}" if self.several else option

    @property
    def disabled(self) -> str:
        """Return the disabled optimizations as one text."""
        return ", ".join(sorted(self.settings.disabled_optimizers))


def _check_compiled(
    option: str, value: str, *, provider: str = "a provider", where: str = ""
) -> None:
    if option.lower().startswith(_COMPILED) and value.lower() not in _OFF:
        raise ValueError(
            f"{where}{option} lets {provider} compute a model that was compiled before, and not "
            "the file that has the digest; leave it out"
        )


def _json(options: Mapping[str, JsonValue]) -> str:
    return json.dumps(dict(options))


# A recording has one answer for each input. It can't be repeated, and its samples can't be put into
# other batches, so that a policy that bounds either of it is refused.
UNREPEATED = (
    "repeatability",
    "repeatability_ratio",
    "batch_invariance",
    "batch_invariance_ratio",
)
"""Bounds on what takes more than one answer to an input."""


class RecordedOptions(BaseModel):
    """The options of a runtime of the kind `recorded`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    probes: Literal["required", "when_recorded"] = "required"
    """`when_recorded`: what the recording has no outputs for is WAIVED, and shown."""


class _RecordedDemands(Protocol):
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


def is_recorded(policy: _RecordedDemands, name: RuntimeName) -> bool:
    """Return whether a recording measures under this name."""
    wanted = policy.runtimes.get(name)
    return wanted is not None and (wanted.kind or name) == RECORDED


def is_server(policy: _RecordedDemands, name: RuntimeName) -> bool:
    """Return True if a model server measures under this name."""
    wanted = policy.runtimes.get(name)
    return wanted is not None and (wanted.kind or name) == SERVER


def servers_of(policy: _RecordedDemands) -> list[RuntimeName]:
    """Return the names of the model servers of a policy."""
    return [name for name in policy.runtimes if is_server(policy, name)]


def may_lack_probes(policy: _RecordedDemands, name: RuntimeName) -> bool:
    """Return whether the policy allows this recording to have no outputs for probes."""
    return (
        is_recorded(policy, name) and policy.runtimes[name].options.get("probes") == "when_recorded"
    )


_TAKEN = ("reference", "export", "dataset", "self_check", "train")
"""What stands in a runtime's place before numbers on the pages of runs."""


class _RuntimesDemands(Protocol):
    """The settings of a policy that decide how a runtime is set up."""

    @property
    def runtimes(self) -> Mapping[RuntimeName, RuntimePolicy]: ...
    @property
    def determinism(self) -> DeterminismPolicy: ...
    @property
    def cuda_provider(self) -> CudaProviderPolicy: ...


class NoOptions(BaseModel):
    """The options of a runtime that accepts none."""

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
    if runtime.exceeded == "warn" and (traits is None or traits.engine != "torch"):
        raise ValueError(
            f"{name}: exceeded is 'warn', and this runtime runs the file: set it of torch-cuda, or "
            "widen the bounds"
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


def ort_setup(policy: _RuntimesDemands, name: RuntimeName) -> OrtSetup | None:
    """How ONNX Runtime is set up for a runtime of this policy; None for one of another engine."""
    cuda = policy.cuda_provider.provider_options(tf32=policy.determinism.tf32)
    return _setup(name, policy.runtimes.get(name), cuda)


def setup_of(
    name: RuntimeName, kind: RuntimeName, options: Mapping[str, JsonValue], cuda: Mapping[str, str]
) -> OrtSetup | None:
    """The same, of a runtime by its kind and options. Raises ValidationError."""
    traits = RUNTIMES.get(name)
    if traits is not None:
        return OrtSetup.from_traits(traits, options, cuda) if traits.engine != "torch" else None
    return OrtSetup.from_options(options, cuda) if kind == ORT else None


def plain_setup(name: RuntimeName) -> OrtSetup:
    """Return the setup of a built-in runtime name without options."""
    return OrtSetup.from_traits(RUNTIMES[name], {}, {})


def _setup(
    name: RuntimeName, runtime: RuntimePolicy | None, cuda: Mapping[str, str]
) -> OrtSetup | None:
    options = {} if runtime is None else runtime.options
    return setup_of(name, runtime.kind or name if runtime else name, options, cuda)
