"""The model store over HTTP serves files by name and by digest, and nothing else."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gate import Digest, verify_golden
from gate.deploy.deploy import deploy, rollback_deployment
from gate.deploy.store import Manifest, ModelStore
from tests.deploy import models
from tests.deploy.models import NAME
from tests.deploy.servers import serve_store

YEAR = "public, max-age=31536000, immutable"


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    created = ModelStore(tmp_path / "srv", keep=1)
    deploy(created, NAME, {"exact": models.source(tmp_path, 1)})
    return created


@pytest.fixture
def client(store: ModelStore) -> Iterator[httpx.Client]:
    with serve_store(store) as opened:
        yield opened


def _manifest(client: httpx.Client) -> Manifest:
    return Manifest.from_json(client.get(f"{NAME}/manifest.json").raise_for_status().content)


def test_stable_names_serve_the_current_release(client: httpx.Client, store: ModelStore) -> None:
    live = store.live(NAME)
    assert live is not None
    response = client.get(f"{NAME}/manifest.json")
    assert response.headers["content-type"] == "application/json"
    assert response.headers["etag"] == f'"sha256-{Digest.from_bytes(response.content).hex}"'
    assert Manifest.from_json(response.content) == live
    for path in (f"{NAME}/model.onnx", f"{NAME}/exact/model.onnx"):
        model = client.get(path)
        assert model.status_code == 200
        digest = Digest.from_bytes(model.content)
        assert digest == live.slots["exact"].sha256
        assert model.headers["etag"] == f'"sha256-{digest.hex}"'
        assert model.headers["cache-control"] == "no-cache"
        assert model.headers["content-length"] == str(len(model.content))
        assert model.headers["content-type"] == "application/octet-stream"
        assert "last-modified" not in model.headers
        assert "access-control-allow-origin" not in model.headers


def test_digest_urls_are_cacheable_for_a_year(client: httpx.Client, tmp_path: Path) -> None:
    slot = _manifest(client).slots["exact"]
    for entry in (*slot.files, slot.golden):
        response = client.get(f"{NAME}/{entry.url}")
        assert response.status_code == 200
        assert response.headers["cache-control"] == YEAR
        assert Digest.from_bytes(response.content) == entry.sha256
        assert len(response.content) == entry.size_bytes


def test_client_verifies_the_download_with_golden_vectors(
    client: httpx.Client, tmp_path: Path
) -> None:
    """Download the model and its golden vectors over HTTP only."""
    slot = _manifest(client).slots["exact"]
    folder = tmp_path / "edge"
    (folder / "golden").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(client.get(f"{NAME}/{slot.model.url}").content)
    record = client.get(f"{NAME}/{slot.golden.url}")
    (folder / "golden" / "golden.json").write_bytes(record.content)
    for tensor in (*record.json()["inputs"], *record.json()["outputs"]):
        address = str(httpx.URL(f"{NAME}/{slot.golden.url}")).replace("golden.json", tensor["file"])
        array = client.get(address).raise_for_status()
        assert array.headers["cache-control"] == YEAR
        (folder / "golden" / tensor["file"]).write_bytes(array.content)
    assert verify_golden(folder / "model.onnx", folder / "golden").passed


def test_external_data_is_served(client: httpx.Client, store: ModelStore, tmp_path: Path) -> None:
    deploy(store, NAME, {"exact": models.external_data_source(tmp_path)})
    slot = _manifest(client).slots["exact"]
    (data,) = slot.external_data
    for path in (f"{NAME}/{data.url}", f"{NAME}/exact/{data.name}"):
        assert Digest.from_bytes(client.get(path).raise_for_status().content) == data.sha256
    assert client.get(f"{NAME}/model.onnx").headers["etag"] == f'"sha256-{slot.model.sha256.hex}"'


def test_matching_etag_gets_304(client: httpx.Client) -> None:
    tag = client.head(f"{NAME}/model.onnx").headers["etag"]
    for etags in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        response = client.get(f"{NAME}/model.onnx", headers={"If-None-Match": etags})
        assert (response.status_code, response.content) == (304, b""), etags
        assert response.headers["etag"] == tag
        assert response.headers["cache-control"] == "no-cache"
    second = client.get(f"{NAME}/model.onnx", headers={"If-None-Match": '"sha256-00"'})
    assert second.status_code == 200


def test_etag_depends_on_the_bytes_only(client, store: ModelStore, tmp_path: Path) -> None:
    """The other model has the same size and the same times."""
    before = client.get(f"{NAME}/model.onnx")
    deploy(store, NAME, {"exact": models.source(tmp_path, 2)})
    fresh = {
        "If-None-Match": before.headers["etag"],
        "If-Modified-Since": "Fri, 01 Jan 2100 00:00:00 GMT",
    }
    after = client.get(f"{NAME}/model.onnx", headers=fresh)
    assert after.status_code == 200
    assert len(after.content) == len(before.content)
    assert after.content != before.content
    rollback_deployment(store, NAME)
    again = client.get(f"{NAME}/model.onnx", headers={"If-None-Match": after.headers["etag"]})
    assert again.content == before.content


def test_digest_url_of_a_kept_release_is_served(client, store: ModelStore, tmp_path: Path) -> None:
    old = _manifest(client).slots["exact"]
    deploy(store, NAME, {"exact": models.source(tmp_path, 2)})
    assert client.get(f"{NAME}/{old.model.url}").status_code == 200
    for seed in (3, 4):
        deploy(store, NAME, {"exact": models.source(tmp_path, seed)})
    assert client.get(f"{NAME}/{old.model.url}").status_code == 404


def test_head_returns_headers_without_body(client: httpx.Client) -> None:
    for path in (f"{NAME}/model.onnx", f"{NAME}/manifest.json"):
        get, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        for name in ("etag", "content-length", "cache-control", "content-type"):
            assert head.headers[name] == get.headers[name]


RANGES: dict[str, tuple[int, int | None]] = {
    "bytes=0-9": (0, 10), "bytes=5-5": (5, 6), "bytes=10-": (10, None), "bytes=-7": (-7, None),
    "bytes=0-": (0, None), "bytes=3-99999999": (3, None), "bytes=-99999999": (0, None),
}  # fmt: skip
OUTSIDE = ("bytes=99999999-", "bytes=99999999-100000000", "bytes=-0")
NO_RANGES = (
    "bytes=5-2", "bytes=-", "bytes=a-b", "lines=0-1", "bytes=0-1,3-4", "bytes=٣-",
    "bytes=" + "9" * 50 + "-",
)  # fmt: skip


def test_byte_ranges(client: httpx.Client) -> None:
    def get_range(requested: str) -> httpx.Response:
        return client.get(f"{NAME}/model.onnx", headers={"Range": requested.encode()})

    content = client.get(f"{NAME}/model.onnx").content
    for requested, (start, stop) in RANGES.items():
        response, expected = get_range(requested), content[start:stop]
        assert (response.status_code, response.content) == (206, expected), requested
        first = len(content) + start if start < 0 else start
        last = first + len(expected) - 1
        assert response.headers["content-range"] == f"bytes {first}-{last}/{len(content)}"
        assert response.headers["content-length"] == str(len(expected))
        head = client.head(f"{NAME}/model.onnx", headers={"Range": requested})
        assert (head.status_code, head.headers["content-length"]) == (206, str(len(expected)))
    for requested in OUTSIDE:
        response = get_range(requested)
        assert response.status_code == 416, requested
        assert response.headers["content-range"] == f"bytes */{len(content)}"
    for requested in NO_RANGES:
        response = get_range(requested)
        assert (response.status_code, response.content) == (200, content), requested


def test_if_range_with_an_old_etag_gets_the_whole_file(
    client, store: ModelStore, tmp_path: Path
) -> None:
    tag = client.head(f"{NAME}/model.onnx").headers["etag"]
    requested = {"Range": "bytes=10-", "If-Range": tag}
    assert client.get(f"{NAME}/model.onnx", headers=requested).status_code == 206
    deploy(store, NAME, {"exact": models.source(tmp_path, 2)})
    assert client.get(f"{NAME}/model.onnx", headers=requested).status_code == 200


def _get_raw(client: httpx.Client, target: str) -> bytes:
    """Send the path unchanged; HTTP clients would normalize it."""
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=10) as link:
        link.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: link.recv(65536), b""))


INVALID_PATHS = (
    "nobody/manifest.json", "nobody/model.onnx", f"{NAME}/", f"{NAME}", "",
    f"{NAME}/nothing", f"{NAME}/quantized/model.onnx", f"{NAME}/exact/nothing.onnx",
    f"{NAME}/exact/", f"{NAME}/sha256/{'0' * 64}/model.onnx", f"{NAME}/sha256/short/model.onnx",
    f"{NAME}/exact/../../../../../../etc/passwd", f"{NAME}/../../.lock", "../live/digits/manifest.json",
    f"{NAME}/exact/..%2f..%2f..%2f.lock", f"{NAME}/exact/%2e%2e/%2e%2e/.lock", "%2e%2e/model.onnx",
    "..%2flive%2fdigits/model.onnx", f"{NAME}/exact//etc/passwd", f"{NAME}/exact/%00", ".hidden/model.onnx",
    f"{NAME}%00/model.onnx", f"{NAME}/exact/manifest.json",
)  # fmt: skip


def test_other_paths_are_not_found(client: httpx.Client) -> None:
    for path in INVALID_PATHS:
        response = _get_raw(client, f"/models/{path}")
        assert response.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 400 ")), (path, response[:200])
        assert b"root:" not in response
        assert b"Traceback" not in response


def test_digest_of_another_model_is_not_found(client, store: ModelStore, tmp_path: Path) -> None:
    second = models.source(tmp_path, 9)
    deploy(store, "other", {"exact": second})
    assert client.get(f"other/sha256/{second.sha256.hex}/model.onnx").status_code == 200
    assert client.get(f"{NAME}/sha256/{second.sha256.hex}/model.onnx").status_code == 404


def test_write_methods_are_refused(client: httpx.Client) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in (f"{NAME}/model.onnx", f"{NAME}/manifest.json", f"{NAME}/exact/model.onnx"):
            assert client.request(method, path).status_code == 405


def test_cors_only_for_configured_origins(store: ModelStore) -> None:
    page = {"Origin": "https://page.example"}
    with serve_store(store) as client:
        response = client.get(f"{NAME}/model.onnx", headers=page)
        assert "access-control-allow-origin" not in response.headers
    with serve_store(store, cors_origins=("https://page.example",)) as client:
        url = f"{NAME}/model.onnx"
        response = client.get(url, headers=page)
        assert response.headers["access-control-allow-origin"] == "https://page.example"
        assert "ETag" in response.headers["access-control-expose-headers"]
        requested = page | {
            "Access-Control-Request-Method": "GET",
            "Access-Control-Request-Headers": "range",
        }
        assert client.options(url, headers=requested).status_code == 200
        second = client.get(url, headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in second.headers


def test_running_download_survives_pruning(store: ModelStore, tmp_path: Path, client) -> None:
    """A running download finishes even if its files are pruned meanwhile."""
    live = store.live(NAME)
    assert live is not None
    with client.stream("GET", f"{NAME}/model.onnx") as response:
        for seed in (2, 3, 4):
            deploy(store, NAME, {"exact": models.source(tmp_path, seed)})
        assert not store.content(live.slots["exact"].sha256).exists()
        assert Digest.from_bytes(response.read()) == live.slots["exact"].sha256


def test_no_file_stays_open_after_a_request(store: ModelStore, client: httpx.Client) -> None:
    slot = store.live(NAME).slots["exact"]
    path = store.file(slot.sha256, slot.model).resolve()
    for headers in ({}, {"Range": "bytes=0-1"}, {"Range": "bytes=999999-"}, {"If-None-Match": "*"}):
        client.get(f"{NAME}/model.onnx", headers=headers)
        client.head(f"{NAME}/model.onnx", headers=headers)
    opened = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            opened.append(link.resolve())
        except OSError:
            continue
    assert path not in opened
