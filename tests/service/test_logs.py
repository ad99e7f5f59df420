from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from gate.service.monitoring import configure_logging
from gate.storage.safe_text import Redaction

SECRET = 'a "quoted" secret with ü'
SIGNATURE = "v1,K7gNU3sdo+OL0wNhqoVWhr3g6s1xYv72ol/pe/Unols="


@pytest.fixture(autouse=True)
def _restore_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


def capture_log(log_format: str, *, write) -> str:
    stream = io.StringIO()
    handler = configure_logging(
        stream, log_format=log_format, redaction=Redaction(lambda: {SECRET})
    )  # type: ignore[arg-type]
    try:
        write(logging.getLogger("gate.test"))
    finally:
        logging.getLogger().removeHandler(handler)
    return stream.getvalue()


def _raise_with_secret() -> None:
    raise ValueError(f"with {SECRET} inside")


def log_all_kinds(log: logging.Logger) -> None:
    log.info("plain %s", SECRET)
    log.info(
        "said", extra={"fields": {"header": SIGNATURE, "secret": SECRET, "n": 3, "none": None}}
    )
    log.warning("at %s", "postgresql://gate:hunter2@db/gate")
    log.info("as the address says, http://user:hunter2@host:1/x and http://host/p@th")
    try:
        _raise_with_secret()
    except ValueError:
        log.exception("it failed")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_secrets_are_hidden_in_every_line(log_format: str) -> None:
    text = capture_log(log_format, write=log_all_kinds)
    for hidden in (SECRET, json.dumps(SECRET)[1:-1], SIGNATURE, SIGNATURE[3:], "hunter2"):
        assert hidden not in text
    assert text.count("[hidden]") >= 6
    assert "http://host/p@th" in text
    assert "ValueError" in text


def test_passwords_of_the_environment_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "correct horse")
    assert "correct" not in capture_log("text", write=lambda log: log.info("the correct horse"))


def test_json_format_writes_one_line_per_event() -> None:
    lines = [json.loads(line) for line in capture_log("json", write=log_all_kinds).splitlines()]
    assert len(lines) == 5
    assert {"at", "level", "logger", "message"} <= set(lines[0])
    assert (lines[1]["n"], lines[1]["none"]) == (3, None)
    assert lines[2]["level"] == "warning"
    assert "ValueError" in lines[4]["traceback"]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_control_characters_do_not_create_new_lines(log_format: str) -> None:
    control_characters = "x\n2026-01-01 info gate: approved\r\x1b[31m\u2028\ud800"
    text = capture_log(
        log_format,
        write=lambda log: log.info(
            "%s", control_characters, extra={"fields": {"m": control_characters}}
        ),
    )
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text
    text.encode()


@pytest.mark.parametrize("level", [logging.NOTSET, logging.ERROR])
def test_uvicorn_logs_through_the_same_handler(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    uvicorn_log = logging.getLogger("uvicorn.access")
    monkeypatch.setattr(uvicorn_log, "level", uvicorn_log.level)
    uvicorn_log.setLevel(level)

    def access(_log: logging.Logger) -> None:
        logging.getLogger("uvicorn.access").info(
            '%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", "POST", "/webhooks/mlflow", "1.1", 202
        )

    record = json.loads(capture_log("json", write=access))
    assert record["logger"] == "uvicorn.access"
    assert record["message"] == '127.0.0.1:1 - "POST /webhooks/mlflow HTTP/1.1" 202'
