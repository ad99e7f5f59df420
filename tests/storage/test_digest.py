import hashlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate import Digest
from gate.errors import DigestMismatch, StorageError
from gate.storage.digest import canonical_json


@given(st.binary())
def test_digest_round_trips_through_text(data):
    digest = Digest.from_bytes(data)
    assert digest.hex == hashlib.sha256(data).hexdigest()
    assert Digest.parse(str(digest)) == digest
    assert Digest.parse(digest.hex) == digest


@pytest.mark.parametrize(
    "text", ["", "sha256:", "md5:" + "0" * 64, "0" * 63, "G" * 64, "0" * 64 + "\n", "A" * 64]
)
def test_invalid_digest_is_refused(text):
    with pytest.raises(ValueError, match="not a SHA-256"):
        Digest.parse(text)


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.floats(allow_nan=False)))
def test_canonical_json_sorts_keys(value):
    finite = {k: v for k, v in value.items() if not isinstance(v, float) or math.isfinite(v)}
    turned = dict(reversed(finite.items()))
    assert Digest.from_json(finite) == Digest.from_json(turned)
    assert json.loads(canonical_json(finite)) == finite


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_canonical_json_refuses_nan(number):
    with pytest.raises(ValueError):
        canonical_json({"x": number})


def test_digest_of_file_and_manifest(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"2")
    assert Digest.from_file(tmp_path / "a") == Digest.from_bytes(b"1")
    pair = Digest.from_manifest(tmp_path, ["a", "b"])
    assert pair == Digest.from_manifest(tmp_path, ["b", "a"])
    (tmp_path / "b").write_bytes(b"3")
    assert pair != Digest.from_manifest(tmp_path, ["a", "b"])


def test_missing_file_is_reported(tmp_path):
    with pytest.raises(StorageError, match="cannot read"):
        Digest.from_file(tmp_path / "nothing")


def test_verify_names_both_digests():
    first, two = Digest.from_bytes(b"1"), Digest.from_bytes(b"2")
    first.verify(first, label="the file")
    with pytest.raises(DigestMismatch, match=f"the file has digest {two}, expected {first}"):
        first.verify(two, label="the file")
