"""A real uvicorn on 127.0.0.1 in a thread of this process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from gate.deploy.serving import store_app
from gate.deploy.store import ModelStore
from tests import plain_http
from tests.service.deliveries import wait_until


@contextlib.contextmanager
def serve_store(store: ModelStore, **options: Any) -> Iterator[httpx.Client]:
    """Serve a store at `/models` on a free port, and yield a client whose paths begin there."""
    app = Starlette(routes=[Mount("/models", store_app(store, **options))])
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            wait_until(lambda: server.started)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/models/"
            with plain_http.client(base_url=url) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join(30)
