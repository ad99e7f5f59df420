"""The evidence: subject, data, environment, code, runtimes."""

from __future__ import annotations

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
from gate.records.runtime import CpuNode, RuntimeIdentity, RuntimeName
from gate.storage.record import Count, Measured, Prose, Record, Sha256, added_field


class Latency(Record):
    """Wall-clock milliseconds of one run of a batch, device transfers included."""

    batch_size: Count
    batches: Count
    median_ms: Measured
    p95_ms: Measured
    cold: bool = added_field(False)
    """The only batch was the first one, which pays for what later ones find ready. Records of
    before don't say it."""


class Cost(Record):
    """The cost of one runtime or of the reference, with the threads of its environment.

    None: not measured.
    """

    open_ms: Measured | None = None
    """From the bytes of the file to a session that can run, without the import of the library. The
    reference has none: its factory builds it."""
    first_ms: Measured | None = None
    """The first run of the session, of `first_batch_size` samples."""
    first_batch_size: Count | None = None
    single: Latency | None = None
    """Batches of one sample, in turns with the reference."""
    single_unmeasured: str | None = None
    """Why there are none: the file has a fixed batch."""
    peak_bytes: Count | None = None
    """Largest resident memory of the process in which it ran, while it opened the file and computed
    its first batches; of a process of its own, all batches. What else is in that process counts:
    PyTorch, the samples, other runtimes."""
    cuda_bytes: Count | None = None
    """By how much the used memory of the first CUDA device grew meanwhile, by any process."""


class Determinism(Record):
    """Switches in force during the measurement, read back after they were set."""

    tf32_matmul: bool
    tf32_cudnn: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    grad: bool
    seed: int
    threads: Count
    """Of PyTorch, and of each session of ONNX Runtime."""
    algorithms: bool = added_field(False)
    """`torch.use_deterministic_algorithms`."""


class Environment(Record):
    """The machine and the libraries. None: not there."""

    versions: dict[str, str]
    """Distribution name to version: python, torch, torchvision, onnx, onnxruntime, numpy."""
    cpu: str
    cpu_flags: tuple[str, ...] | None = added_field(None)
    """Instruction sets that change which kernels run, as the kernel reports them: avx2, avx512*,
    amx*, *vnni; on ARM asimd*, sve*, i8mm, bf16. None: unknown, or of before they were recorded."""
    cores: Count | None = added_field(None)
    """Logical ones that the process may use."""
    os: str | None = added_field(None)
    """Name and version of the distribution."""
    kernel: str | None = added_field(None)
    """Its name, release and architecture."""
    cuda: str | None = None
    cudnn: str | None = None
    gpu: str | None = None
    driver: str | None = None
    determinism: Determinism


class WorkerPoolRecord(Record):
    """The division of the samples among workers. The numbers do not depend on it."""

    engine: Literal["processes", "parts", "ray"]
    workers: Annotated[int, Field(ge=1)]
    """Processes that were asked for; of parts, those that were merged."""
    earlier: Count = added_field(0)
    """Units that an earlier check had measured, which was broken off: the reference answered the
    same again, to the last bit."""
    environments: tuple[Environment, ...] = ()
    """Machines and libraries of workers, where they are not those of the evidence."""


class ModelCode(Record):
    """The code of a model, by names of modules.

    It has no paths, so that it is the same on every machine. `digest()` identifies all of it.
    """

    files: dict[str, Sha256]
    """Module (`mypackage.models`) to the digest of its source file: the model's own modules, which
    are neither of Python nor of an installed distribution, with all that they import."""
    packages: dict[str, str]
    """Distribution to version: those that define a class of the model, or that the files import."""
    unread: dict[str, str] = added_field({})
    """Module to the reason why its source can't be read: compiled, typed in, generated."""

    def changes_since(self, earlier: ModelCode) -> tuple[str, ...]:
        """Return what changed, is new or is gone: `mypackage.models`, `torch 2.9.0 -> 2.10.0`."""
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


# How far each output is off stands in `gate.records.outputs`.


class TensorSpec(Record):
    """Name, dtype (`float32`) and shape of an input or output; a text is a dynamic axis."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class SubjectPart(Record):
    """One ONNX file of several that are promoted as one."""

    file: str
    """Relative to the release file's folder."""
    sha256: Sha256
    """As `Subject.sha256` of that file."""


class Subject(Record):
    """The file that is judged; or several as one, whose own file names them."""

    sha256: Sha256
    """Digest of the file; with external data, of the manifest of all files."""
    size_bytes: Count
    opset: int
    producer: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    external_data: tuple[str, ...] = ()
    """All files except the first one; the ONNX files of parts are included."""
    checker: Prose | None = added_field(None)
    """Why onnx's checker rejects the file, which ONNX Runtime runs; None: it accepts it."""
    parts: dict[str, SubjectPart] = added_field({})
    """By name; empty: one ONNX file."""

    @property
    def has_bfloat16(self) -> bool:
        """True if an input or output is in bfloat16."""
        return any(spec.dtype == "bfloat16" for spec in (*self.inputs, *self.outputs))


class Source(Record):
    """The origin of the reference model. None: there is none (built by code alone)."""

    factory: str
    checkpoint_sha256: Sha256 | None = None
    preprocess_sha256: Sha256 | None = None
    labels_sha256: Sha256 | None = None
    slices_sha256: Sha256 | None = added_field(None)
    """Of the file with the columns of the slices of metrics; None: no metric has slices."""
    code: ModelCode | None = added_field(None)
    """The source files that define the model. None: of before they were recorded."""
    onnx_sha256: Sha256 | None = added_field(None)
    """Of the ONNX file that is the reference, with its external data; None: it is a model of
    PyTorch."""

    @property
    def is_onnx(self) -> bool:
        """True if the reference is an ONNX file."""
        return self.onnx_sha256 is not None


class BatchAxes(Record):
    """The batch axis of each input and output of a file. None: it has no batch axis.

    Where no input has one, each sample is one call of the file.
    """

    inputs: dict[str, int | None]
    """By name of the file's input, then by name of what only the model takes."""
    outputs: dict[str, int | None]

    @property
    def is_unbatched(self) -> bool:
        """True if one sample is one call."""
        return all(axis is None for axis in self.inputs.values())

    @property
    def listed(self) -> list[str]:
        """Name and axis of each input and output: `image 0`."""
        axes = {**self.inputs, **self.outputs}
        return [f"{name} {'none' if axis is None else axis}" for name, axis in axes.items()]

    def canonical(self, spec: TensorSpec) -> TensorSpec:
        """An input of the file with the samples on axis 0, as the gate has it."""
        axis = self.inputs[spec.name]
        shape = list(spec.shape)
        first = "samples" if axis is None else shape.pop(axis)
        return spec.model_copy(update={"shape": (first, *shape)})


def batch_sizes(specs: Iterable[TensorSpec], axes: BatchAxes | None) -> dict[str, int | str | None]:
    """Return the size of the batch axis that a file declares for each input or output, by name.

    None: there is no such axis.
    """
    if axes is None:
        return {spec.name: spec.shape[0] if spec.shape else None for spec in specs}
    places = {**axes.outputs, **axes.inputs}
    found = ((spec, places.get(spec.name)) for spec in specs)
    return {spec.name: None if axis is None else spec.shape[axis] for spec, axis in found}


class Dataset(Record):
    """The samples that both sides computed on."""

    sha256: Sha256
    samples: Count
    labelled: bool
    model_only: tuple[str, ...] = added_field(())
    """Inputs that the model takes and the file does not."""
    batch_axes: BatchAxes | None = added_field(None)
    """None: axis 0 of every input."""
    left_out: Count = added_field(0)
    """Of a part of a release: calls of the chain with inputs of other sizes than its first one, on
    which the part was judged in the chain alone."""


class ExportRecord(Record):
    """The settings of the export, each as it was used."""

    strategy: str
    settings: dict[str, bool | int | float | str | None]
    tracer_warnings: tuple[str, ...] = ()
    hazards: tuple[str, ...] = ()
    rungs: tuple[str, ...] = added_field(())
    """Why earlier strategies of a ladder did not carry, one line each."""
    lint: tuple[LintFinding, ...] = added_field(())
    """What the trace-safety rules found in the model's source, suppressed findings too."""
    lint_unread: tuple[str, ...] = added_field(())
    """Code that the model reaches and that the rules could not read: `name: reason`."""
    notices: tuple[str, ...] = added_field(())
    """What is neither asked for nor wrong: axes that have no fixed size in the file."""
    code: ModelCode | None = added_field(None)
    """The model's source files when it was exported."""


FailureCode = Literal[
    "only_batches", "reshape", "unregistered_operator", "wrong_outputs", "out_of_memory"
]
"""Why a runtime failed on a file."""


class RuntimeEvidence(Record):
    """One runtime: what was requested, what is proven to have run, and how far it is off.

    Either `absent_reason` (the device is not on this machine), or `failure` (it is, or should be,
    and the measurement broke), or `outputs`.
    """

    runtime: RuntimeName
    provider_requested: str
    providers_active: tuple[str, ...] = ()
    """In the order of the session; for torch the provider of the device of its outputs."""
    nodes_per_provider: dict[str, Count] = Field(default_factory=dict)
    """From the profile of a run of the same session options; empty for torch."""
    fallback_nodes: tuple[str, ...] = ()
    """`op_type:node_name` of compute nodes that ran on the CPU although CUDA was asked for."""
    cpu_nodes: tuple[CpuNode, ...] = added_field(())
    """More about the fallback nodes. Empty: of before it was recorded."""
    cpu_time_share: Measured | None = added_field(None)
    """Of the time of all nodes in the profiled run, that of the nodes on the CPU. Information: it
    differs from run to run. None: not measured."""
    session_options: dict[str, str] = Field(default_factory=dict)
    outputs: tuple[OutputParity, ...] = ()
    latency: Latency | None = None
    """Of the batches of the measurement."""
    memory_bytes: Count | None = added_field(None)
    """By how much the resident memory of its process grew at its peak (of a browser: at the end)
    while the runtime opened the file and computed its first batches; roughly. None: not measured.
    Without `cost` it is by another definition."""
    cost: Cost | None = added_field(None)
    """None: of before it was measured, or a recording."""
    probes: tuple[ProbeResult, ...] = added_field(())
    unprobed: tuple[str, ...] = added_field(())
    """Probes that could not be asked of it: a recording has no outputs for them."""
    unexamined: Count = added_field(0)
    """Samples that call for a second look under random rounding and got none, because other
    numbers refuse the runtime anyway."""
    second_looks: Count = added_field(0)
    """Samples that got such a look."""
    look_draws: Count = added_field(0)
    """Runs under random rounding of single samples that these looks took, all together."""
    concurrency: tuple[ConcurrentLoad, ...] = added_field(())
    """Of a server. Empty: of other runtimes, or not measured."""
    identity: RuntimeIdentity | None = added_field(None)
    """None: the name alone says what it is, and nothing was set."""
    absent_reason: str | None = None
    failure: str | None = None
    failure_code: FailureCode | None = added_field(None)
    """The kind of `failure`. None: none of these, or of before it was recorded."""
    failure_params: dict[str, JsonValue] = added_field({})
    """The parameters of its text, such as the `batch_sizes` that it computes."""
    plain_failure: str | None = added_field(None)
    """Why ONNX Runtime does not open the file with optimizations off, which this runtime promises.
    With `outputs` it was measured with ORT_ENABLE_BASIC instead."""
    unusable: bool = added_field(False)
    """With `failure`: it is the library's, or the device's, which could run no file at all."""

    @property
    def measured(self) -> bool:
        """True if it has outputs, and neither a failure nor a reason for its absence."""
        return bool(self.outputs) and not (self.failure or self.absent_reason)


class Evidence(Record):
    """The whole measurement of one file."""

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
    """max|a - b| / max|a| of two runs a, b of the reference on the same samples; the worst over the
    outputs. None: of before it was measured."""
    state_spread: dict[str, Measured] = added_field({})
    """Parameters and buffers that the reference's forward changes. They are restored before each
    run. The number: as `reference_spread`, where run b begins with what run a left in the
    tensor."""
    sample_bytes: Count | None = added_field(None)
    """Bytes that a sample adds to the largest tensor of the reference's forward. Where that is
    much, probes of many samples and of large sizes are made smaller, so that memory holds them.
    0: it could not be measured; None: there are no probes, or the evidence is older."""
    graph: GraphReport | None = added_field(None)
    graph_unread: str | None = added_field(None)
    """Why the graph could not be read."""
    trace_search: TraceSearch | None = added_field(None)
    noise_unmeasured: str | None = added_field(None)
    """Why there is no noise floor: the model can't run in float64, or the policy asks for none."""
    validity: ReferenceValidity | None = added_field(None)
    """None: nothing differs, or of before it was measured."""
    float64_differences: dict[str, Measured] = added_field({})
    """By output whose noise floor exceeds 1e-3 of its spread: the rms difference of the file and
    the model where both compute in float64, as a share of the spread of the output or of the size
    of a channel or column, whichever is largest. An output that is missing was not measured."""
    undefined: tuple[UndefinedCast, ...] = added_field(())
    """Conversions of the first samples to integers that do not hold them."""
    preprocessing: PreprocessingParity | None = added_field(None)
    """Consumers of the preprocessing spec `source.preprocess_sha256`."""
    crew: WorkerPoolRecord | None = added_field(None)
    """Who measured; None: one process alone."""
    metrics: tuple[MetricEvidence, ...] = added_field(())
    """Metrics of the policy."""
    parts: dict[str, Evidence] = added_field({})
    """Of each part of `subject.parts`, on the inputs that the chain gives it; the rest of this
    record is about the chain, from its first input to its last output."""
    measured_at: str
    """UTC, ISO 8601."""

    @property
    def has_fixed_batch(self) -> bool:
        """True if the file takes batches of one size only, by its own inputs."""
        axes = self.dataset.batch_axes
        sizes = batch_sizes(self.subject.inputs, axes).values()
        return any(isinstance(size, int) for size in sizes) or bool(axes and axes.is_unbatched)

    def runtime(self, name: RuntimeName) -> RuntimeEvidence | None:
        """The evidence of one runtime, or None."""
        return next((r for r in self.runtimes if r.runtime == name), None)


_NONE = "none"


class Difference(NamedTuple):
    """One field in which two environments differ, with both values."""

    name: str
    before: str
    now: str


def fields_of(environment: Environment) -> dict[str, str | None]:
    """Return the recorded fields of an environment, by name.

    None: unknown, or the record is older than the field.
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
    """Yield the fields that differ. What only one of them records is no difference, but for a
    library that only one of them has; of instruction sets those that only one has."""
    before, now = fields_of(old), fields_of(new)
    for name in dict.fromkeys((*now, *before)):
        one, other = before.get(name), now.get(name)
        if name.startswith("version of "):
            one, other = one or _NONE, other or _NONE
        if one is None or other is None or one == other:
            continue
        if name == "instruction sets":
            one, other = _flags(old, new), _flags(new, old)
        yield Difference(name, one, other)


def _flags(one: Environment, other: Environment) -> str:
    """Return the instruction sets that only `one` has, then those that it lacks."""
    mine, others = set(one.cpu_flags or ()), set(other.cpu_flags or ())
    lacking = sorted(others - mine)
    parts = [*sorted(mine - others), *([f"no {', '.join(lacking)}"] if lacking else [])]
    return ", ".join(parts)
