"""Log lines for people or machines, each with the request that it is about."""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar

import orjson
from aiohttp.http_exceptions import HttpProcessingError

request_id: ContextVar[str] = ContextVar("eldr_request_id", default="")


class _WithRequest(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Adds the id of the request that the current task serves."""
        record.request_id = request_id.get()
        return True


class _NoStrangersBytes(logging.Filter):
    """Drops aiohttp's lines about what is no HTTP: they quote it, and it may hold a key."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is about something else; the client has its answer, a 400."""
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


class _Console(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Time, level, logger, text and, where there is one, the request."""
        line = super().format(record)
        served = getattr(record, "request_id", "")
        return f"{line} [{served}]" if served else line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One JSON object."""
        row = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", "") or None,
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(row).decode()


_NO_STRANGERS_BYTES = _NoStrangersBytes()


def set_up(level: str, form: str) -> None:
    """Sends all log lines to stderr, as `console` text or `json` lines."""
    handler = logging.StreamHandler(sys.stderr)
    text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(_Json() if form == "json" else _Console(text))
    handler.addFilter(_WithRequest())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("aiohttp.server").addFilter(_NO_STRANGERS_BYTES)
    # At debug level it prints what the API server says, secrets of pods included.
    logging.getLogger("kubernetes").setLevel(max(root.level, logging.INFO))
