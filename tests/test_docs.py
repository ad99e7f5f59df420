"""The pages of docs/ name what the code has, and all of it."""

import re
from pathlib import Path

import pytest

from gate.policy.policy import Bounds

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def first_cells(page: str) -> list[str]:
    """The first cell of each row of the page's tables."""
    return re.findall(r"^\| ([^|]+) \|", (DOCS / page).read_text(), re.MULTILINE)


def test_every_bound_has_a_row_in_the_metrics() -> None:
    rows = first_cells("metrics.md")
    assert [name for name in Bounds.model_fields if rows.count(f"`{name}`") != 1] == []


def test_the_glossary_has_one_line_a_word() -> None:
    words = [word for word in first_cells("glossary.md") if word != "word"]
    assert len(words) == len(set(words))


@pytest.mark.parametrize("page", ["metrics.md", "glossary.md"])
def test_the_links_of_a_page_lead_somewhere(page: str) -> None:
    assert f"docs/{page}" in (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)#]+)\)", (DOCS / page).read_text())
    assert [link for link in links if not (DOCS / link).exists()] == []
