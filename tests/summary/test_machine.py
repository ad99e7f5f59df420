"""Where two machines differ."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.records.evidence import Environment, differences
from gate.summary.champion_changes import machines_sentence
from tests.builders import evidence

AMD = {"cpu": "AMD EPYC 9R14", "cpu_flags": ("avx2", "avx512f"), "cores": 8,
       "os": "Debian 13", "kernel": "Linux 6.12 x86_64"}  # fmt: skip
INTEL = AMD | {"cpu": "Intel Xeon", "cpu_flags": ("amx_int8", "avx2")}


def environment(**fields: Any) -> Environment:
    return evidence().environment.model_copy(update=fields)


def test_only_what_differs_is_said() -> None:
    assert machines_sentence(environment(**INTEL), environment(**AMD), other="champion") == (
        "measured on: AMD EPYC 9R14, avx512f, no amx_int8 | "
        "champion: Intel Xeon, amx_int8, no avx512f"
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({}, {}, None),
        # What a record of before does not have is no difference.
        ({"cpu_flags": None, "os": None, "kernel": None, "cores": None}, {}, None),
        ({"cores": 2}, {}, "measured on: cores 8 | before: cores 2"),
        ({"gpu": "H200"}, {}, "measured on: GPU none | before: GPU H200"),
        ({"cpu_flags": ()}, {}, "measured on: avx2, avx512f | before: no avx2, avx512f"),
        ({"versions": {"torch": "2.14"}}, {}, None),
    ],
)
def test_each_field_by_its_words(old: Any, new: Any, expected: str | None) -> None:
    one, other = environment(**AMD | old), environment(**AMD | new)
    assert machines_sentence(one, other, other="before") == expected


def test_a_library_that_only_one_has_is_a_difference() -> None:
    one = environment(versions={"torch": "2.14", "torchvision": "0.29"})
    found = tuple(differences(one, environment(versions={"torch": "2.15"})))
    assert {each.name: (each.before, each.now) for each in found} == {
        "version of torch": ("2.14", "2.15"),
        "version of torchvision": ("0.29", "none"),
    }


FLAGS = st.sets(st.sampled_from(["avx2", "avx512f", "amx_tile", "sve"])).map(
    lambda flags: tuple(sorted(flags))
)


@given(FLAGS, FLAGS)
def test_nothing_differs_from_itself_and_differences_are_seen_from_both_sides(
    one: tuple[str, ...], other: tuple[str, ...]
) -> None:
    old, new = environment(cpu_flags=one), environment(cpu_flags=other)
    assert not list(differences(old, old))
    there, back = list(differences(old, new)), list(differences(new, old))
    assert [(d.before, d.now) for d in there] == [(d.now, d.before) for d in back]
    assert bool(there) == (one != other)
