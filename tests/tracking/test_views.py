"""Views of the list of runs: written once, and read by MLflow's own pages in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from gate.errors import RegistryDenied
from gate.story.making import story_of
from gate.tracking.names import headline_tags, judged_name, status_of
from gate.tracking.runs import Runs
from gate.tracking.views import ALL, REJECTED, offer_views, view_address
from tests.browser import chromium
from tests.registry.servers import serving
from tests.report.samples import failed, passed

SENTENCE = "its weights are the model's rounded to float16"
TAG = f"mlflow.sharedViewState.{REJECTED}"


def test_a_view_that_somebody_changed_stays(uri: str) -> None:
    with Runs(uri).new("gate") as page:
        pass
    client = MlflowClient(uri)
    view = json.loads(client.get_experiment(page.experiment_id).tags[TAG])
    assert json.loads(view["state"])["searchFilter"] == view["searchFilter"]
    client.set_experiment_tag(page.experiment_id, TAG, "mine")
    Runs(uri)
    assert client.get_experiment(page.experiment_id).tags[TAG] == "mine"


def test_a_server_that_refuses_views_stops_nothing() -> None:
    class Refuses:
        def get_experiment(self, _: str) -> None:
            raise RegistryDenied("not you")

    offer_views(Refuses(), "http://x", experiment_id="1")  # type: ignore[arg-type]


@pytest.mark.proof
def test_the_pages_show_names_and_headlines_and_only_what_was_rejected(tmp_path: Path) -> None:
    with serving(tmp_path) as server, chromium() as browser:
        names = [_judged(server.uri, *records) for records in (passed(), failed())]
        page = browser.new_page(viewport={"width": 1500, "height": 900})
        page.set_default_timeout(60_000)
        for view, shown in ((REJECTED, names[1:]), (ALL, names)):
            page.goto("about:blank")
            page.goto(f"{server.uri}/{view_address('1', view)}")
            page.get_by_text(f"{len(shown)} matching run").wait_for()
            for name in shown:  # rows are drawn after the line that counts them
                page.get_by_text(name, exact=True).wait_for()
            for name in names:
                cell = page.get_by_text(name, exact=True)
                assert cell.count() == (name in shown), (view, name)
                # Not cut off, as the list does by itself.
                fits = "cell => cell.scrollWidth <= cell.clientWidth || !cell.clientWidth"
                assert name not in shown or cell.evaluate(fits)
            assert page.get_by_text(SENTENCE).count() == 1


def _judged(uri: str, decision, evidence) -> str:
    """A run with the name, the status and the tags of a judgement, and no more."""
    headline = story_of(decision, evidence).headline.model_copy(
        update={} if decision.passed else {"blamed": "layer3.0.conv1.weight", "sentence": SENTENCE}
    )
    name = judged_name(decision.verdict, decision.subject_sha256, headline)
    with Runs(uri).new("gate") as page:
        page.tags(headline_tags(headline))
        page.named(name)
        page.ends = status_of(decision.verdict)
    return name
