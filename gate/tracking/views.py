"""Views of the list of runs in MLflow's menu 'Views': names wide enough to be read, and the
headline, which the list does not show by itself.

MLflow keeps such a view in a tag of the experiment. A version that reads it otherwise shows its own
list.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING

from gate.errors import GateError
from gate.tracking.calling import calling

if TYPE_CHECKING:
    from mlflow import MlflowClient

ALL, REJECTED = "gate-judged", "gate-rejected"
_TAG = "mlflow.sharedViewState."
_QUERIES = {
    ALL: ("Judged files", ""),
    REJECTED: ("Rejected files", "tags.`gate.verdict` = 'FAIL'"),
}
_WIDTHS = {
    "attributes.`Run Name`": 320,
    "attributes.`Created`": 150,
    "tags.`gate.headline`": 640,
    "tags.`gate.promotion`": 120,
    "tags.`gate.model_version`": 160,
}
_CHOSEN = [name for name in _WIDTHS if name.startswith("tags.")]


def offer_views(client: MlflowClient, uri: str, *, experiment_id: str) -> None:
    """Put the views into the experiment's menu, if they are not there. What the server refuses, or
    can't do now, is left."""
    with suppress(GateError), calling(uri, "offer views of the runs"):
        there = client.get_experiment(experiment_id).tags
        for key in _QUERIES:
            if f"{_TAG}{key}" not in there:
                client.set_experiment_tag(experiment_id, f"{_TAG}{key}", _view(key))


def view_address(experiment_id: str, view: str) -> str:
    """The page of a view within MLflow's user interface."""
    return f"#/experiments/{experiment_id}/runs?viewStateShareKey={view}"


def _view(key: str) -> str:
    name, query = _QUERIES[key]
    state = {
        "searchFilter": query,
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "selectedColumns": _CHOSEN,
        "columnOrder": list(_WIDTHS),
        "columnWidths": _WIDTHS,
    }
    # Older versions read the state itself, newer ones what is in `state`; times are of no moment.
    envelope = {"name": name, "createdAt": 0, "updatedAt": 0, "state": json.dumps(state)}
    return json.dumps(state | envelope)
