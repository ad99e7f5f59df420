"""Results of the instruments: noise, stability, probes, graph, weights."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Literal

from pydantic import Field, model_validator

from gate.storage.digest import Digest
from gate.storage.record import Count, Measured, Params, Record, added_field

# Notation, as in docs/metrics.md: `r32` is the PyTorch model in float32 on CPU (the reference),
# `r64` the same weights and inputs in float64, `c` the runtime.


EPSILON = 2.0**-24
"""Unit roundoff of float32: half the distance from 1.0 to the next float32."""

ULP = 2.0 * EPSILON
"""Distance from 1.0 to the next float32."""

UNDERFLOW = 2.0**-126
"""The smallest normal float32. A runtime may flush smaller values to zero."""

Side = Literal["reference", "candidate", "neither"]

ProbeKind = Literal["batch", "value", "size", "search"]

GraphCode = Literal[
    "training_mode",
    "fixed_batch",
    "zero_initializer",
    "nonfinite_initializer",
    "other_weights",
    "rounded_weights",
    "float64",
    "float16",
    "quantized",
    "external_data",
    "unused_output",
    "domain",
    "opset",
    "checker",
]


class NoiseParity(Record):
    """One output compared with the float64 reference, over `samples` samples.

    Only finite elements count; if `r64` is finite and `c` is not, the ratios are infinite. Without
    elements nothing is compared, and every number is 0.
    """

    samples: Count
    elements: Count
    truth_rms: Measured
    """rms(r64)."""
    reference_rms: Measured
    """rms(r32 - r64): the rounding error of PyTorch."""
    candidate_rms: Measured
    """rms(c - r64): the runtime's error."""
    rounding_rms: Measured | None = added_field(None)
    """Error under random rounding (`gate.reference.random_rounding`). None: not measured, because
    every runtime is close to the reference in units of `reference_rms`."""
    rounding_draws: Count | None = added_field(None)
    """Number of runs under random rounding; `rounding_rms` is their median. None: no such run."""
    few_draws: bool = added_field(False)
    """True if further runs were skipped because `whole_ratio` refuses the runtime whatever their
    results. The ratio of a column may then be large by chance."""
    scatter: Measured | None = added_field(None)
    """Factor by which chance may raise the ratio over the whole output, because it has few
    independent errors (`gate.statistics.error_groups`). None: an older record, whose ratio was not
    divided by it."""
    group: str | None = added_field(None)
    """The group with the largest `ratio`: `column 3` (of the last axis), `channel 3` (of axis 1),
    `values up to 12`. None: the whole output."""
    floor_peak: Measured | None = added_field(None)
    """Unit of `peak` over the whole output."""
    ratio: Measured
    """`noise_ratio`: rms(c - r64) / floor / scatter. The largest over the whole output, its smaller
    elements alone, and each column and channel with its own floor."""
    peak: Measured
    """max|c - r64| / floor / scatter, with maxima in place of the RMS."""
    diff: Measured
    """`noise_diff`: max|c - r32| / floor over the samples without a float64 reference. For values
    larger than any with one, the floor grows in proportion."""
    settled: Measured | None = added_field(None)
    """The largest part of `diff` that random rounding of the same sample does not explain. None: no
    sample was measured again."""
    closer: Side
    """Whether r32 or c is closer to r64 (RMS), over the elements of `ratio`."""
    baseline: Literal["float64", "float32"] = added_field("float64")
    """`float32`: the model computes another function in float64, so `r32` replaces `r64`, and
    `rounding_rms` is sqrt(2) times the error under random rounding."""

    @property
    def floor_rms(self) -> float:
        """The unit of `ratio` over the whole output; NaN if one of the errors is NaN."""
        return noise_floor(self.truth_rms, self.reference_rms, self.rounding_rms or 0.0)

    @property
    def whole_ratio(self) -> float:
        """`ratio` over the whole output."""
        return self.candidate_rms / self.floor_rms / (self.scatter or 1.0)


def noise_floor(truth: float, reference: float, rounding: float = 0.0) -> float:
    """Return the noise floor: the largest of PyTorch's error, the error under random rounding, and
    one rounding of the reference. NaN if either is NaN."""
    errors = (reference, rounding, EPSILON * truth, UNDERFLOW)
    return math.nan if any(map(math.isnan, errors)) else max(errors)


class CodeLocation(Record):
    """An operator in the model's forward, and the source line that calls it."""

    operator: str
    """ATen name without namespace, for example `clamp`."""
    module: str = ""
    """Path of the innermost module; empty: the model itself."""
    file: str = ""
    """Name of the source file; empty: unknown."""
    line: Count = 0
    source: str = ""
    """The source line without surrounding spaces."""

    def __str__(self) -> str:
        """Return the module and the line, as far as known."""
        where = f"module '{self.module}'" if self.module else "the model's forward"
        code = f"`{self.source}` ({self.file}:{self.line})" if self.file else self.operator
        return f"{where} at {code}"


RoundingState = Literal["valid", "differs", "failed"]
"""Whether a random-rounding run of scale 0 reproduces the reference. `failed`: the model can't run
under random rounding."""


class ReferenceValidity(Record):
    """The limits of the float64 reference and of random rounding.

    It lists where they compute another function than the model. Outputs are numbered in the file's
    order (docs/metrics.md, *Valid references*).
    """

    float64_differs: tuple[Count, ...] = ()
    """Outputs whose float64 reference is not used: errors are measured against `r32`."""
    rounding: RoundingState = "valid"
    fast_path: bool = False
    """True if the fused path of `nn.TransformerEncoder` differs from its layers, so random-rounding
    runs use it too."""
    largest: Measured = 0.0
    """The largest q of the outputs `float64_differs`."""
    differs_at: CodeLocation | None = None
    """Where float32 and float64 diverge first; None: not found, or they do not."""
    half_precision: CodeLocation | None = None
    """The first operator that returns float16 or bfloat16."""
    half_dtype: Literal["float16", "bfloat16"] | None = None
    """The dtype of its result."""
    own_choices: bool = added_field(False)
    """True if float64 and random-rounding runs use the choices of the float32 reference (TopK,
    ArgMax, NonMaxSuppression, comparisons), because rounding changes them."""

    def uses_float64(self, output: int) -> bool:
        """Return True if the float64 reference of an output computes the model's function."""
        return output not in self.float64_differs

    def is_measurable(self, output: int) -> bool:
        """Return True if float64 or random rounding measures the rounding error of an output."""
        return self.uses_float64(output) or self.rounding == "valid"


class StabilityParity(Record):
    """One output of one runtime, computed repeatedly on the same `samples` samples."""

    samples: Count
    batch_sizes: tuple[Count, ...]
    """The batch sizes in which the same samples were computed."""
    repeatability: Measured
    """max abs diff of two identical runs."""
    batch_invariance: Measured | None
    """max abs diff of a sample between the batch sizes. None: there is a single sample."""
    unit: Measured
    """The unit of the ratios in the largest column: the maximum of the reference's batch variance,
    its rounding error max|r32 - r64| if known, 2^-24 max|r32|, and, for a large difference, its
    error under random rounding. Each ratio is that of the worst column in units of that column.
    Infinite if the reference is not stable."""
    repeatability_ratio: Measured | None
    """repeatability / unit. None: the results of runtime and reference both change."""
    batch_invariance_ratio: Measured | None
    """batch_invariance / unit. None for the reasons of the two fields above."""
    rounding_draws: Count | None = added_field(None)
    """Number of runs under random rounding for `unit`. None: none were needed."""


class ConcurrentLoad(Record):
    """Concurrent requests of several clients to a server, without warm-up. They hold the samples of
    the stability instrument in batches of its sizes."""

    connections: Count
    """Number of clients. Each sends its next request after the answer to the previous one."""
    rate: Measured | None
    """Requests per second that were sent, independent of the answers; the wait for a free client
    counts as latency. None: each client sends as fast as it gets answers."""
    requests: Count
    batch_invariance_ratio: Measured
    """As `StabilityParity.batch_invariance_ratio`, the worst over outputs and requests. NaN: the
    reference is not stable."""
    crossed: Count
    """Number of samples whose answer is closer to the model's answer to another sample."""
    p50_ms: Measured
    p95_ms: Measured
    p99_ms: Measured
    per_second: Measured
    """Requests per second."""


class BeyondRange(Record):
    """A failure of a runtime, but not of the model, on values far beyond the samples' range."""

    kind: Literal["overflow", "no_rows"]
    """`overflow`: elements are NaN or infinite. `no_rows`: the runtime fails where an output of the
    model is empty, for example a detector without boxes."""
    factor: Measured
    """Magnitude of the smallest failing input relative to the samples."""
    elements: Count = 0
    """Number of output elements that overflow."""
    noise_ratio: Measured | None = None
    """As in `ProbeResult`, over the elements that do not fail."""
    relative_diff: Measured | None = None
    """As in `ProbeResult`, over the elements that do not fail; None: there were none."""
    failure: str | None = None
    """The failure on samples of the probe with smaller values; None: there is none."""


class UndefinedCast(Record):
    """A conversion of floats that the integer type can't represent. The result is undefined in ONNX
    and in PyTorch; values that depend on it are not compared."""

    tensor: str
    """The tensor of the file with the result."""
    dtype: str
    elements: Count
    """Number of floats that are out of range."""


class ProbeResult(Record):
    """The result of one runtime on a probe: an input that differs from the samples.

    Either `inapplicable` (the reference can't compute the input), or `failure` (the runtime can't,
    or returns other shapes), or numbers: the worst over the outputs.
    """

    name: str
    kind: ProbeKind
    batch_size: Count
    noise_ratio: Measured | None = None
    """As in `NoiseParity`, on the probe alone; None without a float64 reference."""
    relative_diff: Measured | None = None
    """max|c - r32| / max|r32|; integers and bools: 0 or infinite."""
    failure: str | None = None
    inapplicable: str | None = None
    """A key of `REASONS` in `gate.decision.catalog`, or the error of the reference."""
    beyond_range: BeyondRange | None = added_field(None)
    """Set if the failure or the infinite numbers come from values far beyond the samples'."""
    undefined: tuple[UndefinedCast, ...] = added_field(())
    """Undefined conversions whose dependent values differ and are left out of the numbers."""
    unexamined: bool = added_field(False)
    """True if the numbers were not measured again under random rounding, because the samples reject
    the runtime anyway. A correct runtime may have the same numbers."""
    rounding_draws: Count | None = added_field(None)
    """Number of runs under random rounding for these numbers. None: none were needed."""


_BETWEEN = range(2, 17)

_LARGER_SIZES = range(41, 49)
"""Larger than the usual constants in a condition, but small, because each sample takes time."""


def drawn_batch_sizes(sha256: Digest, listed: Collection[int]) -> tuple[int, int]:
    """Return two further batch sizes for a file: one of 2 to 16 that is not `listed`, and one of 41
    to 48. They follow from its digest, so that no file can be prepared for them."""
    number = int(sha256.hex, 16)
    between = [size for size in _BETWEEN if size not in listed] or list(_BETWEEN)
    return between[number % len(between)], _LARGER_SIZES[
        number // len(_BETWEEN) % len(_LARGER_SIZES)
    ]


class TraceSearch(Record):
    """The search for inputs on which the traced and the eager module disagree.

    The search does not run the ONNX file. Its inputs became probes of kind `search`.
    """

    tried: Count
    """Number of tried inputs."""
    found: tuple[str, ...] = ()
    """Names of the inputs on which they disagree."""
    reason: str | None = None
    """Why no input was tried: the error of tracing, or `trace_differs_on_example` for a model that
    draws random numbers or keeps state between calls."""


class GraphFinding(Record):
    """A finding in the graph of the ONNX file, at `place` (a node or a tensor)."""

    code: GraphCode
    place: str
    detail: str | None = added_field(None)
    """The text of a record without `detail_code`."""
    detail_code: str | None = added_field(None)
    """A key of `FINDINGS` in `gate.decision.faults`. None: the record is older."""
    detail_params: Params = added_field({})
    """The values for the text. `more`: number of further findings of this kind."""

    @model_validator(mode="before")
    @classmethod
    def _without_text(cls, stated: Any) -> Any:
        """Drop the text that `--json` adds: evidence read from there has the same digest."""
        if isinstance(stated, dict) and stated.get("detail_code") is not None:
            return {name: value for name, value in stated.items() if name != "detail"}
        return stated

    def to_params(self) -> dict[str, Any]:
        """Return the finding as an item of `params["findings"]` of a check."""
        if self.detail_code is None:
            return {"place": self.place, "code": "stored", "text": self.detail or ""}
        return {"place": self.place, "code": self.detail_code, **self.detail_params}


class WeightsReport(Record):
    """The constants of the file compared with the parameters, buffers and attributes of the model.

    Single numbers, constant fills and settings of operators do not count, unless they have the name
    of a tensor of the model. A constant that differs from its tensor is a finding.
    """

    constants: Count
    """Number of constants that an output depends on."""
    matched: dict[str, Count]
    """Number of constants by how they match: `as it is`, `reshaped`, `transposed`, `flipped`,
    `sliced`, `joined`, `packed` (recurrent operators), `folded` (with a BatchNorm), `computed` (by
    the model's forward, without its inputs), `rounded to float16`."""
    unmatched: Count
    """Number of constants without a tensor of the model."""
    unmatched_names: tuple[str, ...] = ()
    """The first names."""
    absent: Count
    """Number of float tensors of the model that no constant equals or is certainly derived from."""
    absent_names: tuple[str, ...] = ()


class GraphReport(Record):
    """The ONNX graph, read without running it."""

    nodes: Count
    initializers: Count
    operators: dict[str, Count]
    """Number of nodes by `domain::op_type` (`op_type` in the standard domain)."""
    external_data: dict[str, str] = Field(default_factory=dict)
    """Digests `sha256:<hex>` by file name."""
    findings: tuple[GraphFinding, ...] = ()
    weights: WeightsReport | None = added_field(None)
    """None: an older record."""
    last_operators: dict[str, tuple[str, ...]] = added_field({})
    """By output, the operators that compute its values; only operators that move, scale or sum
    values follow them. Without an entry (an older record): any operator."""
