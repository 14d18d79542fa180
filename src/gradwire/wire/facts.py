"""What ranks must agree on about one bucket."""

from __future__ import annotations

from typing import NamedTuple


class Facts(NamedTuple):
    """What both ends of a stream must agree on; carried by every message header, compared on receipt."""

    configuration: int
    layout: int
    step: int
    bucket: int
