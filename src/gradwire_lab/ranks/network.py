"""What a rank finds in its environment: torchrun's variables, and the network, so that every result carries it.

`GRADWIRE_NETWORK` is "netlab 1000000000" (all links alike), "netlab 1000000000,100000000" (one rate a rank, "none" for
an unshaped link), "netlab 100000000 nodes=2x4" (two links with four ranks behind each), "netlab 100000000 way=delay=20ms"
or "loopback"; `GRADWIRE_RANKS_ON_MACHINE` is how many ranks share this machine's cores.
"""

import os
import random
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from gradwire.errors import InvalidArgument, Unsupported

NETWORK_VARIABLE = "GRADWIRE_NETWORK"
RANKS_VARIABLE = "GRADWIRE_RANKS_ON_MACHINE"


@dataclass(frozen=True)
class Network:
    """One run's network: `kind` is netlab, loopback, or unspecified (a cluster of the user's own)."""

    kind: str
    rates_bps: tuple[int | None, ...] = ()  # per rank, at the start of the run; one entry stands for all
    n_ranks_on_machine: int | None = None
    ranks_per_node: int = 1  # behind each link
    way: str = ""  # of links with a distance: what follows their rate ("delay=20ms/loss=0.05%")

    @property
    def shaped(self) -> bool:
        """Whether any link has a limit set by us."""
        return any(rate is not None for rate in self.rates_bps)

    @property
    def rate_bps(self) -> int | None:
        """The rate of most links; None when it is not limited or not known."""
        return Counter(self.rates_bps).most_common(1)[0][0] if self.rates_bps else None

    def to_variables(self) -> dict[str, str]:
        """The environment variables that `current_network` reads."""
        words = ["none" if rate is None else str(rate) for rate in self.rates_bps]
        text, n_ranks = f"{self.kind} {','.join(words[:1] if len(set(words)) == 1 else words)}", self.n_ranks_on_machine
        if n_ranks is not None and self.ranks_per_node > 1:
            text += f" nodes={n_ranks // self.ranks_per_node}x{self.ranks_per_node}"
        text += f" way={self.way}" if self.way else ""
        return {NETWORK_VARIABLE: text.strip(), **({} if n_ranks is None else {RANKS_VARIABLE: str(n_ranks)})}

    def __str__(self) -> str:
        return self.to_variables()[NETWORK_VARIABLE]


def current_network(environment: Mapping[str, str] | None = None) -> Network:
    """The network of this process, from its environment (`os.environ` unless given). Raises: InvalidArgument."""
    environment = os.environ if environment is None else environment
    kind, _, rates = environment.get(NETWORK_VARIABLE, "unspecified").partition(" ")
    ranks = environment.get(RANKS_VARIABLE)
    rates, _, way = rates.partition(" way=")
    rates, _, nodes = rates.partition("nodes=")
    try:
        per_node = int(nodes.partition("x")[2]) if nodes else 1
        words = rates.strip().split(",") if rates.strip() else []
        rates_bps = tuple(None if word == "none" else int(word) for word in words)
        return Network(kind, rates_bps, None if ranks is None else int(ranks), per_node, way)
    except ValueError as error:
        raise InvalidArgument(
            f"{NETWORK_VARIABLE}={environment.get(NETWORK_VARIABLE)!r}, {RANKS_VARIABLE}={ranks!r}: {error}; unset them"
        ) from error


def find_free_port() -> int:
    """A TCP port on 127.0.0.1 that is free now, and likely to be when a rank has started and listens there. Not one
    that the kernel picks: it would give the same one to the next that asks, or to an outgoing connection, in the
    seconds that the rank takes to import torch. Linux picks from 32768 on."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise Unsupported("none of a hundred TCP ports of 127.0.0.1 between 20000 and 32000 is free")
