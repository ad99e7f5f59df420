from __future__ import annotations

import re
from html.parser import HTMLParser

from gate.checks import Verdict
from gate.report.html import page
from tests.report.samples import HOSTILE, failed, passed

PNG = b"\x89PNG\r\n\x1a\n"


class _Outline(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_needs_nothing_but_itself() -> None:
    outline = _Outline(page(*passed(), {"latency": PNG}))
    assert {"script", "link", "iframe"}.isdisjoint(outline.tags)
    assert outline.addresses == ["data:image/png;base64,iVBORw0KGgo="]


def test_the_page_shows_every_check_problem_remedy_and_waiver() -> None:
    decision, evidence = failed()
    text = page(decision, evidence, {})
    assert len(re.findall(r"<tr><td>", text)) == len(decision.checks)
    assert "max_abs_diff is 0.66, allowed &lt;= 0.0001" in text
    assert text.count("<b>Try:</b>") == len(decision.problems)
    assert text.count("policy asks for it only when present") == 1  # one reason, told once
    assert "torch-cuda, ort-cuda, ort-cuda-optimized</dt>" in text
    assert str(decision.evidence_sha256) in text


def test_hostile_names_stay_text() -> None:
    text = page(*failed(HOSTILE), {'"><script>': PNG})
    assert "script" not in _Outline(text).tags
    assert "\x1b" not in text


def test_it_follows_the_reader_and_paper() -> None:
    text = page(*passed(), {})
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_folded_checks_are_all_in_the_details() -> None:
    decision, evidence = passed()
    probes = tuple(
        decision.checks[-1].model_copy(
            update={"name": f"probe_{name}", "runtime": "ort-cpu", "verdict": Verdict.PASS}
        )
        for name in ("zeros", "ones")
    )
    more = decision.model_copy(update={"checks": (*decision.checks, *probes)})
    text = page(more, evidence, {})
    head, _, details = text.partition(f"All {len(more.checks)} checks")
    assert "2 passed, the worst" in head
    assert "probe_zeros" not in head
    assert all(f"probe_{name}" in details for name in ("zeros", "ones"))
    assert "<details>" not in page(decision, evidence, {})
