"""What a runtime says in a process of its own, on its way to the other side."""

from __future__ import annotations

import json

import pytest

from gate.runtimes.isolated_worker import _Worker
from tests.measure import tiny


def spoken(name, path, subject):
    """Time to open, time to run, and the proof, as JSON has them."""
    worker = _Worker(f"tests.runtimes.acme:{name}")
    header = {"path": str(path), "subject": subject.to_plain(), "options": {}, "conditions": {}}
    opened, _ = worker.answer({"verb": "open", **header}, {})
    ran, _ = worker.answer({"verb": "run"}, {"input": tiny.images(1)})
    proof, _ = worker.answer({"verb": "proof"}, {})
    return json.loads(json.dumps([opened, ran, proof]))


def test_its_own_process_is_measured_where_it_says_nothing(good):
    opened, ran, proof = spoken("Acme", good.path, good.subject)
    assert opened["seconds"] > 0
    assert ran["seconds"] > 0
    assert 0 <= proof["memory_bytes"] < proof["peak_bytes"]
    assert proof["own_process"] is True


@pytest.mark.parametrize(
    ("name", "memory"), [("Boasts", 15), ("Babbles", None), ("ElsewhereAgain", None)]
)
def test_what_it_says_is_a_plain_number_or_nothing(good, name, memory):
    opened, ran, proof = spoken(name, good.path, good.subject)
    assert 0 < opened["seconds"] < 60
    assert 0 < ran["seconds"] < 60
    assert (proof["memory_bytes"], proof["peak_bytes"]) == (memory, memory)
    assert proof["own_process"] is True
