"""Start N ranks as processes with torchrun's environment variables: on loopback, or in a `Netlab`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradwire.errors import InvalidArgument
from gradwire_lab.ranks.supervisor import LaunchResult, RankSet, end_on_signals

if TYPE_CHECKING:
    from gradwire_lab.ranks.netlab import LinkCounters, Netlab

__all__ = ["Launch", "run_gradwire", "start_ranks"]


class Launch:
    """Started ranks and their lab. Leaving the with statement ends what still runs."""

    def __init__(self, ranks: RankSet, lab: Netlab, on_loopback: bool) -> None:
        self.ranks, self._lab = ranks, lab
        self.network = lab.network
        self.lab = None if on_loopback else lab

    @property
    def shaped(self) -> bool:
        """Whether the ranks have shaped links; False also where a lab was asked for and the machine refused it."""
        return self.network.shaped

    def wait(self, timeout_s: float | None = None) -> LaunchResult:
        """Wait for all ranks; after `timeout_s` they are ended and the result says so. See `RankSet.wait`."""
        return self.ranks.wait(timeout_s)

    def counters(self) -> list[LinkCounters] | None:
        """Each rank's link counters, also after `wait`; None on loopback, where the kernel cannot tell ranks apart."""
        return self._lab.counters() if self._lab.shaped else None

    def close(self) -> None:
        """End the ranks that still run, and take the lab down."""
        self._lab.close()

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
) -> Launch:
    """Start `command` in `n_ranks` processes: on loopback for rate None or "none", else in a `Netlab`.

    Args:
        rate: as `Netlab` takes it; a sequence gives each rank's.
        env: variables on top of this process's environment.
        grace_s, on_line: see `RankSet`.
        switch: also run the emulation of an aggregating switch, which ranks find in GRADWIRE_SWITCH; see `Netlab`.
        lab_options: `Netlab`'s: mtu, queue_ms, require_shaping, ranks_per_node.
    Returns: a handle to use in a with statement.
    Raises: InvalidArgument, Unsupported.
    """
    if not command:
        raise InvalidArgument("no command to run in the ranks; give one after --")
    from gradwire_lab.ranks.netlab import Netlab, parse_rate

    on_loopback = rate is None or (
        isinstance(rate, str | int | float) and parse_rate(rate) is None and "/" not in str(rate)
    )
    lab = Netlab(n_ranks, rate, switch=switch, on_loopback=on_loopback, **lab_options)
    try:
        lab.__enter__()
        return Launch(lab.start(command, env, grace_s=grace_s, on_line=on_line), lab, on_loopback)
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
    on_start: Callable[[Launch], None] = lambda launch: None,
    **options: Any,
) -> bool:
    """Run `gradwire ARGUMENTS` in `n_ranks` processes to the end, and say so where links cannot be limited.

    Args: see `start_ranks`; `module`: another program that takes the arguments; `on_start` is given the handle.
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
