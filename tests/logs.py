"""What gradwire logs in a rank's process, where pytest's caplog is not."""

import logging


def log_of(name: str, level: int = logging.INFO) -> list[str]:
    """The messages of the logger `name` and those below it from now on, of `level` and above."""
    texts: list[str] = []
    listener, logger = logging.Handler(level), logging.getLogger(name)
    listener.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(listener)
    if level < logger.getEffectiveLevel():
        logger.setLevel(level)
    return texts
