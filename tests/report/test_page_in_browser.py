"""The HTML report in Chromium: phone, laptop, keyboard, print, and MLflow's frame."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from gate import Evidence
from gate.report.html_page import render_page
from tests.browser import chromium
from tests.exhaustive import exhaustive
from tests.report import report_records

pytestmark = pytest.mark.slow
PHONE, LAPTOP = (390, 844), (1280, 800)
CASES = {
    "passed": report_records.passed,
    "rejected": report_records.rejected,
    "unjudged": report_records.unjudged,
    "everywhere": report_records.rejected_on_all_runtimes,
}
FIRST_ELEMENTS = ("verdict", "sentence", "name", "digest", "when", "where", "signed", "matrix",
         "chart-cause", "next", "step-0")  # fmt: skip
FRAME = """html => new Promise(done => {
  const frame = document.createElement("iframe");
  frame.sandbox = "allow-scripts";
  frame.width = frame.height = "100%";
  frame.onload = () => done();
  frame.src = URL.createObjectURL(new Blob([html], {type: "text/html"}));
  document.body.append(frame);
})"""
"""Embed the page as MLflow's artifact viewer does."""
OVERFLOWING = """() => {
  const edge = document.querySelector("main").getBoundingClientRect().right - 11;
  return Array.from(document.querySelectorAll("main *"))
    .filter(one => !one.closest(".scroll, .whole, .unseen, .worst, svg"))
    .filter(one => one.getBoundingClientRect().right > edge)
    .filter(one => !one.matches("main"))
    .map(one => one.outerHTML.slice(0, 120));
}"""
"""Find elements that extend into the right margin or beyond it."""


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def pages():
    return {name: render_page(case()) for name, case in CASES.items()}


def open_page(browser: Browser, html: str, size: tuple[int, int], scheme: str = "light") -> Page:
    page = browser.new_page(
        viewport={"width": size[0], "height": size[1]},
        color_scheme=scheme,  # type: ignore[arg-type]
    )
    page.on("pageerror", lambda error: pytest.fail(str(error)))
    page.set_content(html)
    return page


def unfold(page: Page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")


@pytest.mark.further
@pytest.mark.rows(4)
@pytest.mark.parametrize(("name", "size"), [
    ("everywhere", PHONE),
    ("everywhere", LAPTOP),
    ("unjudged", PHONE),
    ("passed", LAPTOP),
])  # fmt: skip
def test_verdict_is_on_the_first_screen(browser, pages, name, size):
    page = open_page(browser, pages[name], size)
    for ident in FIRST_ELEMENTS:
        box = page.locator(f"#{ident}").bounding_box()
        assert box is not None, ident
        assert box["width"] > 20, ident
        assert 0 <= box["x"] <= box["x"] + box["width"] <= size[0], ident
        assert 0 <= box["y"] <= box["y"] + box["height"] <= size[1], (ident, box)
    unfold(page)
    assert page.evaluate("document.scrollingElement.scrollWidth") <= size[0]
    beyond = page.evaluate(OVERFLOWING)
    assert beyond == []


@pytest.mark.further
@pytest.mark.parametrize(("name", "size", "scheme"), [
    ("rejected", PHONE, "light"),
    ("passed", LAPTOP, "dark"),
    pytest.param("unjudged", PHONE, "dark", marks=exhaustive),
])  # fmt: skip
def test_axe_finds_no_serious_violation(browser, pages, name, size, scheme):
    page = open_page(browser, pages[name], size, scheme)
    unfold(page)
    result = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    bad = [
        (item["id"], [node["html"][:200] for node in item["nodes"]][:3])
        for item in result
        if item["impact"] in ("serious", "critical")
    ]
    assert bad == []


CLIPPED = """() => Array.from(document.querySelectorAll("figure")).flatMap(figure => {
  const edge = figure.querySelector("svg").getBoundingClientRect();
  return Array.from(figure.querySelectorAll("svg text")).filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < edge.left - 1 || box.right > edge.right + 1
      || box.top < edge.top - 1 || box.bottom > edge.bottom + 1;
  }).map(text => `${figure.id}: ${text.textContent}`);
})"""


@pytest.mark.further
@pytest.mark.parametrize("size", [PHONE, (1440, 900)])
def test_chart_text_is_not_clipped(browser, size):
    case = report_records.rejected()
    one_class = json.loads(case.evidence.to_json())
    for runtime in one_class["runtimes"]:
        for output in runtime["outputs"]:
            confidence = output["classification"]["confidence"]
            confidence["per_class"] = confidence["per_class"][:1]
    observed = Evidence.from_json(json.dumps(one_class))
    for shown in (case, replace(case, evidence=observed)):
        page = open_page(browser, render_page(shown), size)
        assert page.locator("#chart-confidence").count() == 1
        assert page.evaluate(CLIPPED) == []


def test_tables_unfold_and_sort_by_keyboard(browser, pages):
    page = open_page(browser, pages["rejected"], LAPTOP)
    page.locator("#checks > details > summary").focus()
    page.keyboard.press("Enter")
    head = page.locator("#checks th").nth(4)
    head.locator("button").focus()
    strains = "Array.from(document.querySelectorAll('.cards tbody tr')).map(row => Number(row.cells[4].dataset.value))"
    for order, reverse in (("ascending", False), ("descending", True)):
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == order
        values = page.evaluate(strains)
        assert len(values) == len(report_records.rejected().decision.checks)
        assert values == sorted(values, reverse=reverse)
    page.keyboard.press("Tab")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_page_works_in_the_mlflow_frame(browser, pages):
    page = open_page(browser, "<!doctype html><body>", LAPTOP)
    page.evaluate(FRAME, pages["rejected"])
    frame = page.frames[1]
    frame.locator("#next .copy").click()
    copied = frame.locator("#copied")
    copied.wait_for()
    assert copied.text_content() in ("Copied", "Selected: copy it with Ctrl+C")
    selected = frame.evaluate("getSelection().toString()")
    assert selected == report_records.rejected().summary.steps[0].command
    frame.locator("#checks > details > summary").click()
    frame.locator("#checks th button").first.click()
    assert frame.locator("#checks th").first.get_attribute("aria-sort") == "ascending"


@pytest.mark.further
def test_malicious_names_run_no_script(browser):
    page = browser.new_page()
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text))
    page.set_content(render_page(report_records.hostile()))
    page.wait_for_load_state("networkidle")
    unfold(page)
    assert page.locator("script").count() == 1
    assert page.locator("img:not([src^='data:'])").count() == 0
    assert refused == []
