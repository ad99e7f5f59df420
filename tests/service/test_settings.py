from __future__ import annotations

from typing import Any

import pytest

from gate.errors import ServiceError
from gate.service.settings import ServiceSettings

VALID_OPTIONS: dict[str, Any] = {"models": ["digits"], "tracking_uri": "http://127.0.0.1:5000"}


def test_default_workspace_prefix_is_removed_from_model_names() -> None:
    models = ("default:digits", "digits", "team-a:digits", "team-a:digits", "team-b:digits")
    settings = ServiceSettings.from_options(models=models, tracking_uri="http://127.0.0.1:5000")
    assert settings.models == ("digits", "team-a:digits", "team-b:digits")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"models": []}, "models: .*at least 1"),
        ({"models": [""]}, "models.0"),
        ({"models": ["x" * 257]}, "models.0"),
        ({"models": ["example_model"]}, "test deliveries"),
        ({"models": ["a/b"]}, "models: 'a/b' can't be the name of a registered model"),
        ({"models": ["digits", "two words"]}, "models: 'two words' can't be the name"),
        ({"models": ["x" * 101]}, "at most 100"),
        ({"models": [".."]}, "a letter or digit first"),
        ({"tracking_uri": ""}, "tracking_uri"),
        ({"port": 65_536}, "port"),
        ({"port": "many"}, "port"),
        ({"body_cap": 0}, "body_cap"),
        ({"body_timeout_s": 0}, "body_timeout_s"),
        ({"window_s": 0}, "window_s"),
        ({"window_s": float("inf")}, "window_s"),
        ({"window_s": 7200}, "window_s"),
        ({"interval_s": 0}, "interval_s"),
        ({"state": "mysql://x"}, "state: the state is sqlite:///FILE"),
        ({"state": "/tmp"}, "state: the state is sqlite:///FILE"),
        ({"state": "sqlite:///:memory:"}, "in memory"),
        ({"log_format": "xml"}, "log_format"),
        ({"nonsense": 1}, "nonsense: Extra"),
    ],
)
def test_invalid_setting_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ServiceError, match=message):
        ServiceSettings.from_options(**VALID_OPTIONS | given)


def test_each_invalid_field_has_a_line_without_passwords() -> None:
    with pytest.raises(ServiceError) as caught:
        ServiceSettings.from_options(
            models=[], tracking_uri="", port=-1, state="mysql://gate:hunter2@db/x"
        )
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert "hunter2" not in str(caught.value)
