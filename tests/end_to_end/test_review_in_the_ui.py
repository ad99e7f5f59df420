"""A reviewer in MLflow's own pages: a click, and the file is deployed long before the next look."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser import chromium
from tests.end_to_end.stack import Stack, until
from tests.exhaustive import exhaustive

pytestmark = pytest.mark.slow
SHOTS = Path(__file__).parents[2] / "build" / "screenshots"
"""What people see, for a look after the run."""
PAGE_MS = 60_000


@pytest.fixture
def page() -> Iterator[Page]:
    SHOTS.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        made = browser.new_page(viewport={"width": 1500, "height": 1400})
        made.set_default_timeout(PAGE_MS)
        yield made


def tag(page: Page, name: str, value: str) -> None:
    """As a reviewer does it on the version's page."""
    page.get_by_label("tag name").fill(name)
    page.get_by_label("tag value").fill(value)
    page.get_by_test_id("add-tag-button").click()
    expect(page.get_by_label("tag name")).to_have_value("", timeout=PAGE_MS)  # it was saved


def answer(whole: Stack, number: str) -> str:
    return whole.registry.version(whole.model, number).tags.get("gate.review_result", "")


@pytest.mark.proof
def test_a_click_promotes_and_deploys(whole: Stack, page: Page) -> None:
    number = whole.hand_in(1).version
    assert number is not None
    version = f"{whole.server.uri}/#/models/{whole.model}/versions/{number}"
    page.goto(version)
    page.get_by_text("@ candidate").wait_for()
    page.get_by_text("Status: waits for review: set the tag gate.review to approved").wait_for()
    page.screenshot(path=SHOTS / "waiting.png")
    tag(page, "gate.review", "yes")
    assert until(lambda: "write approved or rejected" in answer(whole, number))
    tag(page, "gate.review_comment", "sevens are <b>sevens</b>")
    row = page.locator("tr", has=page.get_by_text("gate.review", exact=True))
    row.get_by_test_id("editable-table-button-edit").click()
    row.get_by_test_id("editable-table-edited-input").fill("Approved ")
    row.get_by_test_id("editable-table-button-save").click()
    assert until(lambda: whole.deployed() == whole.digest(number))
    assert whole.serves() == number
    # The last is written after it serves.
    done = [("passed", number), ("promoted", number), ("deployed", number)]
    assert until(lambda: whole.lines() == done), whole.lines()
    live = whole.store.live_link(whole.model) / "exact/model.onnx"
    assert live.read_bytes() == (whole.folder / f"release-{whole.model}-1/model.onnx").read_bytes()

    assert answer(whole, number).startswith("approved: became champion at 20")
    promoted = whole.entries()[1]
    assert promoted.comment == "sevens are <b>sevens</b>"
    assert "MLflow does not say who" in promoted.reason

    page.reload()
    page.get_by_text("@ champion").wait_for()
    page.get_by_text("Status: champion since 20").wait_for()
    page.get_by_text(
        'approved in review: "sevens are \u2039b\u203asevens\u2039/b\u203a"'
    ).wait_for()
    page.screenshot(path=SHOTS / "version.png")
    run = whole.registry.version(whole.model, number).run_id
    page.goto(f"{whole.server.uri}/#/experiments/{_experiment(whole, run)}/runs/{run}")
    page.get_by_text("Registered models").first.wait_for()
    page.screenshot(path=SHOTS / "run.png")


@exhaustive
@pytest.mark.proof
def test_a_rejection_in_the_pages_is_final(whole: Stack, page: Page) -> None:
    number = whole.hand_in(1).version
    assert number is not None
    page.goto(f"{whole.server.uri}/#/models/{whole.model}/versions/{number}")
    tag(page, "gate.review_comment", "too dark")
    tag(page, "gate.review", "REJECTED")
    assert until(lambda: ("rejected", number) in whole.lines())
    assert until(lambda: answer(whole, number).startswith("rejected at 20"))
    assert until(lambda: whole.waits() is None)
    page.reload()
    page.get_by_text('because "too dark"').wait_for()
    page.get_by_text("REJECTED by review").first.wait_for()
    page.screenshot(path=SHOTS / "rejected.png")
    whole.point(number)
    assert until(lambda: ("reverted", None) in whole.lines())
    assert whole.deployed() is None


def _experiment(whole: Stack, run: str | None) -> str:
    from mlflow import MlflowClient

    assert run is not None
    return str(MlflowClient(tracking_uri=whole.server.uri).get_run(run).info.experiment_id)
