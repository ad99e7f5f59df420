"""What was measured, bound to the digests of what it was measured on.

Notation, as in docs/metrics.md: `r` is the output of the PyTorch model in float32 on CPU (the
reference), `c` the runtime's output, both taken as float64; a sample is one row of axis 0.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gate.records.instruments import (
    GraphReport,
    NoiseParity,
    ProbeParity,
    StabilityParity,
    TraceSearch,
)
from gate.records.lint import LintFinding
from gate.records.model_code import ModelCode
from gate.records.preprocessing import PreprocessingParity
from gate.records.runtime import RuntimeName
from gate.records.samples import Crossing, Histogram, WorstSample
from gate.storage.record import Measured, Record, Sha256, later

Count = Annotated[int, Field(ge=0)]


class TensorSpec(Record):
    """Name, dtype (`float32`) and shape of an input or output; a text is a dynamic axis."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class Subject(Record):
    """The file that is judged."""

    sha256: Sha256
    """Digest of the file; with external data, of the manifest of all files."""
    size_bytes: Count
    opset: int
    producer: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    external_data: tuple[str, ...] = ()


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
    code: ModelCode | None = later(None)
    """The model's source files when it was exported."""


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
    algorithms: bool = later(False)
    """`torch.use_deterministic_algorithms`."""


class Environment(Record):
    """The machine and the libraries. None: not there."""

    versions: dict[str, str]
    """Distribution name to version: python, torch, torchvision, onnx, onnxruntime, numpy."""
    cpu: str
    cuda: str | None = None
    cudnn: str | None = None
    gpu: str | None = None
    driver: str | None = None
    determinism: Determinism


class Disagreement(Record):
    """A sample on which argmax differs. `margin` = largest minus second largest reference logit."""

    sample: Count
    reference: Count
    candidate: Count
    margin: Measured


class ConfidenceOfClass(Record):
    """abs(max softmax(c) - max softmax(r)) over the samples that the reference puts in a class."""

    label: Count
    samples: Count
    mean: Measured
    max: Measured
    signed_mean: Measured | None = later(None)
    """Mean of max softmax(c) - max softmax(r), with its sign. None: of before it was measured."""
    reference_mean: Measured | None = later(None)
    """Mean of max softmax(r)."""
    candidate_mean: Measured | None = later(None)
    """Mean of max softmax(c)."""


class Confidence(Record):
    """abs(max softmax(c) - max softmax(r)) per sample, summarised.

    `bands` are shares of samples: below 0.01, 0.01 to 0.05, 0.05 to 0.10, above 0.10 or NaN.
    """

    mean: Measured
    min: Measured
    max: Measured
    bands: tuple[Measured, Measured, Measured, Measured]
    per_class: tuple[ConfidenceOfClass, ...]


class Accuracy(Record):
    """Top-1 on labels, both sides. `drop` = reference - candidate."""

    reference: Measured
    candidate: Measured
    drop: Measured


class ClassParity(Record):
    """Parity of logits of shape (batch, classes)."""

    classes: Count
    predicted_classes: Count
    """Number of different classes that the reference predicts."""
    top1_agreement: Measured
    """Of the samples without a tie."""
    top1_disagreements: Count
    top1_ties: Count = later(0)
    """Samples whose largest elements are equal up to rounding, and whose argmax differs: neither
    agreement nor disagreement."""
    unsure: Count = later(0)
    """Samples with a float64 truth whose argmax PyTorch's own rounding to float32 changes."""
    sure: Count = later(0)
    """The others of them."""
    top5_agreement: Measured
    """Share of samples with equal sets of the min(5, classes) largest logits."""
    disagreeing: tuple[Disagreement, ...]
    """The first hundred, by sample."""
    l2_probabilities_mean: Measured
    l2_probabilities_max: Measured
    confidence: Confidence
    accuracy: Accuracy | None = None
    nan_rows: Count = later(0)
    """Samples with NaN on both sides in the same places: in none of the numbers above."""
    normalised: bool = later(False)
    """The values are probabilities as they are, by the role `probabilities`: no softmax was taken.
    Records without it took one of them, too."""
    crossings: tuple[Crossing, ...] = later(())
    """One for each operating point of the policy."""


class RowParity(Record):
    """Each sample's row of floats as one vector, and as probabilities as they are, without a
    softmax. The worst over the samples; rows with NaN in the same places on both sides left out."""

    cosine_distance: Measured
    """1 - cos(r, c)."""
    confidence_diff: Measured
    """abs(max(c) - max(r))."""
    bands: tuple[Measured, Measured, Measured, Measured]
    """Shares of samples by that, as in `Confidence`."""
    sum_diff: Measured
    """abs(sum(c) - sum(r))."""
    sum_error: Measured
    """abs(sum(r) - 1)."""


class OutputParity(Record):
    """Parity of one output between the reference and one runtime, over `samples` samples."""

    name: str
    dtype: str
    samples: Count
    elements: Count
    nonfinite_reference: Count
    """Elements of r that are NaN or infinite."""
    nonfinite_mismatched: Count
    """Elements that are NaN on one side only, or infinite on one side only, or with other sign.
    Records without `nonfinite_same` count NaN on both sides here."""
    nonfinite_same: Count = later(0)
    """Elements that are NaN on both sides; their difference counts as 0. Whether that is parity,
    the policy says."""
    near_ties: Count = later(0)
    """Elements of integers and bools that differ, and that rounding alone moves to what the runtime
    says: they are in none of the numbers here."""
    unequal: Count | None = later(None)
    """Elements of integers and bools that differ. None: floats, or of before it was counted."""
    reference_constant: bool
    """True if all samples have the same reference output."""
    reference_abs_max: Measured
    """Over the finite elements of r."""
    reference_std: Measured
    """Standard deviation over the finite elements of r (population)."""
    max_abs_diff: Measured
    max_abs_diff_sample: Count | None
    mean_abs_diff: Measured
    scaled_diff: Measured
    """max_abs_diff / reference_std; of integers and bools max_abs_diff itself, because a class or
    token beside the right one is wrong however many there are."""
    l2_mean: Measured
    l2_max: Measured
    classification: ClassParity | None = None
    rows: RowParity | None = later(None)
    """None: no floats of 2 to 65 536 elements a sample, or of before it was measured."""
    noise: NoiseParity | None = later(None)
    """None: not measured, for the reason `Evidence.noise_unmeasured`, or no floats."""
    stability: StabilityParity | None = later(None)
    differences: Histogram | None = later(None)
    """Of abs(c - r) over all elements. None: of before it was measured."""
    worst: tuple[WorstSample, ...] = later(())
    """Up to eight samples, the largest difference first."""


class Latency(Record):
    """Wall-clock milliseconds of one run of a batch, device transfers included."""

    batch_size: Count
    batches: Count
    median_ms: Measured
    p95_ms: Measured


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
    memory_bytes: Count | None = later(None)
    """By how much the process grew on the host while the runtime opened the file and ran its first
    batch; roughly. None: not measured."""
    probes: tuple[ProbeParity, ...] = later(())
    absent_reason: str | None = None
    failure: str | None = None

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
    measured_at: str
    """UTC, ISO 8601."""

    def runtime(self, name: RuntimeName) -> RuntimeEvidence | None:
        """The evidence of one runtime, or None."""
        return next((r for r in self.runtimes if r.runtime == name), None)
