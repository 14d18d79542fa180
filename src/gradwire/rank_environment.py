"""What a rank finds in its environment, wherever it is started."""

from __future__ import annotations

import os
import socket

from gradwire.network import Network

__all__ = ["find_free_port", "rank_environment"]


def find_free_port() -> int:
    """A TCP port on 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(
    rank: int,
    n_ranks: int,
    network: Network,
    *,
    address: str,
    port: int,
    interface: str,
) -> dict[str, str]:
    """This process's environment with one rank's variables: torchrun's, Gloo's interface, the network's description.

    OMP_NUM_THREADS is 1 unless set, as with torchrun: ranks on one machine share its cores.
    """
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n_ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        **network.to_variables(),
    }
