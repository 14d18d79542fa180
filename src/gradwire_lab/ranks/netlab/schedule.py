"""Things that happen to a lab at set times after the start of its ranks: `SECONDS:EVENT`, for the command line."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from gradwire.errors import GradwireError, InvalidArgument
from gradwire_lab.ranks.netlab.lab import Netlab
from gradwire_lab.ranks.netlab.rate import parse_link

_CHANGES = ("rate", "delay", "jitter", "loss")  # to a value
_ACTIONS = {"down": "link_down", "up": "link_up", "kill": "kill_rank", "stop": "stop_rank", "continue": "continue_rank"}
_FORM = "write SECONDS:ACTION:RANK, such as 10:rate:2=100mbit, 10:delay:2=40ms, 10:down:2, and up, kill, stop, continue"


@dataclass(frozen=True, order=True)
class Event:
    """`action` on `rank`, `at_s` seconds after the ranks were started."""

    at_s: float
    action: str
    rank: int
    rate: str | None = None

    def apply(self, lab: Netlab) -> None:
        """Do it now."""
        if self.rate is None:
            getattr(lab, _ACTIONS[self.action])(self.rank)
        elif self.action == "rate":
            lab.set_rate(self.rank, self.rate)
        else:
            lab.set_line(self.rank, **{self.action: self.rate})

    def __str__(self) -> str:
        return f"{self.at_s:g} s: {self.action} rank {self.rank}" + ("" if self.rate is None else f" {self.rate}")


def parse_event(text: str, n_ranks: int) -> Event:
    """Read "10:rate:2=100mbit" or "10:down:2". Raises: InvalidArgument."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?):([a-z]+):(\d+)(?:=(.+))?", text)
    if match is None or match[2] not in (_ACTIONS if match[4] is None else _CHANGES):
        raise InvalidArgument(f"{text!r} is no event: {_FORM}")
    if int(match[3]) >= n_ranks:
        raise InvalidArgument(f"event {text!r}: there is no rank {match[3]}; there are ranks 0 to {n_ranks - 1}")
    if match[4] is not None:
        parse_link(match[4] if match[2] == "rate" else f"none/{match[2]}={match[4]}")
    return Event(float(match[1]), match[2], int(match[3]), match[4])


class Schedule:
    """Applies events to a lab from a thread, within a with statement; `done` lists (event, what went wrong)."""

    def __init__(self, lab: Netlab, events: Iterable[Event]) -> None:
        self._lab = lab
        self._events = sorted(events, key=lambda event: event.at_s)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gradwire-netlab-schedule", daemon=True)
        self.done: list[tuple[Event, str | None]] = []

    def _run(self) -> None:
        start = time.monotonic()
        for event in self._events:
            if self._over.wait(max(0.0, start + event.at_s - time.monotonic())):
                return
            try:
                event.apply(self._lab)
                self.done.append((event, None))
            except GradwireError as error:
                self.done.append((event, str(error)))

    def __enter__(self) -> Schedule:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
