"""Start N ranks as processes with torchrun's environment variables: on loopback, or in a `Netlab`."""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradwire_lab.ranks.netlab import Netlab, parse_rate
from gradwire_lab.ranks.supervisor import end_on_signals


def start_ranks(
    command: Sequence[str],
    n_ranks: int,
    rate: str | float | Sequence[str | float | None] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    grace_s: float = 10.0,
    on_line: Callable[[int, str], None] | None = None,
    **lab_options: Any,
) -> Netlab:
    """Start `command` in `n_ranks` processes: on loopback for rate None or "none", else in a `Netlab`, whose options
    these are. Returns: the lab, to use in a with statement, which ends what still runs. Raises: InvalidArgument,
    Unsupported."""
    on_loopback = rate is None or (
        isinstance(rate, str | int | float) and parse_rate(rate) is None and "/" not in str(rate)
    )
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Netlab(n_ranks, rate, on_loopback=on_loopback, **lab_options))
        lab.start(command, env, grace_s=grace_s, on_line=on_line)
        stack.pop_all()  # what runs is the caller's to end
    return lab


def run_gradwire(
    arguments: Sequence[str],
    n_ranks: int,
    rate: str | float | Sequence[str | float | None] | None = None,
    on_line: Callable[[int, str], None] = lambda rank, line: print(line, flush=True),
    *,
    module: str = "gradwire",
    timeout_s: float | None = None,
    on_start: Callable[[Netlab], None] = lambda launch: None,
    **options: Any,
) -> bool:
    """Run `gradwire ARGUMENTS`, or another module, in ranks to the end; say so, and return False, where links are not shaped.

    Args: see `start_ranks`; `on_start` is given the lab. Raises: InvalidArgument, Unsupported, PeerLost (a rank failed).
    """
    command = [sys.executable, "-m", module, *arguments]
    with end_on_signals(), start_ranks(command, n_ranks, rate, on_line=on_line, **options) as launch:
        on_start(launch)
        if rate not in (None, "none") and not launch.shaped:
            print(
                f"Links cannot be limited on this machine (docs/netlab.md says what that needs): not {rate},",
                flush=True,
            )
            print("what follows runs on loopback without a limit, where almost nothing waits.", flush=True)
        launch.wait(timeout_s).raise_if_failed()
        return launch.shaped
