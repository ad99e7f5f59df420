"""Names are joined in a sentence."""

from __future__ import annotations

import pytest

from gate.records.localization import join_names


@pytest.mark.parametrize(
    ("names", "most", "text"),
    [
        ("", None, ""),
        ("", 2, ""),
        ("a", None, "a"),
        ("ab", None, "a and b"),
        ("abc", None, "a, b and c"),
        ("abc", 3, "a, b and c"),
        ("abc", 2, "a, b and 1 more"),
        ("abcd", 1, "a and 3 more"),
    ],
)
def test_names_as_a_sentence_has_them(names: str, most: int | None, text: str) -> None:
    assert join_names(list(names), limit=most) == text
