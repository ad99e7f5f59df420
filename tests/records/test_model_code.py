from __future__ import annotations

import pytest

from gate.records.evidence import ModelCode
from tests.builders import digest

CODE = ModelCode(
    files={"mine": digest("a"), "mine.models": digest("b")}, packages={"torch": "2.9.0"}
)


@pytest.mark.parametrize(
    ("update", "told"),
    [
        ({}, ()),
        ({"files": {"mine": digest("a"), "mine.models": digest("c")}}, ("mine.models",)),
        ({"files": {"mine": digest("a")}}, ("mine.models (gone)",)),
        (
            {"files": {**CODE.files, "mine.layers": digest("d")}},
            ("mine.layers (new)",),
        ),
        ({"packages": {"torch": "2.10.0"}}, ("torch 2.9.0 -> 2.10.0",)),
        ({"packages": {"torch": "2.9.0", "timm": "1.0"}}, ("timm none -> 1.0",)),
        ({"unread": {"fast": "it is compiled"}}, ("fast (new)",)),
    ],
)
def test_what_changed_is_named(update, told):
    now = CODE.model_copy(update=update)
    assert now.changes_since(CODE) == told
    assert (now.digest() == CODE.digest()) is (not told)


def test_the_order_of_files_is_no_change():
    turned = ModelCode(files=dict(reversed(CODE.files.items())), packages=CODE.packages)
    assert turned.changes_since(CODE) == ()
    assert turned.digest() == CODE.digest()
