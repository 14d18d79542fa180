"""What gradwire logs in a rank's process, where pytest's caplog is not."""

from __future__ import annotations

import logging


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def log_of(name: str, level: int = logging.INFO) -> list[str]:
    """The messages of the logger `name` and those below it from now on, of `level` and above."""
    listener, logger = _Listener(), logging.getLogger(name)
    listener.setLevel(level)
    logger.addHandler(listener)
    if level < logger.getEffectiveLevel():
        logger.setLevel(level)
    return listener.texts
