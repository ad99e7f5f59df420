"""What a verdict is for is told by one address, and read back from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.signing.subjects import file_resource, registered, resource_uri
from tests import builders


@given(st.text(min_size=1).filter(lambda name: name.isprintable()))
def test_a_name_comes_back_whatever_is_in_it(name: str) -> None:
    registry = "https://mlflow.example.org/x#/models/y"
    assert registered(resource_uri(registry, name)) == (registry, name)


def test_no_name_makes_it_anothers() -> None:
    one = resource_uri("https://a", "b#/models/c")
    assert registered(one) == ("https://a", "b#/models/c")
    assert one != resource_uri("https://a#/models/b", "c")


@pytest.mark.parametrize("resource", ["", "urn:sha256:0", "https://mlflow.example.org"])
def test_what_is_no_registered_model(resource: str) -> None:
    assert registered(resource) is None


def test_a_file_is_named_by_its_digest() -> None:
    digest = builders.digest("model")
    assert file_resource(digest) == f"urn:sha256:{digest.hex}"
    assert registered(file_resource(digest)) is None
