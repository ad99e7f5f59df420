"""Fixtures: a small network and a correct export of it, created once per test module."""

import pytest

from tests.measure import tiny


@pytest.fixture(scope="module")
def model():
    return tiny.net()


@pytest.fixture(scope="module")
def good(model, tmp_path_factory):
    return tiny.export(model, tmp_path_factory.mktemp("good") / "model.onnx")
