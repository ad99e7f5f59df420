import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gate import Evidence
from gate.errors import EvidenceError
from gate.records.outputs import Accuracy
from tests import builders

numbers = st.floats(allow_nan=True, allow_infinity=True)


@given(numbers, numbers, numbers)
def test_json_keeps_numbers_exactly(reference, candidate, drop):
    record = Accuracy(reference=reference, candidate=candidate, drop=drop)
    again = Accuracy.from_json(record.to_json())
    for field in ("reference", "candidate", "drop"):
        before, after = getattr(record, field), getattr(again, field)
        assert before == after or (math.isnan(before) and math.isnan(after))
    assert again.digest() == record.digest()


def test_records_are_frozen_and_reject_extra_fields():
    record = Accuracy(reference=1.0, candidate=1.0, drop=0.0)
    with pytest.raises(ValidationError):
        record.drop = 1.0
    with pytest.raises(ValidationError):
        Accuracy(reference=1.0, candidate=1.0, drop=0.0, more=1)


def test_save_and_load(tmp_path):
    evidence = builders.evidence()
    evidence.save(tmp_path / "e.json")
    assert Evidence.load(tmp_path / "e.json") == evidence
    assert Evidence.load(tmp_path / "e.json").digest() == evidence.digest()


@pytest.mark.parametrize(
    "tamper",
    [
        lambda text: "",
        lambda text: "null",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"samples"', '"sampels"', 1),
        lambda text: text.replace('"schema_version":1', '"schema_version":2'),
        lambda text: text.replace("sha256:", "md5:", 1),
    ],
)
def test_incomplete_record_is_refused(tmp_path, tamper):
    path = tmp_path / "e.json"
    path.write_text(tamper(builders.evidence().to_json()))
    with pytest.raises(EvidenceError, match="not a valid Evidence record"):
        Evidence.load(path)


def test_missing_file_names_the_command(tmp_path):
    with pytest.raises(EvidenceError, match="cannot read .*Run the stage"):
        Evidence.load(tmp_path / "none.json")
