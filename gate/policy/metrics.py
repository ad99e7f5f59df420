"""The policy section `metrics:`: task metrics, and how much they may drop."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, JsonValue, model_validator

from gate.policy.sections import Bound, PolicyRecord, Positive
from gate.storage.digest import Digest
from gate.storage.record import added_field

Aggregate = Literal["mean", "sum", "dataset"]


class BuiltinTraits(NamedTuple):
    """Aggregation, direction and options of a built-in metric."""

    aggregate: Aggregate = "mean"
    higher_is_better: bool = True
    options: tuple[str, ...] = ()


_DETECTIONS = ("boxes", "scores", "classes")
"""Options of `map`, and the names of the outputs that it reads by default."""

BUILTIN: dict[str, BuiltinTraits] = {
    "accuracy": BuiltinTraits(options=("k",)),
    "auroc": BuiltinTraits("dataset", options=("positive",)),
    "cosine": BuiltinTraits(),
    "exact_match": BuiltinTraits(),
    "f1": BuiltinTraits("dataset", options=("average", "positive", "threshold")),
    "iou": BuiltinTraits("dataset", options=("ignore", "positive", "threshold")),
    "mae": BuiltinTraits(higher_is_better=False),
    "map": BuiltinTraits("dataset", options=(*_DETECTIONS, "thresholds")),
    "mse": BuiltinTraits(higher_is_better=False),
    "perplexity": BuiltinTraits("dataset", higher_is_better=False, options=("ignore",)),
    "psnr": BuiltinTraits(options=("data_range",)),
    "wer": BuiltinTraits("dataset", higher_is_better=False, options=("blank", "vocabulary")),
}
"""The metrics that `function` accepts by name; `gate.metrics.builtin` computes them."""

_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.\-]*$"


class MetricPolicy(PolicyRecord):
    """A task metric, per sample or over the data set, and how much it may drop."""

    name: Annotated[str, Field(pattern=_NAME, max_length=64)]
    """Name in reports, in MLflow and in `gate history --metric`."""
    function: str
    """Name of a built-in metric, or `package.module:function`: a function (outputs, labels) that
    returns one value per sample, or a torchmetrics.Metric (docs/task-metrics.md)."""
    options: dict[str, JsonValue] = added_field({})
    """Keyword arguments of the function."""
    output: str | None = None
    """The output passed to the function. None: the only output, or a dict of all outputs by
    name."""
    aggregate: Aggregate | None = None
    """`mean` or `sum` of one value per sample; `dataset`: one value for all samples. None: that of
    the built-in metric, or `mean`. Required for a torchmetrics.Metric."""
    higher_is_better: bool | None = None
    """Whether a larger value is better. None: as for the built-in metric, or true."""
    max_drop: Bound | None = None
    """How much worse than the reference the file may be on the same samples. 0: the value itself
    must not be worse. Above 0: the upper confidence bound of the drop must not exceed it."""
    min: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Smallest allowed value, if higher is better."""
    max: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Largest allowed value, if lower is better."""
    max_drop_from_champion: Bound | None = None
    """Like `max_drop`, relative to the champion. Needs the section `incumbent`."""
    slices: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of columns in the samples. The drop is also bounded for each value of each column, with
    Holm's correction over all of them."""
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95
    """Level of the one-sided confidence bounds."""
    time_limit_s: Positive = 60.0
    """Time limit for one batch, in seconds."""
    memory_limit_mb: Positive = 8192.0
    """Memory limit of the metrics process, in MB."""

    @model_validator(mode="after")
    def _is_computable(self) -> Self:
        builtin = BUILTIN.get(self.function)
        if builtin is None and not _FUNCTION.fullmatch(self.function):
            raise ValueError(
                f"function is {self.function!r}: expected package.module:function, or one of "
                f"{', '.join(BUILTIN)}"
            )
        if builtin is None:
            return self
        unknown = sorted(set(self.options) - set(builtin.options))
        if unknown:
            options = ", ".join(builtin.options) or "none"
            raise ValueError(
                f"options: {self.function} has no option {unknown[0]!r}. Its options: {options}"
            )
        if self.aggregate not in (None, builtin.aggregate):
            raise ValueError(
                f"aggregate is '{self.aggregate}', but {self.function} always uses "
                f"'{builtin.aggregate}'; leave aggregate out"
            )
        if self.higher_is_better not in (None, builtin.higher_is_better):
            better = "higher" if builtin.higher_is_better else "lower"
            raise ValueError(f"{self.function} is better when {better}: leave higher_is_better out")
        return self

    @model_validator(mode="after")
    def _is_bounded(self) -> Self:
        bounds = (self.max_drop, self.min, self.max, self.max_drop_from_champion)
        if bounds == (None,) * 4:
            raise ValueError(
                "no bound is set, so everything would pass; set max_drop, min, max or "
                "max_drop_from_champion"
            )
        excluded = "max" if self.is_higher_better else "min"
        if getattr(self, excluded) is not None:
            better, expected = ("higher", "min") if excluded == "max" else ("lower", "max")
            is_assumed = not self.is_builtin and self.higher_is_better is None
            raise ValueError(
                f"{excluded} is set, but {better} is better; set {expected} instead"
                + (", or higher_is_better: false" if is_assumed else "")
            )
        if len(set(self.slices)) < len(self.slices):
            raise ValueError(f"slices {list(self.slices)}: name each column once")
        return self

    @property
    def is_builtin(self) -> bool:
        """Whether the metric is built into the gate."""
        return self.function in BUILTIN

    @property
    def is_higher_better(self) -> bool:
        """The policy's setting, or that of the built-in metric."""
        if self.higher_is_better is not None:
            return self.higher_is_better
        return BUILTIN[self.function].higher_is_better if self.is_builtin else True

    @property
    def aggregation(self) -> Aggregate:
        """The policy's aggregation, or that of the built-in metric."""
        if self.aggregate is not None:
            return self.aggregate
        return BUILTIN[self.function].aggregate if self.is_builtin else "mean"

    def judges(self, output: str, *, of: Collection[str]) -> bool:
        """Return whether the metric bounds a file by this output, one of the outputs `of`."""
        if (self.max_drop, self.min, self.max) == (None,) * 3:  # bounded by the champion only
            return False
        if self.function == "map":
            return output in {self.options.get(name, name) for name in _DETECTIONS}
        if self.output is not None:
            return output == self.output
        return not self.is_builtin or len(of) == 1

    def definition(self) -> Digest:
        """Return the digest of everything that determines the measured values.

        Bounds and limits are excluded. Evidence with another definition does not count.
        """
        return Digest.from_json(
            {
                "function": self.function,
                "options": self.options,
                "output": self.output,
                "aggregate": self.aggregation,
                "higher_is_better": self.is_higher_better,
                "slices": list(self.slices),
                "confidence": self.confidence,
            }
        )


def check_metrics(metrics: Sequence[MetricPolicy]) -> None:
    """Raise ValueError if two metrics have the same name."""
    counts = Counter(metric.name for metric in metrics)
    duplicates = [name for name, count in counts.items() if count > 1]
    if duplicates:
        raise ValueError(f"metrics: the name '{duplicates[0]}' is used twice; use each name once")
