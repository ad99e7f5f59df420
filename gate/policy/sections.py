"""The sections of a policy: bounds, runtimes, determinism, instruments, review tag."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    model_validator,
)

from gate.records.instruments import GraphCode
from gate.records.preprocessing import ConsumerName, ImplementationName
from gate.records.runtime import RuntimeName
from gate.storage.record import Record, added_field

Threshold = Annotated[float, Field(gt=0.0, lt=1.0)]

_Thresholds = tuple[Threshold, ...]

_ThresholdsByClass = dict[Annotated[int, Field(ge=0)], Annotated[_Thresholds, Field(min_length=1)]]


class OperatingPoint(NamedTuple):
    """A confidence threshold, for all classes or for one."""

    threshold: float
    label: int | None = None
    """The class that the threshold applies to; None: all classes."""

    def __str__(self) -> str:
        """`0.5`, or `0.7 of class 3`."""
        return f"{self.threshold:g}" + ("" if self.label is None else f" of class {self.label}")


def points_of(stated: _Thresholds | _ThresholdsByClass) -> tuple[OperatingPoint, ...]:
    """Return the operating points, ordered by class and threshold."""
    if isinstance(stated, dict):
        return tuple(OperatingPoint(t, label) for label in sorted(stated) for t in stated[label])
    return tuple(OperatingPoint(threshold) for threshold in stated)


def _canonical(stated: _Thresholds | _ThresholdsByClass) -> _Thresholds | _ThresholdsByClass:
    """Return thresholds in ascending order without duplicates; an empty mapping becomes ()."""
    if isinstance(stated, dict):
        return {label: _ascending(stated[label]) for label in sorted(stated)} or ()
    return _ascending(stated)


def _ascending(thresholds: _Thresholds) -> _Thresholds:
    return tuple(sorted(set(thresholds)))


def _thresholds_tag(stated: Any) -> str:
    return "by class" if isinstance(stated, dict) else "for all"


OperatingPoints = Annotated[
    Annotated[_Thresholds, Tag("for all")] | Annotated[_ThresholdsByClass, Tag("by class")],
    Discriminator(_thresholds_tag),
    AfterValidator(_canonical),
]
"""Thresholds for all classes, or by class index."""

Waivable = Literal["noise_ratio", "noise_peak", "noise_diff", "empty", "nonfinite"]
"""Checks that a policy may waive if they have nothing to measure."""

_WaivedChecks = tuple[Waivable, ...]

_WaivedByOutput = dict[str, _WaivedChecks]


def _waivers_tag(stated: Any) -> str:
    return "by output" if isinstance(stated, dict) else "of all"


Waivers = Annotated[
    Annotated[_WaivedChecks, Tag("of all")] | Annotated[_WaivedByOutput, Tag("by output")],
    Discriminator(_waivers_tag),
    AfterValidator(lambda stated: stated or ()),
]
"""Waived checks, for all outputs or by output name."""


# The docstring below a field is shown by `gate policy explain` and in the policy reference.
# `gate.decision.catalog` describes the bounds.
Bound = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]

Share = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]

Required = Literal["always", "when_present", "never"]

NonFinite = Literal["refuse", "same_places"]
"""Whether NaN at the same positions on both sides is refused or accepted."""

Role = Literal[
    "logits", "probabilities", "scores", "embedding", "boxes", "indices", "mask", "tensor"
]
"""The role of an output decides how it is judged: docs/roles.md."""

_COSTS = ("latency_ratio", "memory_mb", "p95_ms", "throughput_min")

_BY_OPERATOR = "noise_ratio_by_operator"


class PolicyRecord(Record):
    """A part of the policy."""

    model_config = ConfigDict(allow_inf_nan=False)


class ConfidenceBands(PolicyRecord):
    """Largest allowed share of samples whose confidence moved by more than 1, 5, 10 points."""

    over_1_percent: Share
    over_5_percent: Share
    over_10_percent: Share


class Bounds(PolicyRecord):
    """Bounds on the metrics of one runtime, defined in docs/metrics.md. None: no bound."""

    max_abs_diff: Bound | None = None
    mean_abs_diff: Bound | None = None
    scaled_diff: Bound | None = None
    l2_logits: Bound | None = None
    l2_probabilities: Bound | None = None
    confidence_diff: Bound | None = None
    confidence_bands: ConfidenceBands | None = None
    """Largest shares of samples whose confidence changes by more than 1, 5 and 10 points."""
    top1_agreement: Share | None = None
    top1_lower_bound: Share | None = None
    top5_agreement: Share | None = None
    accuracy_drop: Bound | None = None
    noise_ratio: Bound | None = added_field(None)
    noise_ratio_by_operator: dict[str, Bound] | None = added_field(None)
    """`noise_ratio` of outputs computed by an operator of this name, such as `LogSoftmax`, if it is
    larger than `noise_ratio`. Some runtimes compute an operator less exactly than others."""
    noise_peak: Bound | None = added_field(None)
    noise_diff: Bound | None = added_field(None)
    repeatability: Bound | None = added_field(None)
    repeatability_ratio: Bound | None = added_field(None)
    batch_invariance: Bound | None = added_field(None)
    batch_invariance_ratio: Bound | None = added_field(None)
    cosine_distance: Bound | None = added_field(None)
    """For the role `embedding`. None: 1e-4."""
    row_sum_diff: Bound | None = added_field(None)
    """For the role `probabilities`. None: 1e-3."""
    unequal_share: Share | None = added_field(None)
    """Share of integers and bools that differ, excluding near-ties. None: 0 for the role `indices`,
    otherwise no bound."""
    threshold_crossing: Share | None = added_field(None)
    """Share of samples that cross an operating point on one side only."""
    threshold_crossing_bound: Share | None = added_field(None)
    """Exact upper confidence bound of that share, at the policy's `confidence`."""
    latency_ratio: Positive | None = added_field(None)
    """Median time of a batch divided by that of PyTorch on the CPU in the same run."""
    memory_mb: Positive | None = added_field(None)
    """Largest memory growth of the process while it opens and runs the file, in MB."""
    p95_ms: Positive | None = added_field(None)
    """For servers: 95th percentile of the request time at each load, in ms."""
    throughput_min: Positive | None = added_field(None)
    """For servers: least requests per second at the load with the most connections."""

    @property
    def empty(self) -> bool:
        """True if no metric of the outputs is bounded. Bounds on time and memory are not enough,
        because a fast file may be wrong."""
        return all(value is None for name, value in self if name not in (*_COSTS, _BY_OPERATOR))

    @property
    def costs(self) -> dict[str, float | None]:
        """The bounds on time and memory, which apply to a runtime and not to an output."""
        return {name: getattr(self, name) for name in _COSTS}

    def configured(self, names: Iterable[str]) -> list[str]:
        """Return the names of these bounds that have a value."""
        return [name for name in names if getattr(self, name) is not None]


class RuntimePolicy(PolicyRecord):
    """Whether a runtime must be measured, and within which bounds."""

    required: Required
    """`always`: the verdict is ERROR if the runtime is missing. `when_present`: WAIVED if it is
    missing. `never`: not measured."""
    bounds: Bounds = Bounds()
    """Bounds on its metrics. Unless `required` is `never`, at least one must be on outputs."""
    exceeded: Literal["fail", "warn"] = added_field("fail")
    """`warn`: a failed check is only a warning. For torch-cuda only, which never runs the file."""
    kind: RuntimeName | None = added_field(None)
    """The runtime to use (`gate runtimes` lists them). None: the runtime of this name."""
    options: dict[str, JsonValue] = added_field({})
    """Options of the runtime (docs/runtimes.md)."""


class DeterminismPolicy(PolicyRecord):
    """Settings of PyTorch and ONNX Runtime during the measurement."""

    tf32: bool = False
    """Allow TF32, which keeps 10 bits of the mantissa, in PyTorch and ONNX Runtime on CUDA."""
    cudnn_deterministic: bool = True
    """cuDNN uses deterministic algorithms only."""
    cudnn_benchmark: bool = False
    """cuDNN chooses algorithms by timing, so that each run may round differently."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] = 0
    """Seed of PyTorch's random numbers and of the probes."""
    threads: Annotated[int, Field(ge=1)] | None = added_field(None)
    """Threads of PyTorch and of each ONNX Runtime session. None: PyTorch's default."""
    algorithms: bool = added_field(False)
    """Call `torch.use_deterministic_algorithms(True)`, so that nondeterministic operators raise."""


class Instruments(PolicyRecord):
    """What is measured in addition to the differences on the samples, and its bounds.

    Every instrument is on by default.
    """

    noise_samples: Annotated[int, Field(ge=0)] = 32
    """Number of samples that the float64 reference computes for the noise floor. 0: none."""
    max_floor: Positive = added_field(0.01)
    """Largest noise floor of an output, as a share of its standard deviation. A larger one would
    hide faults and is an ERROR (`not_measurable`)."""
    stability_samples: Annotated[int, Field(ge=0)] = 8
    """Number of samples for repeatability and batch invariance. 0: not measured."""
    probes: bool = True
    """Run probes: generated inputs that reveal what the export baked in."""
    probe_batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = (1, 4, 7)
    """Batch sizes of probes, if the batch axis is dynamic."""
    probe_noise_ratio: Bound = 32.0
    """Bound on the `noise_ratio` of a probe. It is wide, because probes find a wrong function, not
    lost precision. With precision `reduced`, this bound or the next one must hold."""
    probe_relative_diff: Bound = 1e-3
    """Bound on the relative difference of a probe, if float64 does not run or the precision is
    `quantized`."""
    probe_beyond_range: Literal["warn", "fail"] = added_field("warn")
    """`fail`: refuse a file that overflows (NaN or infinity) at ten times the samples' range or
    more, where the model's output is finite. A finite difference is always refused."""
    search_inputs: Annotated[int, Field(ge=0)] = 64
    """Number of inputs on which the trace search compares traced and eager model. 0: no search."""
    graph: bool = True
    """Examine the ONNX graph."""
    graph_forbid: tuple[GraphCode, ...] = (
        "training_mode",
        "fixed_batch",
        "zero_initializer",
        "nonfinite_initializer",
        "other_weights",
        "rounded_weights",
        "float16",
        "quantized",
        "external_data",
    )
    """Findings in the graph that refuse the file. Other findings are only shown."""

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        if self.stability_samples == 1:
            raise ValueError(
                "stability_samples is 1, but batch invariance needs at least 2; set 0 or 2"
            )
        return self

    @classmethod
    def none(cls) -> Self:
        """Return settings with every instrument off."""
        return cls(noise_samples=0, stability_samples=0, probes=False, search_inputs=0, graph=False)


class CudaProviderPolicy(PolicyRecord):
    """Options of ONNX Runtime's CUDA provider (`use_tf32` follows `determinism.tf32`)."""

    cudnn_conv_algo_search: Literal["DEFAULT", "HEURISTIC", "EXHAUSTIVE"] = "HEURISTIC"
    """How ONNX Runtime chooses convolution algorithms. `EXHAUSTIVE` chooses by timing."""
    arena_extend_strategy: Literal["kNextPowerOfTwo", "kSameAsRequested"] = "kNextPowerOfTwo"
    """How ONNX Runtime extends its memory arena on the device."""
    do_copy_in_default_stream: bool = True
    """Copy in the default stream, after the kernels before it."""

    def provider_options(self, *, tf32: bool) -> dict[str, str]:
        """Return the options as ONNX Runtime accepts and reports them: strings."""
        return {
            "cudnn_conv_algo_search": self.cudnn_conv_algo_search,
            "arena_extend_strategy": self.arena_extend_strategy,
            "do_copy_in_default_stream": "1" if self.do_copy_in_default_stream else "0",
            "use_tf32": "1" if tf32 else "0",
        }


class ExportFindings(PolicyRecord):
    """Which export warnings refuse the file. Other warnings are only shown."""

    tracer_warnings: Literal["show", "refuse"] = "show"
    """Warnings of the tracer about the model's code."""
    hazards: Literal["show", "refuse"] = "show"
    """Warnings of the exporter, and outputs without a batch axis."""
    lint: Literal["show", "refuse_errors", "refuse_warnings"] = "refuse_errors"
    """Findings of the trace-safety rules (docs/lint) that no `# noqa` silences."""
    record: Literal["optional", "required"] = "optional"
    """`required`: a missing export record (`gate check --export-record`) is an ERROR."""


class ChampionPolicy(PolicyRecord):
    """How much worse than the champion a file may be on the same samples. None: no bound."""

    max_accuracy_drop: Share | None = None
    """Bound on the champion's accuracy minus that of the new file."""
    min_agreement: Share | None = None
    """Least share of samples for which both return the same class."""
    max_latency_ratio: Positive | None = None
    """Bound on the median time of a batch divided by that of the champion."""
    first_release: Literal["allow", "refuse"] = "allow"
    """Whether a file is promoted if there is no champion."""

    @property
    def is_bounded(self) -> bool:
        """Whether the section sets a bound. Otherwise a metric must set one (`Policy`)."""
        return self.asks_for_answers or self.max_latency_ratio is not None

    @property
    def asks_for_answers(self) -> bool:
        """Whether the section bounds predicted classes."""
        return self.max_accuracy_drop is not None or self.min_agreement is not None


class PreprocessingPolicy(PolicyRecord):
    """How much preprocessing implementations may differ from that of the training."""

    consumers: Annotated[tuple[ConsumerName, ...], Field(min_length=1)]
    """Implementations of the gate (docs/preprocessing.md), or names passed to `--tensors`."""
    training_side: ImplementationName = "pillow"
    """The implementation to compare with."""
    required: Literal["always", "when_present"] = "always"
    """`when_present`: waive an implementation that is not installed, but not one that does not
    support the spec."""
    max_diff: Bound = 1.0
    """Largest difference of a value, in 1/255 of the value range before normalization."""
    max_flips: Share | None = None
    """Largest share of images whose top-1 class differs. None: the model is not run."""
    min_images: Annotated[int, Field(ge=1)] = 50
    """Least number of distinct images."""

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        if len(set(self.consumers)) < len(self.consumers) or self.training_side in self.consumers:
            raise ValueError(
                f"consumers {list(self.consumers)}: list each once, without the training side "
                f"'{self.training_side}', which always equals itself"
            )
        return self


# Deployment jobs of hosted registries look for a tag named after their task with the value
# `Approved`. A policy can use that tag.
REVIEW_TAG, APPROVED, REJECTED = "gate.review", "approved", "rejected"
"""The default tag and its values. A rejection in these words counts under every policy."""

_RESERVED = ("gate.", "mlflow.")
"""Prefixes of the tags that the gate and MLflow set."""

Word = Annotated[str, Field(min_length=1, max_length=100)]


def letters(text: str) -> str:
    """Return the letters of a text, without case and width variants."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return "".join(char for char in text if char.isalpha())


def without_case(text: str) -> str:
    """Return the text in lower case without surrounding spaces."""
    return text.strip().casefold()


class ReviewTag(PolicyRecord):
    """The model version tag that reviewers set, and its values. Case and surrounding spaces are
    ignored."""

    name: Annotated[str, Field(pattern=r"^ *[\w.\-:/][\w.\-:/ ]*$", max_length=250)] = REVIEW_TAG
    """Name of the tag: letters, digits, spaces and `_ - . : /`."""
    approved: Word = APPROVED
    """The value that approves a version."""
    rejected: Word = REJECTED
    """The value that rejects a version."""

    @model_validator(mode="after")
    def _is_unmistakable(self) -> Self:
        name = without_case(self.name)
        if name.startswith(_RESERVED) and name != REVIEW_TAG:
            raise ValueError(
                f"the tag '{self.name}' is reserved: expected {REVIEW_TAG}, or a name that does "
                "not begin with 'gate.' or 'mlflow.'"
            )
        yes, no = letters(self.approved), letters(self.rejected)
        if not yes or not no:
            raise ValueError("approved and rejected must each contain a letter")
        if yes in (no, REJECTED) or no == APPROVED:
            raise ValueError(
                f"approved is '{self.approved}' and rejected is '{self.rejected}': use words "
                "with different letters, and neither default word for its opposite"
            )
        return self

    def is_named(self, key: str) -> bool:
        """Return whether a tag key names the review tag."""
        return without_case(key) == without_case(self.name)

    def may_reject(self, key: str) -> bool:
        """Return whether a rejection under this tag key counts: the review tag or `gate.review`."""
        return self.is_named(key) or without_case(key) == REVIEW_TAG

    def is_yes(self, value: str) -> bool:
        """Return whether a tag value approves."""
        return without_case(value) == without_case(self.approved) and not self.is_no(value)

    def is_no(self, value: str) -> bool:
        """Return whether a tag value rejects.

        Punctuation, spaces, case and width variants of letters are ignored, so that no rejection is
        missed because of its spelling.
        """
        return letters(value) in (REJECTED, letters(self.rejected))
