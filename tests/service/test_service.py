"""The service as a process: what it does about a damaged file that a client finds."""

from __future__ import annotations

from pathlib import Path

from tests import plain_http
from tests.deploy.forged import store_of
from tests.service.processes import process


def test_damage_that_a_client_finds_is_looked_at(tmp_path: Path) -> None:
    _store, path = store_of(tmp_path / "store", b"a model")
    with process(tmp_path, "--store", str(tmp_path / "store")) as service:
        url = f"{service.address}/models/digits/model.onnx"
        assert plain_http.get(url).content == b"a model"
        path.write_bytes(b"another")
        assert plain_http.get(url).status_code == 503
        assert plain_http.get(url).status_code == 503
        assert service.lines("doubt") == ["digits"]
        assert service.log.read_text().count("not served") == 1
