"""A review in MLflow's own pages promotes and deploys the version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser import chromium
from tests.end_to_end.stack import Stack, wait_for

pytestmark = pytest.mark.slow
SHOTS = Path(__file__).parents[2] / "build" / "screenshots"
"""Screenshots of the pages, to look at after the run."""
PAGE_MS = 60_000


@pytest.fixture
def page() -> Iterator[Page]:
    SHOTS.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        created = browser.new_page(viewport={"width": 1500, "height": 1400})
        created.set_default_timeout(PAGE_MS)
        yield created


def set_tag_in_ui(page: Page, name: str, value: str) -> None:
    """Set a tag in the web interface, as a reviewer does."""
    page.get_by_label("tag name").fill(name)
    page.get_by_label("tag value").fill(value)
    page.get_by_test_id("add-tag-button").click()
    expect(page.get_by_label("tag name")).to_have_value("", timeout=PAGE_MS)  # the tag was saved


def review_result(system: Stack, number: str) -> str:
    return system.registry.version(system.model, number).tags.get("gate.review_result", "")


@pytest.mark.proof
def test_approval_in_the_mlflow_ui_promotes_and_deploys(system: Stack, page: Page) -> None:
    number = system.promote_release(1).version
    assert number is not None
    version = f"{system.server.uri}/#/models/{system.model}/versions/{number}"
    page.goto(version)
    page.get_by_text("@ candidate").wait_for()
    page.get_by_text("Status: waits for review: set the tag gate.review to approved").wait_for()
    page.screenshot(path=SHOTS / "waiting.png")
    set_tag_in_ui(page, "gate.review", "yes")
    assert wait_for(lambda: "write approved or rejected" in review_result(system, number))
    set_tag_in_ui(page, "gate.review_comment", "sevens are <b>sevens</b>")
    row = page.locator("tr", has=page.get_by_text("gate.review", exact=True))
    row.get_by_test_id("editable-table-button-edit").click()
    row.get_by_test_id("editable-table-edited-input").fill("Approved ")
    row.get_by_test_id("editable-table-button-save").click()
    assert wait_for(lambda: system.deployed() == system.digest(number))
    assert system.champion() == number
    # The last entry is written after the deployment.
    result = [("passed", number), ("promoted", number), ("deployed", number)]
    assert wait_for(lambda: system.lines() == result), system.lines()
    live = system.store.live_link(system.model) / "exact/model.onnx"
    assert (
        live.read_bytes() == (system.folder / f"release-{system.model}-1/model.onnx").read_bytes()
    )

    assert review_result(system, number).startswith("approved: became champion at 20")
    promoted = system.entries()[1]
    assert promoted.comment == "sevens are <b>sevens</b>"
    assert "MLflow does not say who" in promoted.reason

    page.reload()
    page.get_by_text("@ champion").wait_for()
    page.get_by_text("Status: champion since 20").wait_for()
    page.get_by_text(
        'approved in review: "sevens are \u2039b\u203asevens\u2039/b\u203a"'
    ).wait_for()
    page.screenshot(path=SHOTS / "version.png")
    run = system.registry.version(system.model, number).run_id
    page.goto(f"{system.server.uri}/#/experiments/{_experiment(system, run)}/runs/{run}")
    page.get_by_text("Registered models").first.wait_for()
    page.screenshot(path=SHOTS / "run.png")


def _experiment(system: Stack, run: str | None) -> str:
    from mlflow import MlflowClient

    assert run is not None
    return str(MlflowClient(tracking_uri=system.server.uri).get_run(run).info.experiment_id)
