"""The evidence: subject, data, environment, code, runtimes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, JsonValue

from gate.records.export import LintFinding
from gate.records.instruments import (
    ConcurrentLoad,
    GraphReport,
    ProbeResult,
    ReferenceValidity,
    TraceSearch,
    UndefinedCast,
)
from gate.records.metrics import MetricEvidence
from gate.records.outputs import OutputParity
from gate.records.preprocessing import PreprocessingParity
from gate.records.runtime import SERVER, CpuNode, RuntimeIdentity, RuntimeName
from gate.storage.record import Count, Measured, Prose, Record, Sha256, added_field


class Latency(Record):
    """Wall-clock milliseconds of one run of a batch, including device transfers."""

    batch_size: Count
    batches: Count
    median_ms: Measured
    p95_ms: Measured
    cold: bool = added_field(False)
    """True if the only batch was the first one, which includes warm-up; False in older records."""

    def ratio_to(self, baseline: Latency) -> float:
        """Return the ratio of the median times; NaN if one side has no valid time."""
        new, old = self.median_ms, baseline.median_ms
        timed = self.batches > 0 and baseline.batches > 0
        return new / old if timed and new > 0.0 and 0.0 < old < math.inf else math.nan


class Cost(Record):
    """The cost of one runtime or of the reference, with the threads of its environment.

    None: not measured.
    """

    open_ms: Measured | None = None
    """Time from file bytes to session, without the import of the library. None for
    the reference, which its factory builds."""
    first_ms: Measured | None = None
    """The first run of the session, of `first_batch_size` samples."""
    first_batch_size: Count | None = None
    single: Latency | None = None
    """Latency of batches of one sample, alternating with the reference."""
    single_unmeasured: str | None = None
    """Why `single` was not measured: the file has a fixed batch."""
    peak_bytes: Count | None = None
    """Peak resident memory of the process while the runtime opened the file and computed the first
    batches; in a separate process, all batches. It includes PyTorch, samples and other runtimes in
    the same process."""
    cuda_bytes: Count | None = None
    """Growth of the used memory of the first CUDA device meanwhile, by any process."""


class Determinism(Record):
    """The switches during the measurement, read back after they were set."""

    tf32_matmul: bool
    tf32_cudnn: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    grad: bool
    seed: int
    threads: Count
    """Threads of PyTorch, and of each session of ONNX Runtime."""
    algorithms: bool = added_field(False)
    """`torch.use_deterministic_algorithms`."""


class Environment(Record):
    """The machine and the libraries. None: not present."""

    versions: dict[str, str]
    """Distribution name to version: python, torch, torchvision, onnx, onnxruntime, numpy."""
    cpu: str
    cpu_flags: tuple[str, ...] | None = added_field(None)
    """Instruction sets that select kernels, as the operating system reports them: avx2, avx512*,
    amx*, *vnni; on ARM asimd*, sve*, i8mm, bf16. None: unknown, or an older record."""
    cores: Count | None = added_field(None)
    """Logical cores that the process may use."""
    os: str | None = added_field(None)
    """Name and version of the operating system's distribution."""
    kernel: str | None = added_field(None)
    """Name, release and architecture of the kernel."""
    cuda: str | None = None
    cudnn: str | None = None
    gpu: str | None = None
    driver: str | None = None
    determinism: Determinism


class WorkerPoolRecord(Record):
    """The distribution of the samples among workers, which does not affect the numbers."""

    engine: Literal["processes", "parts", "ray"]
    workers: Annotated[int, Field(ge=1)]
    """Number of requested processes, or of merged parts."""
    earlier: Count = added_field(0)
    """Number of units that were reused from an earlier, interrupted check, for which the reference
    returned identical outputs."""
    environments: tuple[Environment, ...] = ()
    """Environments of workers that differ from that of the evidence."""


class ModelCode(Record):
    """The source code of a model, by module name.

    It contains no paths, so that it is the same on every machine. `digest()` identifies all of it.
    """

    files: dict[str, Sha256]
    """Module (`mypackage.models`) to the digest of its source file: the model's modules and their
    imports that are not part of Python or an installed distribution."""
    packages: dict[str, str]
    """Version of each distribution that defines a class of the model or is imported by `files`."""
    unread: dict[str, str] = added_field({})
    """Module to the reason why its source can't be read: compiled, interactive, generated."""

    def changes_since(self, earlier: ModelCode) -> tuple[str, ...]:
        """Return the changed, new and removed modules and packages.

        For example `mypackage.models` or `torch 2.9.0 -> 2.10.0`."""
        changes = [f"{name}{how}" for name, how in _differing(earlier.files, self.files)]
        for name, _ in _differing(earlier.packages, self.packages):
            before, now = earlier.packages.get(name, "none"), self.packages.get(name, "none")
            changes.append(f"{name} {before} -> {now}")
        changes += [f"{name}{how}" for name, how in _differing(earlier.unread, self.unread)]
        return tuple(changes)


def _differing(
    before: Mapping[str, object], now: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    for name in sorted({*before, *now}):
        if name not in now:
            yield name, " (gone)"
        elif name not in before:
            yield name, " (new)"
        elif before[name] != now[name]:
            yield name, ""


# `gate.records.outputs` defines the differences of each output.


class TensorSpec(Record):
    """Name, dtype (`float32`) and shape of an input or output; a string is a dynamic axis."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class SubjectPart(Record):
    """One ONNX file of a release of several files."""

    file: str
    """Path relative to the release file's folder."""
    sha256: Sha256
    """`Subject.sha256` of the part's file."""


class Subject(Record):
    """The evaluated file, or a release of several files."""

    sha256: Sha256
    """Digest of the file; with external data, of the manifest of all files."""
    size_bytes: Count
    opset: int
    producer: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    external_data: tuple[str, ...] = ()
    """All files except the main one, including the ONNX files of parts."""
    checker: Prose | None = added_field(None)
    """Error of onnx's checker for a file that ONNX Runtime can run; None if there is none."""
    parts: dict[str, SubjectPart] = added_field({})
    """Parts by name; empty for a single ONNX file."""

    @property
    def has_bfloat16(self) -> bool:
        """Return whether an input or output is in bfloat16."""
        return any(spec.dtype == "bfloat16" for spec in (*self.inputs, *self.outputs))


class Source(Record):
    """The origin of the reference model. None: not used."""

    factory: str
    checkpoint_sha256: Sha256 | None = None
    preprocess_sha256: Sha256 | None = None
    labels_sha256: Sha256 | None = None
    slices_sha256: Sha256 | None = added_field(None)
    """Digest of the file with the slice columns; None: no metric has slices."""
    code: ModelCode | None = added_field(None)
    """Source files that define the model. None: an older record."""
    onnx_sha256: Sha256 | None = added_field(None)
    """Digest of the reference ONNX file with its external data; None: a PyTorch model."""

    @property
    def is_onnx(self) -> bool:
        """Return whether the reference is an ONNX file."""
        return self.onnx_sha256 is not None


class BatchAxes(Record):
    """The batch axis of each input and output of a file. None: no batch axis.

    If no input has a batch axis, each sample is one call of the file.
    """

    inputs: dict[str, int | None]
    """Axes by name, first of the file's inputs, then of inputs that only the model has."""
    outputs: dict[str, int | None]

    @property
    def is_unbatched(self) -> bool:
        """Return whether each sample is one call."""
        return all(axis is None for axis in self.inputs.values())

    @property
    def listed(self) -> list[str]:
        """Return name and axis of each input and output: `image 0`."""
        axes = {**self.inputs, **self.outputs}
        return [f"{name} {'none' if axis is None else axis}" for name, axis in axes.items()]

    def canonical(self, spec: TensorSpec) -> TensorSpec:
        """Return an input of the file with the batch axis moved to axis 0."""
        axis = self.inputs[spec.name]
        shape = list(spec.shape)
        first = "samples" if axis is None else shape.pop(axis)
        return spec.model_copy(update={"shape": (first, *shape)})


def batch_sizes(specs: Iterable[TensorSpec], axes: BatchAxes | None) -> dict[str, int | str | None]:
    """Return the declared size of the batch axis of each input or output, by name.

    None: no batch axis.
    """
    if axes is None:
        return {spec.name: spec.shape[0] if spec.shape else None for spec in specs}
    by_name = {**axes.outputs, **axes.inputs}
    pairs = ((spec, by_name.get(spec.name)) for spec in specs)
    return {spec.name: None if axis is None else spec.shape[axis] for spec, axis in pairs}


class Dataset(Record):
    """The samples on which both sides were run."""

    sha256: Sha256
    samples: Count
    labelled: bool
    model_only: tuple[str, ...] = added_field(())
    """Inputs of the model that the file does not have."""
    batch_axes: BatchAxes | None = added_field(None)
    """None: axis 0 of every input."""
    left_out: Count = added_field(0)
    """For a part of a release: number of calls by the chain with other input sizes than the first
    call. On these the part was measured only within the chain."""


class ExportRecord(Record):
    """The settings that the export used."""

    strategy: str
    settings: dict[str, bool | int | float | str | None]
    tracer_warnings: tuple[str, ...] = ()
    hazards: tuple[str, ...] = ()
    rungs: tuple[str, ...] = added_field(())
    """Why earlier strategies of the ladder failed, one line each."""
    lint: tuple[LintFinding, ...] = added_field(())
    """Findings of the trace-safety rules in the model's source, including suppressed ones."""
    lint_unread: tuple[str, ...] = added_field(())
    """Code of the model that the rules could not read: `name: reason`."""
    notices: tuple[str, ...] = added_field(())
    """Harmless facts that were not requested: axes that are dynamic in the file."""
    code: ModelCode | None = added_field(None)
    """Source files of the model at the time of the export."""


FailureCode = Literal[
    "only_batches",
    "reshape",
    "unregistered_operator",
    "invalid_graph",
    "wrong_outputs",
    "out_of_memory",
]
"""Why a runtime failed on a file."""


class RuntimeEvidence(Record):
    """The measurement of one runtime.

    It has either `absent_reason` (the device is missing on this machine), or `failure` (the
    measurement failed), or `outputs`.
    """

    runtime: RuntimeName
    provider_requested: str
    providers_active: tuple[str, ...] = ()
    """Providers of the session in order; for torch, the provider of the outputs' device."""
    nodes_per_provider: dict[str, Count] = Field(default_factory=dict)
    """Number of nodes by provider in a profile with the same session options; empty for torch."""
    fallback_nodes: tuple[str, ...] = ()
    """`op_type:node_name` of compute nodes that ran on the CPU although CUDA was requested."""
    cpu_nodes: tuple[CpuNode, ...] = added_field(())
    """Details of the fallback nodes. Empty in older records."""
    cpu_time_share: Measured | None = added_field(None)
    """Share of the nodes' total time that the CPU took in the profiled run. It varies between runs
    and is not judged. None: not measured."""
    session_options: dict[str, str] = Field(default_factory=dict)
    outputs: tuple[OutputParity, ...] = ()
    latency: Latency | None = None
    """Latency of the measured batches."""
    memory_bytes: Count | None = added_field(None)
    """Approximate growth of the process's resident memory, at its peak (for a browser: at the end),
    while the runtime opened the file and computed its first batches. None: not measured. Records
    without `cost` use another definition."""
    cost: Cost | None = added_field(None)
    """None: an older record, or recorded outputs."""
    probes: tuple[ProbeResult, ...] = added_field(())
    unprobed: tuple[str, ...] = added_field(())
    """Probes that were not run, because recorded outputs do not contain them."""
    has_other_lengths: bool = added_field(False)
    """True if outputs had another length than the reference's, such as another number of boxes, and
    were cut or filled with zeros for the statistics."""
    unexamined: Count = added_field(0)
    """Number of suspicious samples that were not repeated under random rounding, because other
    numbers refuse the runtime anyway."""
    second_looks: Count = added_field(0)
    """Number of samples that were repeated under random rounding."""
    look_draws: Count = added_field(0)
    """Total number of these runs under random rounding."""
    concurrency: tuple[ConcurrentLoad, ...] = added_field(())
    """Load tests of a server. Empty for other runtimes, or if not measured."""
    identity: RuntimeIdentity | None = added_field(None)
    """None: the runtime is defined by its name and has no options."""
    absent_reason: str | None = None
    failure: str | None = None
    failure_code: FailureCode | None = added_field(None)
    """The kind of `failure`. None: another kind, or an older record."""
    failure_params: dict[str, JsonValue] = added_field({})
    """Parameters of the failure's text, such as the supported `batch_sizes`."""
    plain_failure: str | None = added_field(None)
    """Error of ONNX Runtime without optimizations, which this runtime should use. If there are
    `outputs`, it was measured with ORT_ENABLE_BASIC instead."""
    unusable: bool = added_field(False)
    """True if `failure` is one of the library or the device, which can't run any file."""

    @property
    def is_server(self) -> bool:
        """Return whether it is a live model server."""
        return (self.identity.kind if self.identity else self.runtime) == SERVER

    @property
    def measured(self) -> bool:
        """Return whether there are outputs, no failure, and no reason for absence."""
        return bool(self.outputs) and not (self.failure or self.absent_reason)


class Evidence(Record):
    """The complete measurement of one file."""

    schema_version: Literal[1] = 1
    subject: Subject
    source: Source
    dataset: Dataset
    export: ExportRecord | None = None
    environment: Environment
    runtimes: tuple[RuntimeEvidence, ...]
    reference_latency: Latency | None = None
    reference_cost: Cost | None = added_field(None)
    reference_spread: Measured | None = added_field(None)
    """max|a - b| / max|a| of two runs a, b of the reference on the same samples; the largest over
    the outputs. None: an older record."""
    state_spread: dict[str, Measured] = added_field({})
    """Parameters and buffers that the reference's forward changes. They are restored before each
    run. The number is `reference_spread` of run b that starts with the tensor changed by run a."""
    sample_bytes: Count | None = added_field(None)
    """Bytes that a sample adds to the largest tensor of the reference's forward. Large probes are
    reduced to fit into memory. 0: it could not be measured; None: no probes, or an older record."""
    graph: GraphReport | None = added_field(None)
    graph_unread: str | None = added_field(None)
    """Why the graph could not be read."""
    trace_search: TraceSearch | None = added_field(None)
    noise_unmeasured: str | None = added_field(None)
    """Why there is no noise floor: the model can't run in float64, or the policy disables it."""
    validity: ReferenceValidity | None = added_field(None)
    """None: nothing differs, or an older record."""
    float64_differences: dict[str, Measured] = added_field({})
    """For each output whose noise floor exceeds 1e-3 of its spread: the rms difference of file and
    model if both compute in float64, relative to the spread of the output or the size of a channel
    or column, whichever is largest. Outputs without an entry were not measured."""
    undefined: tuple[UndefinedCast, ...] = added_field(())
    """Out-of-range conversions to integers on the first samples."""
    preprocessing: PreprocessingParity | None = added_field(None)
    """Comparison of the consumers of the preprocessing spec `source.preprocess_sha256`."""
    worker_pool: WorkerPoolRecord | None = added_field(None, json_name="crew")
    """Workers that measured; None: a single process."""
    metrics: tuple[MetricEvidence, ...] = added_field(())
    """Metrics of the policy."""
    parts: dict[str, Evidence] = added_field({})
    """Evidence of each part of `subject.parts`, on the inputs that the chain passes. The rest of
    this record is about the chain, from its first input to its last output."""
    measured_at: str
    """UTC, ISO 8601."""

    @property
    def has_fixed_batch(self) -> bool:
        """Return whether the file accepts only one batch size according to its inputs."""
        axes = self.dataset.batch_axes
        sizes = batch_sizes(self.subject.inputs, axes).values()
        return any(isinstance(size, int) for size in sizes) or bool(axes and axes.is_unbatched)

    def runtime(self, name: RuntimeName) -> RuntimeEvidence | None:
        """Return the evidence of one runtime, or None."""
        return next((r for r in self.runtimes if r.runtime == name), None)


_NONE = "none"


class Difference(NamedTuple):
    """A field in which two environments differ, with both values."""

    name: str
    before: str
    now: str


def fields_of(environment: Environment) -> dict[str, str | None]:
    """Return the recorded fields of an environment, by name.

    None: unknown, or an older record.
    """
    flags, cores = environment.cpu_flags, environment.cores
    return {
        **{f"version of {name}": text for name, text in environment.versions.items()},
        "processor": environment.cpu,
        "instruction sets": None if flags is None else ", ".join(flags) or _NONE,
        "cores": None if cores is None else str(cores),
        "threads": str(environment.determinism.threads),
        "operating system": environment.os,
        "kernel": environment.kernel,
        "GPU": environment.gpu or _NONE,
        "driver": environment.driver or _NONE,
        "CUDA": environment.cuda or _NONE,
        "cuDNN": environment.cudnn or _NONE,
    }


def differences(old: Environment, new: Environment) -> Iterator[Difference]:
    """Yield the fields that differ.

    Fields that only one environment records do not count, except libraries that only one has. Of
    instruction sets only those that differ are listed."""
    old_fields, new_fields = fields_of(old), fields_of(new)
    for name in dict.fromkeys((*new_fields, *old_fields)):
        before, now = old_fields.get(name), new_fields.get(name)
        if name.startswith("version of "):
            before, now = before or _NONE, now or _NONE
        if before is None or now is None or before == now:
            continue
        if name == "instruction sets":
            before, now = _flags(old, new), _flags(new, old)
        yield Difference(name, before, now)


def _flags(environment: Environment, baseline: Environment) -> str:
    """Return the instruction sets that only `environment` has, then those that it lacks."""
    flags, baseline_flags = set(environment.cpu_flags or ()), set(baseline.cpu_flags or ())
    lacking = sorted(baseline_flags - flags)
    parts = [*sorted(flags - baseline_flags), *([f"no {', '.join(lacking)}"] if lacking else [])]
    return ", ".join(parts)
