"""The report as one self-contained HTML page: the verdict and its cause on the first screen.

It asks nothing of the network, keeps nothing and works in a frame that allows scripts only, as
MLflow shows it. Every text is escaped by the template engine and goes through `printable`; a
content security policy lets nothing but our own script run, whatever stands in a name.
"""

from __future__ import annotations

import base64
import hashlib
import re
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from gate.records.runtime import RUNTIMES
from gate.report import facts, rows
from gate.report.charts import gallery
from gate.report.charts.drawing import Chart
from gate.report.charts.trend import trend_charts
from gate.report.report import Report
from gate.story.costs import COST_HEADINGS
from gate.story.wording import number, printable

if TYPE_CHECKING:
    from jinja2 import Environment

_JOINT = re.compile(r"([._/])(?=[A-Za-z])")
_RUNTIME = re.compile(rf"\b({'|'.join(sorted(RUNTIMES, key=len, reverse=True))})(?![\w-])")
_LINKED = ("https://", "http://")


def page(report: Report) -> str:
    """The whole page."""
    story, evidence, decision = report.story, report.evidence, report.decision
    script = _source("script.js")
    cause = gallery.of_cause(story, report.explanation)
    return (
        _templates()
        .get_template("page.html")
        .render(
            story=story,
            evidence=evidence,
            decision=decision,
            found=report.explanation.localisation,
            cause=cause,
            charts=_others(report.charts, cause),
            trend=trend_charts(story.change.trend),
            checks=rows.checks(story, decision),
            layers=rows.layers(report.explanation.localisation),
            samples=rows.worst_samples(evidence, report.pictures),
            cost_headings=COST_HEADINGS,
            facts=facts.of(evidence, decision),
            reproduce=facts.commands(evidence),
            style=_source("style.css"),
            script=script,
            script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )


def _others(charts: tuple[Chart, ...], cause: Chart | None) -> list[Chart]:
    """Those that show something else than the one on the first screen."""
    return [drawn for drawn in charts if cause is None or drawn.alternative != cause.alternative]


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("gate.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    made.filters |= {
        "row": rows.row_of,
        "lines": _lines,
        "beginning": _beginning,
        "breakable": _breakable,
        "number": number,
        "when": _when,
        "figure": _figure,
        "times": _times,
        "linked": _is_linked,
    }
    return made


def _source(name: str) -> Any:
    """A file of ours that stands in the page as it is."""
    from markupsafe import Markup

    environment = _templates()
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, name)[0])


def _shown(value: Any) -> Any:
    """What a place in a template shows: nothing for None, and texts without control characters."""
    if value is None:
        return ""
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _lines(command: str) -> Any:
    """A command of several lines, each of them printable. Words stay whole where they fit: a line
    must not end after the hyphens of an option."""
    from markupsafe import Markup

    word = Markup('<span class="word">{}</span>')
    lines = (printable(line).split(" ") for line in command.splitlines())
    return Markup("\n").join(Markup(" ").join(map(word.format, line)) for line in lines)


def _beginning(reason: str) -> str:
    """A reason without its details, which follow a colon, and without its full stop."""
    return reason.partition(": ")[0].rstrip(".")


def _breakable(text: str) -> Any:
    """A text whose long names, `layer3.0.conv1.weight`, may be broken between their parts; those of
    runtimes stay whole."""
    from markupsafe import Markup, escape

    jointed = _JOINT.sub(r"\1<wbr>", str(escape(printable(text))))
    return Markup(_RUNTIME.sub(r'<span class="name">\1</span>', jointed))


def _when(time: str) -> str:
    """An ISO time to the minute; what is none, as it is."""
    try:
        moment = datetime.fromisoformat(time)
    except ValueError:
        return time
    zone = "UTC" if moment.utcoffset() is not None and not moment.utcoffset() else moment.tzname()
    return f"{moment:%Y-%m-%d %H:%M} {zone or ''}".strip()


def _figure(drawn: Chart) -> Any:
    from markupsafe import Markup

    return Markup(drawn.svg)  # names in it are escaped by matplotlib


def _times(strain: float) -> str:
    """How much of a bound is used."""
    if strain < 0.01:
        return "< 0.01 ×"
    return f"{strain:.3g} ×" if strain >= 1.0 else f"{strain:.2g} ×"


def _is_linked(address: str) -> bool:
    """Whether an address is one that a browser may open from here."""
    return address.startswith(_LINKED)
