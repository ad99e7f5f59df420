"""Editing a trust file keeps comments and never writes an invalid file."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.errors import PolicyError
from gate.signing.trust import Trust
from pipelines.trust_file import EditedTrust, KeyTerms
from tests.signing.signing import NOW, key

FIRST_KEY, SECOND_KEY = key(1).public, key(2).public


def create_trust_file(path: Path) -> Path:
    file = EditedTrust(path)
    file.trust(FIRST_KEY, ["measurers"], KeyTerms(name="CI"))
    file.save()
    return path


def test_new_file_has_one_measurer(tmp_path: Path) -> None:
    trust = Trust.from_file(create_trust_file(tmp_path / "new" / "trust.yaml"))
    assert [(each.name, each.key_id) for each in trust.measurers] == [("CI", FIRST_KEY.key_id)]
    assert trust.reviewers == trust.writers == ()


EDITED = """\
# Ours, since January.
gate:  # the policy
  min_samples: 300   # enough
trust:
  threshold: 1  # four eyes later
  measurers:
    # The runner in the cellar.
    - name: "cellar"
      public: |
        {pem}
  max_age_days: 30
"""


def write_edited_file(path: Path) -> Path:
    path.write_text(EDITED.format(pem=FIRST_KEY.public.rstrip().replace("\n", "\n        ")))
    return path


def test_comments_and_other_sections_are_kept(tmp_path: Path) -> None:
    path = write_edited_file(tmp_path / "params.yaml")
    file = EditedTrust(path)
    file.trust(SECOND_KEY, ["measurers", "reviewers"], KeyTerms(valid_until="2027-01-31"))
    file.revoke(FIRST_KEY.short)
    trust = file.save()
    text = path.read_text()
    for line in EDITED.replace("{pem}", "").splitlines():
        assert line.strip() in text
    assert text.index("gate:") < text.index("threshold") < text.index("max_age_days")
    assert trust == Trust.from_file(path)
    assert [each.name for each in trust.measurers] == ["cellar", "key 2"]
    assert trust.reviewers[0].valid_until == "2027-01-31"
    assert trust.revoked == (FIRST_KEY.key_id,)
    assert trust.max_age_days == 30
    assert [each.name for each in trust.keys("measurers", at=NOW)] == ["key 2"]


def test_listed_key_is_updated(tmp_path: Path) -> None:
    path = write_edited_file(tmp_path / "params.yaml")
    file = EditedTrust(path)
    file.trust(FIRST_KEY, ["measurers"], KeyTerms(valid_until="2027-01-31T00:00:00Z"))
    (result,) = file.save().measurers
    assert (result.name, result.valid_until) == ("cellar", "2027-01-31T00:00:00Z")


def test_file_without_a_section_keeps_its_form(tmp_path: Path) -> None:
    path = tmp_path / "trust.yaml"
    pem = FIRST_KEY.public.rstrip().replace("\n", "\n      ")
    path.write_text(f"measurers:\n  - name: ci\n    public: |\n      {pem}\n")
    file = EditedTrust(path)
    file.trust(SECOND_KEY, ["writers"], KeyTerms())
    file.save()
    assert "trust:" not in path.read_text()
    assert len(Trust.from_file(path).writers) == 1


def test_last_key_can_be_revoked(tmp_path: Path) -> None:
    path = create_trust_file(tmp_path / "trust.yaml")
    file = EditedTrust(path)
    assert file.revoke(FIRST_KEY.key_id.upper()) == FIRST_KEY.key_id
    file.revoke(FIRST_KEY.key_id)
    file.save()
    assert Trust.from_file(path).keys("measurers", at=NOW) == ()
    assert Trust.from_file(path).revoked == (FIRST_KEY.key_id,)


def test_unlisted_key_is_revoked_by_its_full_id(tmp_path: Path) -> None:
    file = EditedTrust(create_trust_file(tmp_path / "trust.yaml"))
    file.revoke(SECOND_KEY.key_id)
    assert file.save().revoked == (SECOND_KEY.key_id,)


@pytest.mark.parametrize(
    "key_id", ["", "a", SECOND_KEY.short, "g" * 64, FIRST_KEY.key_id[:7], f"{FIRST_KEY.key_id}0"]
)
def test_invalid_key_id_revokes_nothing(tmp_path: Path, key_id: str) -> None:
    with pytest.raises(PolicyError, match="names 0 of the listed keys"):
        EditedTrust(create_trust_file(tmp_path / "trust.yaml")).revoke(key_id)


def test_invalid_trust_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "trust.yaml"
    file = EditedTrust(path)
    file.trust(FIRST_KEY, ["reviewers"], KeyTerms())
    with pytest.raises(PolicyError, match=r"trust\.yaml.*measurers.*(\n.*)*Name a measurer first"):
        file.save()
    assert not path.exists()
    before = create_trust_file(path).read_bytes()
    file = EditedTrust(path)
    file.trust(FIRST_KEY, ["measurers"], KeyTerms(valid_from="soon"))
    with pytest.raises(PolicyError, match="is not an ISO 8601 time"):
        file.save()
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["- a\n", "trust: [\n", "text", b"\xff\xfe"])
def test_other_file_is_not_changed(tmp_path: Path, text) -> None:
    path = tmp_path / "trust.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = path.read_bytes()
    with pytest.raises(PolicyError):
        EditedTrust(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["", "trust:\n", "# nothing yet\n"])
def test_empty_file_becomes_a_trust_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trust.yaml"
    path.write_text(text)
    assert len(Trust.from_file(create_trust_file(path)).measurers) == 1
