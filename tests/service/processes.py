"""Services that run in separate processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gate.service import settings
from gate.service.app import WEBHOOK_PATH
from tests import plain_http
from tests.service.deliveries import SECRET, event_body, signed_headers, wait_until

ROOT = Path(__file__).parents[2]


@dataclass
class Process:
    popen: subprocess.Popen[bytes]
    record: Path
    log: Path
    address: str = ""

    def lines(self, word: str) -> list[str]:
        text = self.record.read_text() if self.record.exists() else ""
        return [
            line.removeprefix(f"{word} ") for line in text.splitlines() if line.startswith(word)
        ]

    def ended(self) -> list[str]:
        """Return the webhook calls of `Reconcile` that have ended."""
        return [line.partition(" ")[2] for line in self.lines("end") if not line.endswith("timer")]

    def send(self, event: Mapping[str, Any] | None = None, **options: Any) -> httpx.Response:
        import json

        raw = json.dumps(event or event_body()).encode()
        return plain_http.post(
            self.address + WEBHOOK_PATH,
            content=raw,
            headers=signed_headers(raw, **options),
            timeout=30,
        )

    def end(self, number: int = signal.SIGTERM) -> int:
        self.popen.send_signal(number)
        return self.popen.wait(60)


@contextmanager
def run_process(
    folder: Path,
    *options: str,
    slow: float = 0,
    url: str | None = None,
) -> Iterator[Process]:
    """Run a service in `folder`; a restart there continues with the stored state."""
    secrets = folder / "secrets"
    if not secrets.exists():
        settings.write_secrets(secrets, [SECRET])
    record = folder / "record"
    before = record.read_text().count("ready ") if record.exists() else 0
    command = [sys.executable, "-m", "tests.service.fake_service", str(record), "--slow", str(slow)]
    command += ["--", "serve", "--model", "digits", "--port", "0", "--secret-file", str(secrets)]
    command += ["--state", url or f"sqlite:///{folder}/state.db", "--interval", "3600", *options]
    command += ["--tracking-uri", "http://127.0.0.1:1"]
    log = folder / "log"
    with log.open("ab") as stream:
        # Not in the repository's folder, because the policy of `make repro` there trusts one key
        # only.
        popen = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=stream, stderr=stream,
        )  # fmt: skip
    started = Process(popen, record, log)
    try:
        wait_until(
            lambda: len(started.lines("ready")) > before or popen.poll() is not None, seconds=60
        )
        if len(started.lines("ready")) > before:
            started.address = started.lines("ready")[-1]
        yield started
    finally:
        popen.kill()
        popen.wait()
