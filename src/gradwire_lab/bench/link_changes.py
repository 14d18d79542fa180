"""New link rates in the middle of a benchmark: rank 0 asks the launcher, which owns the links, and waits until it is done.

The question goes over standard output, where the launcher reads each line; the answer is a file beside the records' log.
"""

from __future__ import annotations

import time
from pathlib import Path

from gradwire.errors import GradwireError
from gradwire_lab.ranks.launch import Launch

_QUESTION = "gradwire bench: change links to "
_PATIENCE_S = 20.0


class LinkChanges:
    """The launcher's side: recognises the question among the lines of rank 0 and changes the lab's links.

    Args:
        log: the records' log, which rank 0 knows too.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._launch: Launch | None = None

    def serve(self, launch: Launch) -> None:
        """The ranks whose questions are answered from now on."""
        self._launch = launch

    def take(self, line: str) -> bool:
        """Whether `line` was a question; it has been answered then."""
        if not line.startswith(_QUESTION):
            return False
        number, rates = line.removeprefix(_QUESTION).split(" ")
        answer = ""
        try:
            if self._launch is None or self._launch.lab is None:
                raise GradwireError("the ranks have no shaped links")
            each = rates.split(",")
            for rank in range(self._launch.network.n_ranks_on_machine or 0):
                self._launch.lab.set_rate(rank, each[rank % len(each)])
        except GradwireError as error:
            answer = str(error)
        _answer_path(self._log, int(number)).write_text(answer, encoding="utf-8")
        return True


def change_links(log: Path, number: int, rates: str) -> None:
    """Rank 0's side: have every link changed to `rates` ("100mbit", or one a rank with commas), the run's `number`th change.

    Raises: GradwireError (the launcher could not, or did not answer).
    """
    path = _answer_path(log, number)
    print(f"{_QUESTION}{number} {rates}", flush=True)
    deadline = time.monotonic() + _PATIENCE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise GradwireError(f"the launcher did not change the links to {rates} within {_PATIENCE_S:.0f} s")
        time.sleep(0.01)
    answer = path.read_text(encoding="utf-8")
    path.unlink()
    if answer:
        raise GradwireError(f"links were not changed to {rates}: {answer}")


def _answer_path(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.links-{number}")
