"""A real browser never shows a stale model: a plain reload is enough."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route

from gate.deploy.deploy import deploy, rollback_deployment
from gate.deploy.serving import store_app
from gate.deploy.store import ModelStore
from tests.browser import chromium
from tests.deploy import models
from tests.deploy.models import NAME
from tests.deploy.servers import serving

PAGE = """<!doctype html><title>loading</title><script type="module">
const hex = async (data) => Array.from(new Uint8Array(await crypto.subtle.digest("SHA-256", data)))
    .map((byte) => byte.toString(16).padStart(2, "0")).join("");
const get = async (url) => (await fetch(url)).arrayBuffer();
const where = new URL("/models/digits/manifest.json", location);
const manifest = await (await fetch(where)).json();
const slot = manifest.slots.exact;
window.seen = {
    release: manifest.release,
    stable: await hex(await get("/models/digits/model.onnx")),
    named: await hex(await get(new URL(slot.model.url, where))),
    expected: slot.sha256,
};
document.title = "done";
</script>"""


async def _page(request: Request) -> Response:
    return HTMLResponse(PAGE)


@pytest.fixture
def page() -> Iterator[Page]:
    with chromium() as browser:
        yield browser.new_page()


@pytest.mark.slow
def test_a_plain_reload_shows_what_serves(tmp_path: Path, page: Page) -> None:
    store = ModelStore(tmp_path / "srv")
    sources = [models.source(tmp_path, seed) for seed in (1, 2)]
    assert deploy(store, NAME, {"exact": sources[0]}).outcome == "deployed"
    app = Starlette(routes=[Route("/", _page), Mount("/models", store_app(store))])

    def shows(source: models.SlotSource, release: int) -> None:
        page.wait_for_function("document.title === 'done'", timeout=20_000)
        seen = page.evaluate("window.seen")
        assert seen == {
            "release": release,
            "stable": source.sha256.hex,
            "named": source.sha256.hex,
            "expected": str(source.sha256),
        }

    with serving(app) as address:
        page.goto(address)
        shows(sources[0], 1)
        page.reload()
        shows(sources[0], 1)
        assert deploy(store, NAME, {"exact": sources[1]}).outcome == "deployed"
        page.reload()
        shows(sources[1], 2)
        assert rollback_deployment(store, NAME).outcome == "rolled_back"
        page.reload()
        shows(sources[0], 3)
