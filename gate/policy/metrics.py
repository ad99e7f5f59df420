"""The section `metrics:`: metrics of the task, and how much they may drop."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, JsonValue, model_validator

from gate.policy.sections import Bound, PolicyRecord, Positive
from gate.storage.digest import Digest
from gate.storage.record import added_field

Aggregate = Literal["mean", "sum", "dataset"]


class BuiltinTraits(NamedTuple):
    """How a built-in metric is aggregated, which way is better, and which options it takes."""

    aggregate: Aggregate = "mean"
    higher_is_better: bool = True
    options: tuple[str, ...] = ()


BUILTIN: dict[str, BuiltinTraits] = {
    "accuracy": BuiltinTraits(options=("k",)),
    "auroc": BuiltinTraits("dataset", options=("positive",)),
    "cosine": BuiltinTraits(),
    "exact_match": BuiltinTraits(),
    "f1": BuiltinTraits("dataset", options=("average", "positive", "threshold")),
    "iou": BuiltinTraits("dataset", options=("ignore", "positive", "threshold")),
    "mae": BuiltinTraits(higher_is_better=False),
    "map": BuiltinTraits("dataset", options=("boxes", "classes", "scores", "thresholds")),
    "mse": BuiltinTraits(higher_is_better=False),
    "perplexity": BuiltinTraits("dataset", higher_is_better=False, options=("ignore",)),
    "psnr": BuiltinTraits(options=("data_range",)),
    "wer": BuiltinTraits("dataset", higher_is_better=False, options=("blank", "vocabulary")),
}
"""Metrics that `function` takes by name; `gate.metrics.builtin` computes them."""

_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.\-]*$"


class MetricPolicy(PolicyRecord):
    """A metric of the task, per sample or over the data set, and how much it may drop."""

    name: Annotated[str, Field(pattern=_NAME, max_length=64)]
    """Name in reports, in MLflow and in `gate history --metric`."""
    function: str
    """A built-in metric by name, or `package.module:function`: a function (outputs, labels) that
    returns one value per sample, or a torchmetrics.Metric (docs/task-metrics.md)."""
    options: dict[str, JsonValue] = added_field({})
    """Keyword arguments of the function."""
    output: str | None = None
    """The output that the function gets. None: the only one, or a dict of all outputs by name."""
    aggregate: Aggregate | None = None
    """`mean` or `sum` of a value per sample; `dataset`: one value of all samples. None: that of the
    built-in metric, else `mean`."""
    higher_is_better: bool | None = None
    """None: that of the built-in metric, else true."""
    max_drop: Bound | None = None
    """How much worse than the reference on the same samples. 0: the values themselves must not be
    worse. Above 0: the upper confidence bound of the drop must not be above it."""
    min: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Smallest allowed value, if higher is better."""
    max: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Largest allowed value, if lower is better."""
    max_drop_from_champion: Bound | None = None
    """As `max_drop`, against the champion. Needs the section `incumbent`."""
    slices: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Columns beside the samples. The drop is bounded for each value of each column, too, with
    Holm's correction over all of them."""
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95
    """Level of the one-sided confidence bounds."""
    time_limit_s: Positive = 60.0
    """Seconds that the metric may take for one batch."""
    memory_limit_mb: Positive = 8192.0
    """MB that the process of the metrics may use."""

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
            takes = ", ".join(builtin.options) or "none"
            raise ValueError(f"options: {self.function} has no {unknown[0]!r}; it takes: {takes}")
        if self.aggregate not in (None, builtin.aggregate):
            raise ValueError(
                f"aggregate is '{self.aggregate}', and {self.function} is always "
                f"'{builtin.aggregate}': leave aggregate out"
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
        wrong = "max" if self.is_higher_better else "min"
        if getattr(self, wrong) is not None:
            better, right = ("higher", "min") if wrong == "max" else ("lower", "max")
            raise ValueError(f"{wrong} is set, and {better} is better; set {right} instead")
        if len(set(self.slices)) < len(self.slices):
            raise ValueError(f"slices {list(self.slices)}: name each column once")
        return self

    @property
    def is_builtin(self) -> bool:
        """Return whether the gate computes it."""
        return self.function in BUILTIN

    @property
    def is_higher_better(self) -> bool:
        """Return the policy's setting, or else that of the built-in metric."""
        if self.higher_is_better is not None:
            return self.higher_is_better
        return BUILTIN[self.function].higher_is_better if self.is_builtin else True

    @property
    def aggregation(self) -> Aggregate:
        """Return the policy's aggregation, or else that of the built-in metric."""
        if self.aggregate is not None:
            return self.aggregate
        return BUILTIN[self.function].aggregate if self.is_builtin else "mean"

    def definition(self) -> Digest:
        """Digest of what decides the measured numbers: all but the bounds and limits.

        Evidence of another definition does not count.
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
    """Raise ValueError for two metrics of one name."""
    counts = Counter(metric.name for metric in metrics)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f"metrics: the name '{twice[0]}' is there twice. Give each its own")
