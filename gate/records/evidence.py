"""What was measured, bound to the digests of what it was measured on.

How far each output is off stands in `gate.records.output_parity`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gate.records.cost import Cost, Latency
from gate.records.crew import CrewRecord
from gate.records.environment import Environment
from gate.records.instruments import GraphReport, ProbeParity, TraceSearch
from gate.records.lint import LintFinding
from gate.records.model_code import ModelCode
from gate.records.output_parity import OutputParity
from gate.records.preprocessing import PreprocessingParity
from gate.records.runtime import RuntimeIdentity, RuntimeName
from gate.storage.record import Count, Measured, Record, Sha256, later


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
    """All files beside the first one, the ONNX files of parts included."""
    parts: dict[str, SubjectPart] = later({})
    """By name; empty: one ONNX file."""


class Source(Record):
    """Where the reference model comes from. None: there is none (built by code alone)."""

    factory: str
    checkpoint_sha256: Sha256 | None = None
    preprocess_sha256: Sha256 | None = None
    labels_sha256: Sha256 | None = None
    code: ModelCode | None = later(None)
    """The source files that define the model. None: of before they were recorded."""


class Dataset(Record):
    """The samples that both sides computed on."""

    sha256: Sha256
    samples: Count
    labelled: bool
    model_only: tuple[str, ...] = later(())
    """Inputs that the model takes and the file does not."""
    left_out: Count = later(0)
    """Of a part of a release: calls of the chain with inputs of other sizes than its first one, on
    which the part was judged in the chain alone."""


class ExportRecord(Record):
    """How the file was exported, every setting as it was used."""

    strategy: str
    settings: dict[str, bool | int | float | str | None]
    tracer_warnings: tuple[str, ...] = ()
    hazards: tuple[str, ...] = ()
    rungs: tuple[str, ...] = later(())
    """Why earlier strategies of a ladder did not carry, one line each."""
    lint: tuple[LintFinding, ...] = later(())
    """What the trace-safety rules found in the model's source, suppressed findings too."""
    lint_unread: tuple[str, ...] = later(())
    """Code that the model reaches and that the rules could not read: `name: reason`."""
    notices: tuple[str, ...] = later(())
    """What is neither asked for nor wrong: axes that have no fixed size in the file."""
    code: ModelCode | None = later(None)
    """The model's source files when it was exported."""


ONLY_BATCHES = "It computes batches of "
"""In the failure of a runtime: what follows are the batch sizes that it takes, unlike others."""


class RuntimeEvidence(Record):
    """One runtime: what was asked for, what is proven to have run, and how far it is off.

    Either `absent_reason` (the device is not on this machine), or `failure` (it is, or should
    be, and the measurement broke), or `outputs`.
    """

    runtime: RuntimeName
    provider_requested: str
    providers_active: tuple[str, ...] = ()
    """In the order of the session; for torch the provider of the device of its outputs."""
    nodes_per_provider: dict[str, Count] = Field(default_factory=dict)
    """From the profile of a run of the same session options; empty for torch."""
    fallback_nodes: tuple[str, ...] = ()
    """`op_type:node_name` of compute nodes that ran on the CPU although CUDA was asked for."""
    session_options: dict[str, str] = Field(default_factory=dict)
    outputs: tuple[OutputParity, ...] = ()
    latency: Latency | None = None
    """Of the batches of the measurement."""
    memory_bytes: Count | None = later(None)
    """By how much the resident memory of its process grew at its peak (of a browser: at the end)
    while the runtime opened the file and computed its first batches; roughly. None: not measured.
    Without `cost` it is by another definition."""
    cost: Cost | None = later(None)
    """None: of before it was measured, or a recording."""
    probes: tuple[ProbeParity, ...] = later(())
    unprobed: tuple[str, ...] = later(())
    """Probes that could not be asked of it: a recording has no outputs for them."""
    identity: RuntimeIdentity | None = later(None)
    """None: the name alone says what it is, and nothing was set."""
    absent_reason: str | None = None
    failure: str | None = None
    unusable: bool = later(False)
    """With `failure`: it is the library's, or the device's, which could run no file at all."""

    @property
    def measured(self) -> bool:
        """True if it has outputs, and nothing that says why it has none."""
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
    reference_cost: Cost | None = later(None)
    reference_spread: Measured | None = later(None)
    """max|a - b| / max|a| of two runs a, b of the reference on the same samples; the worst over the
    outputs. None: of before it was measured."""
    graph: GraphReport | None = later(None)
    graph_unread: str | None = later(None)
    """Why the graph could not be read."""
    trace_search: TraceSearch | None = later(None)
    noise_unmeasured: str | None = later(None)
    """Why there is no noise floor: the model can't run in float64, or the policy asks for none."""
    preprocessing: PreprocessingParity | None = later(None)
    """Consumers of the preprocessing spec `source.preprocess_sha256`."""
    crew: CrewRecord | None = later(None)
    """Who measured; None: one process alone."""
    parts: dict[str, Evidence] = later({})
    """Of each part of `subject.parts`, on the inputs that the chain gives it; the rest of this
    record is about the chain, from its first input to its last output."""
    measured_at: str
    """UTC, ISO 8601."""

    def runtime(self, name: RuntimeName) -> RuntimeEvidence | None:
        """The evidence of one runtime, or None."""
        return next((r for r in self.runtimes if r.runtime == name), None)
