"""What a rank finds in its environment, wherever it is started."""

from __future__ import annotations

import os
import random
import socket

from gradwire.errors import Unsupported
from gradwire_lab.ranks.network import Network

__all__ = ["find_free_port", "rank_environment"]


def find_free_port() -> int:
    """A TCP port on 127.0.0.1 that is free now, and likely to be when a rank has started and listens there.

    Not one that the kernel picks: it would give the same one to the next that asks, or to an outgoing connection, in the
    seconds that the rank takes to import torch. Linux picks from 32768 on.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise Unsupported("none of a hundred TCP ports of 127.0.0.1 between 20000 and 32000 is free")


def rank_environment(
    rank: int,
    n_ranks: int,
    network: Network,
    *,
    address: str,
    port: int,
    interface: str,
    ranks_per_node: int | None = None,
) -> dict[str, str]:
    """This process's environment with one rank's variables: torchrun's, Gloo's interface, the network's description.

    `ranks_per_node`: how many share a node (default: all).
    OMP_NUM_THREADS is 1 unless set, as with torchrun: ranks on one machine share its cores.
    """
    local = ranks_per_node or n_ranks
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        **network.to_variables(),
    }
