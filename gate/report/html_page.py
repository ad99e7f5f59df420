"""The HTML page and its selection of charts."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from gate.decision.check_result import Verdict
from gate.decision.decide import Decision
from gate.records.evidence import Evidence, fields_of
from gate.records.localization import Explanation, LayerRow, Localization
from gate.records.outputs import OutputParity
from gate.records.preprocessing import PreprocessingParity
from gate.records.runtime import RUNTIMES
from gate.report.chart import Chart
from gate.report.error_charts import bound_usage_chart, confidence_chart, differences_chart
from gate.report.model_charts import depth_chart, metric_charts
from gate.storage.safe_text import make_printable
from gate.summary.render import (
    CONSUMER_HEADINGS,
    LAYER_HEADINGS,
    allowed,
    beginning,
    consumer_cells,
    count,
    format_bound_usage,
    format_number,
    layer_cells,
    nan_as_infinite,
    observed,
    outputs_of,
    render_check,
)
from gate.summary.summary import COST_HEADINGS, TREND_HEADINGS, CheckRow, Summary

if TYPE_CHECKING:
    from jinja2 import Environment


_CAUSE_ROWS, _CAUSE_HEIGHT = 5, 195
"""Most rows of the first chart, which has to fit on the first screen of a phone."""


def evidence_charts(evidence: Evidence, decision: Decision | None = None) -> tuple[Chart, ...]:
    """Return the charts that have data, with bounds if there is a decision."""
    charts = (differences_chart(evidence, decision), confidence_chart(evidence))
    return (*metric_charts(evidence, decision), *filter(None, charts))


def cause_chart(summary: Summary, explanation: Explanation) -> Chart | None:
    """Return the one chart that shows the cause.

    If a layer is at fault, the errors along the depth; else the numbers of the first finding with
    their bounds; else all judged numbers. None if nothing can be drawn.
    """
    localization = explanation.localisation
    if localization is not None and localization.first_divergence is not None:
        depth = depth_chart(localization, name="cause", height=_CAUSE_HEIGHT)
        if depth is not None:
            return depth
    judged = [row for row in summary.check_rows if row.check.verdict is not Verdict.WAIVED]
    blamed = {check for finding in summary.findings[:1] for check in finding.checks}
    failed = [row for row in judged if row.check in blamed]
    measured = [row for row in judged if row.check.runtime is not None]
    several = summary.has_several_outputs
    return bound_usage_chart(
        failed, name="cause", limit=_CAUSE_ROWS, several_outputs=several
    ) or bound_usage_chart(measured, name="cause", limit=_CAUSE_ROWS, several_outputs=several)


@dataclass(frozen=True)
class Report:
    """The summary, its records and the other content of a page."""

    summary: Summary
    evidence: Evidence
    decision: Decision
    explanation: Explanation = field(default_factory=Explanation)
    pictures: Mapping[int, bytes] = field(default_factory=dict)
    """PNG bytes of samples by index."""

    @cached_property
    def charts(self) -> tuple[Chart, ...]:
        """The charts of the evidence that have data."""
        summary, layers = self.summary, self.explanation.localisation
        charts = (
            bound_usage_chart(summary.check_rows, several_outputs=summary.has_several_outputs),
            depth_chart(layers) if layers else None,
        )
        return (*filter(None, charts), *evidence_charts(self.evidence, self.decision))


MAX_CHECKS, MAX_LAYERS = 1000, 400
"""A page of more is too large to open; the records have all."""

MAX_PICTURE_BYTES = 100_000
"""Largest thumbnail in bytes."""

_PNG = b"\x89PNG\r\n\x1a\n"

_ORDER = (Verdict.FAIL, Verdict.ERROR, Verdict.WAIVED, Verdict.PASS)


def _by_verdict(row: CheckRow) -> tuple[int, float]:
    """Return a sort key: failures first, then by the used share of the bound."""
    return _ORDER.index(row.check.verdict), -nan_as_infinite(row.bound_usage)


def _shown_layers(localization: Localization | None) -> tuple[LayerRow, ...]:
    """Return the layers of the table: all, or only the wrong ones if there are too many."""
    layers = () if localization is None else localization.layers
    if len(layers) > MAX_LAYERS:
        layers = tuple(row for row in layers if row.verdict not in ("ok", "unmapped"))
    return layers[:MAX_LAYERS]


def _consumers(parity: PreprocessingParity | None) -> list[tuple[str, ...]]:
    """Return the cells of the table of preprocessing consumers."""
    rows = []
    for consumer in () if parity is None else parity.consumers:
        causes = "; ".join((*consumer.mismatched[:1], *consumer.causes))
        why = consumer.not_measured or consumer.failure or causes
        rows.append(consumer_cells(consumer, why))
    return rows


def _worst_output(evidence: Evidence) -> tuple[str, OutputParity] | None:
    """Return the runtime and output with the largest error whose worst samples were recorded."""
    recorded = [each for each in outputs_of(evidence) if each[1].worst]
    return max(recorded, key=lambda each: nan_as_infinite(each[1].max_abs_diff), default=None)


def _data_url(picture: bytes | None) -> str | None:
    """Return the data URL of a picture, or None if it is missing, not a PNG, or too large."""
    if picture is None or not picture.startswith(_PNG) or len(picture) > MAX_PICTURE_BYTES:
        return None
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


# The page sends no requests, stores nothing and works in a frame that allows scripts only, as in
# MLflow. The template engine escapes every text, `make_printable` removes control characters, and a
# content security policy allows only the page's script.


_JOINT = re.compile(r"([._/])(?=[A-Za-z])")

_RUNTIME = re.compile(rf"\b({'|'.join(sorted(RUNTIMES, key=len, reverse=True))})(?![\w-])")


def render_page(report: Report) -> str:
    """Return the whole page."""
    summary, localization = report.summary, report.explanation.localisation
    script = _source("script.js")
    cause = cause_chart(summary, report.explanation)
    shown = None if cause is None else cause.alternative
    return (
        _templates()
        .get_template("page.html")
        .render(
            summary=summary,
            evidence=report.evidence,
            decision=report.decision,
            localization=localization,
            cause=cause,
            charts=[chart for chart in report.charts if chart.alternative != shown],
            checks=sorted(summary.check_rows, key=_by_verdict),
            layers=[layer_cells(row, detail=row.detail) for row in _shown_layers(localization)],
            layer_headings=LAYER_HEADINGS,
            consumers=_consumers(report.evidence.preprocessing),
            consumer_headings=CONSUMER_HEADINGS,
            worst=_worst_output(report.evidence),
            pictures=report.pictures,
            cost_headings=COST_HEADINGS,
            trend_headings=TREND_HEADINGS,
            fields=fields_of(report.evidence.environment),
            style=_source("style.css"),
            script=script,
            script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )


def render_screen(report: Report) -> str:
    """Return the first screen of the page as an element for a notebook or another page: a frame
    without files and scripts that follows the light or dark color scheme."""
    cause = cause_chart(report.summary, report.explanation)
    return _frame(summary=report.summary, decision=report.decision, cause=cause)


def render_depth(layers: Localization) -> str | None:
    """Return the errors along the depth as such an element, or None without compared layers."""
    chart = depth_chart(layers)
    return None if chart is None else _frame(summary=None, decision=None, cause=chart)


def _frame(**values: Any) -> str:
    page = _templates().get_template("screen.html").render(style=_source("style.css"), **values)
    return str(
        Markup(
            '<iframe title="parity report" sandbox srcdoc="{}" style="width: 100%; height: 30rem; '
            'border: 0; resize: vertical"></iframe>'
        ).format(page)
    )


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("gate.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {
        "observed": observed,
        "allowed": allowed,
        # as the page's script compares shares of bounds
        "sort_key": lambda used: "-1" if used is None else repr(min(nan_as_infinite(used), 1e300)),
        "text": render_check,
        "counted": count,
        "lines": _lines,
        "beginning": lambda reason: beginning(reason).rstrip("."),
        "breakable": _breakable,
        "number": format_number,
        "when": _when,
        "figure": lambda chart: Markup(chart.svg),  # names in it are escaped by matplotlib
        "data_url": _data_url,
        "times": _times,
        "usage": format_bound_usage,
        "setting": lambda value: {"None": "none", "True": "on", "False": "off"}.get(
            str(value), value
        ),
        "linked": lambda address: address.startswith(("https://", "http://")),
    }
    return environment


def _source(name: str) -> Any:
    """Return a file of the templates as markup that is embedded in the page."""
    environment = _templates()
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, name)[0])


def _shown(value: Any) -> Any:
    """Return the printed value: empty for None, text without control characters."""
    if value is None:
        return ""
    return (
        make_printable(value)
        if isinstance(value, str) and not hasattr(value, "__html__")
        else value
    )


def _lines(command: str) -> Any:
    """Return a command of several printable lines. A line must not break after the hyphens of an
    option, so words stay whole if they fit."""
    word = Markup('<span class="word">{}</span>')
    lines = (make_printable(line).split(" ") for line in command.splitlines())
    return Markup("\n").join(Markup(" ").join(map(word.format, line)) for line in lines)


def _breakable(text: str) -> Any:
    """Return a text in which long names, `layer3.0.conv1.weight`, may break between their parts.
    Names of runtimes stay whole."""
    jointed = _JOINT.sub(r"\1<wbr>", str(escape(make_printable(text))))
    return Markup(_RUNTIME.sub(r'<span class="name">\1</span>', jointed))


def _when(time: str) -> str:
    """Return an ISO time to the minute, and any other text unchanged."""
    try:
        moment = datetime.fromisoformat(time)
    except ValueError:
        return time
    zone = "UTC" if moment.utcoffset() is not None and not moment.utcoffset() else moment.tzname()
    return f"{moment:%Y-%m-%d %H:%M} {zone or ''}".strip()


def _times(usage: float) -> str:
    """Return the used share of a bound as text, empty for a bound that allows no difference."""
    if not math.isfinite(usage):
        return ""
    if usage < 0.01:
        return "< 0.01 ×"
    if usage >= 1e4:
        return f"{usage:.1e} ×".replace("e+0", "e").replace("e+", "e")
    return f"{usage:.3g} ×" if usage >= 1.0 else f"{usage:.2g} ×"
