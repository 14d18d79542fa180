"""Start N ranks as processes with torchrun's environment variables: on loopback, or in a `Netlab`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradwire import checks
from gradwire.errors import InvalidArgument
from gradwire_lab.ranks.network import Network
from gradwire_lab.ranks.rank_environment import find_free_port, rank_environment
from gradwire_lab.ranks.supervisor import LaunchResult, RankSet, end_on_signals

if TYPE_CHECKING:
    from gradwire_lab.ranks.netlab import LinkCounters, Netlab
    from gradwire_lab.ranks.netlab.switch_host import SwitchHost

__all__ = ["Launch", "launch_ranks", "run_gradwire", "start_ranks"]


class Launch:
    """Started ranks, and their lab if they have one. Leaving the with statement ends what still runs."""

    def __init__(
        self, ranks: RankSet, network: Network, lab: Netlab | None = None, switch: SwitchHost | None = None
    ) -> None:
        self.ranks = ranks
        self._switch = switch  # on loopback; a lab holds its own
        self.network = network
        self.lab = lab  # None on loopback

    @property
    def shaped(self) -> bool:
        """Whether the ranks have shaped links; False also where a lab was asked for and the machine refused it."""
        return self.network.shaped

    def wait(self, timeout_s: float | None = None) -> LaunchResult:
        """Wait for all ranks; after `timeout_s` they are ended and the result says so. See `RankSet.wait`."""
        return self.ranks.wait(timeout_s)

    def counters(self) -> list[LinkCounters] | None:
        """Each rank's link counters, also after `wait`; None on loopback, where the kernel cannot tell ranks apart."""
        return self.lab.counters() if self.lab is not None and self.lab.shaped else None

    def close(self) -> None:
        """End the ranks that still run, and take the lab down."""
        try:
            self.ranks.end()
        finally:
            if self._switch is not None:
                self._switch.close()
            if self.lab is not None:
                self.lab.close()

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

    if rate is None or (isinstance(rate, str | int | float) and parse_rate(rate) is None):
        checks.count("ranks", n_ranks)
        per_node = lab_options.get("ranks_per_node", 1)
        if per_node < 1 or n_ranks % per_node:
            raise InvalidArgument(f"{n_ranks} ranks do not make whole nodes of {per_node}")
        ranks = RankSet(grace_s, on_line)
        network = Network("loopback", (), n_ranks, per_node)
        port = find_free_port()
        host: SwitchHost | None = None
        try:
            more = dict(env or {})
            if switch:
                from gradwire_lab.ranks.netlab.switch_host import SWITCH_VARIABLE, SwitchHost

                host = SwitchHost("127.0.0.1", find_free_port())
                more = {SWITCH_VARIABLE: host.address, **more}
            for rank in range(n_ranks):
                variables = rank_environment(
                    rank, n_ranks, network, address="127.0.0.1", port=port, interface="lo",
                    ranks_per_node=per_node if per_node > 1 else None,
                )  # fmt: skip
                ranks.start(command, variables | more)
        except BaseException:
            ranks.end()
            if host is not None:
                host.close()
            raise
        return Launch(ranks, network, switch=host)
    lab = Netlab(n_ranks, rate, switch=switch, **lab_options)
    lab.__enter__()
    try:
        return Launch(lab.start(command, env, grace_s=grace_s, on_line=on_line), lab.network, lab)
    except BaseException:
        lab.close()
        raise


def run_gradwire(
    arguments: Sequence[str],
    n_ranks: int,
    rate: str | float | Sequence[str | float | None] | None = None,
    on_line: Callable[[int, str], None] = lambda rank, line: print(line, flush=True),
    **options: Any,
) -> bool:
    """Run `gradwire ARGUMENTS` in `n_ranks` processes to the end, and say so where links cannot be limited.

    Args: see `start_ranks`.
    Returns: whether the links were shaped.
    Raises: InvalidArgument, Unsupported, PeerLost (a rank failed; its own words are on standard error).
    """
    command = [sys.executable, "-m", "gradwire", *arguments]
    with end_on_signals(), start_ranks(command, n_ranks, rate, on_line=on_line, **options) as launch:
        if rate not in (None, "none") and not launch.shaped:
            print(
                f"Links cannot be limited on this machine (docs/netlab.md says what that needs): not {rate},",
                flush=True,
            )
            print("what follows runs on loopback without a limit, where almost nothing waits.", flush=True)
        launch.wait().raise_if_failed()
        return launch.shaped


def launch_ranks(
    command: Sequence[str],
    n_ranks: int,
    env: Mapping[str, str] | None = None,
    *,
    rate: str | float | Sequence[str | float | None] | None = None,
    timeout_s: float | None = None,
    **options: Any,
) -> int:
    """Run `command` in `n_ranks` processes to the end; SIGTERM, SIGHUP and Ctrl-C reach them.

    Args: see `start_ranks`; `timeout_s` ends the ranks when it is over.
    Returns: 0, or the first failed rank's exit status (LaunchResult.status), with the rank named on standard error.
    """
    with end_on_signals(), start_ranks(command, n_ranks, rate, env=env, **options) as launch:
        result = launch.wait(timeout_s)
    if result.status != 0:
        print(f"gradwire: {result}", file=sys.stderr)
    return result.status
