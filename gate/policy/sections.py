"""Its sections: bounds, runtimes, determinism, instruments, review tag."""

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

_ForAll = tuple[Threshold, ...]

_ByClass = dict[Annotated[int, Field(ge=0)], Annotated[_ForAll, Field(min_length=1)]]


class OperatingPoint(NamedTuple):
    """A confidence, of any answer or of one class."""

    threshold: float
    label: int | None = None
    """The class that this point is for; None: all."""

    def __str__(self) -> str:
        """`0.5`, or `0.7 of class 3`."""
        return f"{self.threshold:g}" + ("" if self.label is None else f" of class {self.label}")


def points_of(stated: _ForAll | _ByClass) -> tuple[OperatingPoint, ...]:
    """One by one, by class and threshold."""
    if isinstance(stated, dict):
        return tuple(OperatingPoint(t, label) for label in sorted(stated) for t in stated[label])
    return tuple(OperatingPoint(threshold) for threshold in stated)


def _canonical(stated: _ForAll | _ByClass) -> _ForAll | _ByClass:
    """Ascending, each once; nothing at all in one way."""
    if isinstance(stated, dict):
        return {label: _ascending(stated[label]) for label in sorted(stated)} or ()
    return _ascending(stated)


def _ascending(thresholds: _ForAll) -> _ForAll:
    return tuple(sorted(set(thresholds)))


def _kind(stated: Any) -> str:
    return "by class" if isinstance(stated, dict) else "for all"


OperatingPoints = Annotated[
    Annotated[_ForAll, Tag("for all")] | Annotated[_ByClass, Tag("by class")],
    Discriminator(_kind),
    AfterValidator(_canonical),
]
"""Thresholds for all classes, or by class index."""

Waivable = Literal["noise_ratio", "noise_peak", "noise_diff", "empty", "nonfinite"]
"""Checks that a policy may waive where they have nothing to measure."""

_OfAll = tuple[Waivable, ...]

_ByOutput = dict[str, _OfAll]


def _by_output(stated: Any) -> str:
    return "by output" if isinstance(stated, dict) else "of all"


Waivers = Annotated[
    Annotated[_OfAll, Tag("of all")] | Annotated[_ByOutput, Tag("by output")],
    Discriminator(_by_output),
    AfterValidator(lambda stated: stated or ()),
]
"""Of all outputs, or by the name of an output."""


# The text below a field is what `gate policy explain` and the site's policy reference say of it;
# `gate.decision.catalog` has the rest about bounds.
Bound = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]

Share = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]

Required = Literal["always", "when_present", "never"]

NonFinite = Literal["refuse", "same_places"]
"""NaN that both sides give in the same places: refused, or equal. On one side it is a fault."""

Role = Literal[
    "logits", "probabilities", "scores", "embedding", "boxes", "indices", "mask", "tensor"
]
"""What an output is, and so how it is judged: docs/roles.md."""

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
    """Bounds on the metrics of one runtime. None: not asked for. Definitions:
    docs/metrics.md."""

    max_abs_diff: Bound | None = None
    mean_abs_diff: Bound | None = None
    scaled_diff: Bound | None = None
    l2_logits: Bound | None = None
    l2_probabilities: Bound | None = None
    confidence_diff: Bound | None = None
    confidence_bands: ConfidenceBands | None = None
    """Shares of samples whose confidence moved by more than 1, 5 and 10 points."""
    top1_agreement: Share | None = None
    top1_lower_bound: Share | None = None
    top5_agreement: Share | None = None
    accuracy_drop: Bound | None = None
    noise_ratio: Bound | None = added_field(None)
    noise_ratio_by_operator: dict[str, Bound] | None = added_field(None)
    """`noise_ratio` of an output that ends in an operator of this name, such as `LogSoftmax`, where
    that is more: some runtimes compute an operator less exactly than others."""
    noise_peak: Bound | None = added_field(None)
    noise_diff: Bound | None = added_field(None)
    repeatability: Bound | None = added_field(None)
    repeatability_ratio: Bound | None = added_field(None)
    batch_invariance: Bound | None = added_field(None)
    batch_invariance_ratio: Bound | None = added_field(None)
    cosine_distance: Bound | None = added_field(None)
    """Of the role `embedding`; None: 1e-4."""
    row_sum_diff: Bound | None = added_field(None)
    """Of the role `probabilities`; None: 1e-3."""
    unequal_share: Share | None = added_field(None)
    """Of integers and bools: elements that differ, but for near-ties. None: 0 for the role
    `indices`, else not asked."""
    threshold_crossing: Share | None = added_field(None)
    """Of the samples, at each of the policy's operating points."""
    threshold_crossing_bound: Share | None = added_field(None)
    """Exact upper bound of that share, at the policy's confidence."""
    latency_ratio: Positive | None = added_field(None)
    """Median time of a batch, the runtime's by PyTorch's, on the CPU in the same run."""
    memory_mb: Positive | None = added_field(None)
    """Millions of bytes by which the process may grow while the file is opened and run."""
    p95_ms: Positive | None = added_field(None)
    """Of a server: 95th percentile of a request's milliseconds, in each load."""
    throughput_min: Positive | None = added_field(None)
    """Of a server: requests per second of the load with the most connections, at least."""

    @property
    def empty(self) -> bool:
        """Return True if no number of the outputs is bounded: a file that is fast and small may
        still be wrong."""
        return all(value is None for name, value in self if name not in (*_COSTS, _BY_OPERATOR))

    @property
    def costs(self) -> dict[str, float | None]:
        """Those on time and memory, which hold for a runtime and not for an output."""
        return {name: getattr(self, name) for name in _COSTS}

    def configured(self, names: Iterable[str]) -> list[str]:
        """Those of these bounds that are set."""
        return [name for name in names if getattr(self, name) is not None]


class RuntimePolicy(PolicyRecord):
    """Whether a runtime must be measured, and within which bounds."""

    required: Required
    """`always`: a machine without it can't judge. `when_present`: WAIVED, and shown, where the
    machine lacks it. `never`: not measured."""
    bounds: Bounds = Bounds()
    """What its numbers must hold; at least one on outputs, unless it is `never`."""
    exceeded: Literal["fail", "warn"] = added_field("fail")
    """What a check that does not hold does. `warn`: it is shown, and refuses nothing; of torch-cuda
    alone, which never runs the file."""
    kind: RuntimeName | None = added_field(None)
    """Which runtime of the registry measures under this name; None: the one of this name."""
    options: dict[str, JsonValue] = added_field({})
    """Of the runtime: `gate runtimes` and docs/runtimes.md say which it takes."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.required != "never" and self.bounds.empty:
            raise ValueError(
                "no bound is set on outputs, so everything would pass; set noise_ratio or "
                "max_abs_diff"
            )
        return self


class DeterminismPolicy(PolicyRecord):
    """Switches that are in force while measuring, on the PyTorch and the ONNX Runtime side."""

    tf32: bool = False
    """TF32 keeps 10 bits of the mantissa, in PyTorch and in ONNX Runtime on CUDA."""
    cudnn_deterministic: bool = True
    """cuDNN takes only algorithms that give the same answer twice."""
    cudnn_benchmark: bool = False
    """cuDNN picks algorithms by timing: other ones, and so another rounding, in each run."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] = 0
    """Of PyTorch's random numbers, and of the inputs that the gate makes."""
    threads: Annotated[int, Field(ge=1)] | None = added_field(None)
    """Threads of PyTorch and of each session of ONNX Runtime; None: as PyTorch has them."""
    algorithms: bool = added_field(False)
    """`torch.use_deterministic_algorithms(True)`: operators without a deterministic one raise."""


class Instruments(PolicyRecord):
    """What is measured beside the samples, and what the probes and the graph must hold.

    All of it is on by default: a policy that says nothing gets every instrument.
    """

    noise_samples: Annotated[int, Field(ge=0)] = 32
    """Samples on which the float64 reference runs; 0: no noise floor."""
    max_floor: Positive = added_field(0.01)
    """Largest noise floor of an output, in units of its spread: a larger one hides faults, so that
    the output is an ERROR (`not_measurable`)."""
    stability_samples: Annotated[int, Field(ge=0)] = 8
    """Samples for repeatability and batch invariance; 0: not measured."""
    probes: bool = True
    """Inputs that unmask baked-in behavior."""
    probe_batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = (1, 4, 7)
    """Where the batch axis is dynamic: one, the export's batch, an odd one."""
    probe_noise_ratio: Bound = 32.0
    """Bound for probes: they look for other answers, not for lost bits, and have few elements.
    Where the precision is reduced, a probe holds this one or the next."""
    probe_relative_diff: Bound = 1e-3
    """Bound where no float64 reference runs, or the precision is quantized; where it is reduced,
    this one or the one before."""
    probe_beyond_range: Literal["warn", "fail"] = added_field("warn")
    """Where the file overflows (NaN or infinity) on ten times the samples or more, and the model's
    output is finite: show it, or refuse the file. A finite difference always refuses it."""
    search_inputs: Annotated[int, Field(ge=0)] = 64
    """Inputs on which the traced and the eager module are compared; 0: no search."""
    graph: bool = True
    """Read the ONNX graph."""
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
    """Findings that refuse the file; the others are shown only."""

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        if self.stability_samples == 1:
            raise ValueError(
                "stability_samples is 1: one sample has no other batch; 0 or 2 and more"
            )
        return self

    @classmethod
    def none(cls) -> Self:
        """Nothing beside the samples."""
        return cls(noise_samples=0, stability_samples=0, probes=False, search_inputs=0, graph=False)


class CudaProviderPolicy(PolicyRecord):
    """Options of ONNX Runtime's CUDA provider (`use_tf32` follows `determinism.tf32`)."""

    cudnn_conv_algo_search: Literal["DEFAULT", "HEURISTIC", "EXHAUSTIVE"] = "HEURISTIC"
    """How convolutions choose their algorithm; `EXHAUSTIVE` picks by timing."""
    arena_extend_strategy: Literal["kNextPowerOfTwo", "kSameAsRequested"] = "kNextPowerOfTwo"
    """How the memory of the device grows."""
    do_copy_in_default_stream: bool = True
    """Copies wait for the kernels before them."""

    def provider_options(self, *, tf32: bool) -> dict[str, str]:
        """The options as ONNX Runtime takes and reports them: text."""
        return {
            "cudnn_conv_algo_search": self.cudnn_conv_algo_search,
            "arena_extend_strategy": self.arena_extend_strategy,
            "do_copy_in_default_stream": "1" if self.do_copy_in_default_stream else "0",
            "use_tf32": "1" if tf32 else "0",
        }


class ExportFindings(PolicyRecord):
    """What the export itself told, and what of it refuses the file; the rest is shown only."""

    tracer_warnings: Literal["show", "refuse"] = "show"
    """Warnings of the tracer about the user's code."""
    hazards: Literal["show", "refuse"] = "show"
    """What the exporter warned of, and outputs without a batch axis."""
    lint: Literal["show", "refuse_errors", "refuse_warnings"] = "refuse_errors"
    """Findings of the trace-safety rules (docs/lint) that no `# noqa` silences."""
    record: Literal["optional", "required"] = "optional"
    """`required`: evidence that does not say how the file was exported is an ERROR."""


class ChampionPolicy(PolicyRecord):
    """How much worse than the version that serves now a file may be, on the same samples. None:
    not asked for."""

    max_accuracy_drop: Share | None = None
    """Accuracy of the version that serves minus that of the new file."""
    min_agreement: Share | None = None
    """Share of samples to which both give the same class."""
    max_latency_ratio: Positive | None = None
    """Median time of a batch, new by old."""
    first_release: Literal["allow", "refuse"] = "allow"
    """Where no version serves, so that there is nothing to compare with."""

    @property
    def is_bounded(self) -> bool:
        """Return whether it sets a bound. Without one a metric of the policy has to (`Policy`)."""
        return self.asks_for_answers or self.max_latency_ratio is not None

    @property
    def asks_for_answers(self) -> bool:
        """Return whether it bounds answers of classes."""
        return self.max_accuracy_drop is not None or self.min_agreement is not None


class PreprocessingPolicy(PolicyRecord):
    """How near those who feed the model must come to the preprocessing that it was trained with."""

    consumers: Annotated[tuple[ConsumerName, ...], Field(min_length=1)]
    """Implementations of the gate (docs/preprocessing.md), or consumers whose tensors are given."""
    training_side: ImplementationName = "pillow"
    """Whom they are compared with."""
    required: Literal["always", "when_present"] = "always"
    """`when_present`: an implementation that is not installed on the measuring machine is waived;
    one that can't do the spec anywhere is not."""
    max_diff: Bound = 1.0
    """Of any value, in 1/255 of the value range before normalisation."""
    max_flips: Share | None = None
    """Largest share of pictures whose top-1 class differs; None: the model is not asked."""
    min_images: Annotated[int, Field(ge=1)] = 50
    """Copies of a picture, pixel by pixel, count once."""

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        if len(set(self.consumers)) < len(self.consumers) or self.training_side in self.consumers:
            raise ValueError(
                f"consumers {list(self.consumers)}: name each once, and not the training side "
                f"'{self.training_side}', which is always the same as itself"
            )
        return self


# Deployment jobs of hosted registries look for a tag named after their task, with the value
# `Approved`; a policy can name that tag.
REVIEW_TAG, APPROVED, REJECTED = "gate.review", "approved", "rejected"
"""A rejection in these words counts whatever is configured."""

_RESERVED = ("gate.", "mlflow.")
"""What the gate and MLflow call their own tags."""

Word = Annotated[str, Field(min_length=1, max_length=100)]


def letters(text: str) -> str:
    """Its letters alone, without case and width."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return "".join(char for char in text if char.isalpha())


def without_case(text: str) -> str:
    """The text without case, and without the space around."""
    return text.strip().casefold()


class ReviewTag(PolicyRecord):
    """Which tag of a version holds a reviewer's word, and what the words are; all of it compared
    without case, and without the space around."""

    name: Annotated[str, Field(pattern=r"^ *[\w.\-:/][\w.\-:/ ]*$", max_length=250)] = REVIEW_TAG
    """MLflow takes letters, digits and `_ - . : /` and spaces."""
    approved: Word = APPROVED
    """The value that lets a version pass."""
    rejected: Word = REJECTED
    """The value that refuses it."""

    @model_validator(mode="after")
    def _is_unmistakable(self) -> Self:
        name = without_case(self.name)
        if name.startswith(_RESERVED) and name != REVIEW_TAG:
            raise ValueError(
                f"the tag '{self.name}' is the gate's own or MLflow's: expected {REVIEW_TAG}, or a "
                "name that begins with neither 'gate.' nor 'mlflow.'"
            )
        yes, no = letters(self.approved), letters(self.rejected)
        if not yes or not no:
            raise ValueError("approved and rejected are words: each needs a letter")
        if yes in (no, REJECTED) or no == APPROVED:
            raise ValueError(
                f"approved is '{self.approved}' and rejected is '{self.rejected}': a yes must be "
                "told from a no by its letters"
            )
        return self

    def is_named(self, key: str) -> bool:
        """Return whether a tag of this key is the one."""
        return without_case(key) == without_case(self.name)

    def may_reject(self, key: str) -> bool:
        """Return whether a rejection in a tag of this key counts: in this and the gate's own."""
        return self.is_named(key) or without_case(key) == REVIEW_TAG

    def is_yes(self, value: str) -> bool:
        """Return whether a value is the word of approval."""
        return without_case(value) == without_case(self.approved) and not self.is_no(value)

    def is_no(self, value: str) -> bool:
        """Return whether a value is a rejection.

        Signs and spaces anywhere in it, and the width of its letters, make it no other word: a no
        that is spelled otherwise is not to be missed.
        """
        return letters(value) in (REJECTED, letters(self.rejected))
