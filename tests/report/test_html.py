from __future__ import annotations

import re
from html.parser import HTMLParser

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
    _, _, details = text.partition(f"All {len(decision.checks)} checks")
    assert len(re.findall(r"<tr><td>", details)) == len(decision.checks)
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
    text = page(decision, evidence, {})
    head, _, details = text.partition(f"All {len(decision.checks)} checks")
    assert "7 passed, the worst batch_1" in head
    assert "probe_zeros" not in head
    assert all(f"probe_{name}" in details for name in ("batch_7", "zeros", "size_9x9"))
    few = tuple(c for c in decision.checks if not c.name.startswith(("probe_", "graph_")))
    assert "<details>" not in page(decision.model_copy(update={"checks": few}), evidence, {})
