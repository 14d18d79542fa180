"""Start N ranks as processes with torchrun's environment variables: on loopback, or in a `Netlab`."""

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
    switch: bool = False,
    **lab_options: Any,
) -> Netlab:
    """Start `command` in `n_ranks` processes: on loopback for rate None or "none", else in a `Netlab`.

    Args:
        rate: as `Netlab` takes it; a sequence gives each rank's.
        env: variables on top of this process's environment.
        grace_s, on_line: see `RankSet`.
        switch: also run the emulation of an aggregating switch, which ranks find in GRADWIRE_SWITCH; see `Netlab`.
        lab_options: `Netlab`'s: mtu, queue_ms, require_shaping, ranks_per_node.
    Returns: the lab, to use in a with statement, which ends what still runs.
    Raises: InvalidArgument, Unsupported.
    """
    on_loopback = rate is None or (
        isinstance(rate, str | int | float) and parse_rate(rate) is None and "/" not in str(rate)
    )
    lab = Netlab(n_ranks, rate, switch=switch, on_loopback=on_loopback, **lab_options)
    lab.open()
    try:
        lab.start(command, env, grace_s=grace_s, on_line=on_line)
        return lab
    except BaseException:
        lab.close()
        raise


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
    """Run `gradwire ARGUMENTS` in `n_ranks` processes to the end, and say so where links cannot be limited.

    Args: see `start_ranks`; `module`: another program that takes the arguments; `on_start` is given the lab.
    Returns: whether the links were shaped.
    Raises: InvalidArgument, Unsupported, PeerLost (a rank failed; its own words are on standard error).
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
