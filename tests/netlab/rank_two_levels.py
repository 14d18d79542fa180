"""What a rank does in test_netlab_nodes: NAME:TOPOLOGY...; a step reduces 16 MB. Rank 0 prints what its node has sent."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import gradwire
from gradwire.schemes.two_level import TwoLevel

N_STEPS = 2


def read_sent_bytes() -> int:
    """By all of this node: its ranks share the interface."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, columns = line.partition(":")
        if name.strip() == os.environ["GLOO_SOCKET_IFNAME"]:
            return int(columns.split()[8])
    raise SystemExit("no such interface")


def make(name: str, topology: str) -> gradwire.Reducer:
    if topology == "inside":  # a group for each node: nothing goes through a link
        first = rank // local * local
        return gradwire.Reducer(name, group=list(range(first, first + local)), timeout_s=60)
    return gradwire.Reducer(TwoLevel(name) if topology == "two-level" else name, timeout_s=60)


dist.init_process_group("gloo")
rank, local = dist.get_rank(), int(os.environ["LOCAL_WORLD_SIZE"])
assert int(os.environ["LOCAL_RANK"]) == rank % local
assert int(os.environ["GROUP_RANK"]) == rank // local
values = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(rank))
for case in sys.argv[1:]:
    reducer = make(*case.split(":"))
    reducer.all_reduce({"w": values.clone()}).wait()  # what only a first step sends
    dist.barrier()
    before = read_sent_bytes()
    dist.barrier()  # nobody begins before all have read
    for _ in range(N_STEPS):
        reducer.all_reduce({"w": values.clone()}).wait()
    dist.barrier()
    sent = (read_sent_bytes() - before) / N_STEPS
    reducer.close()
    if rank == 0:
        print(json.dumps({"case": case, "sent": sent / values.nbytes}), flush=True)
dist.destroy_process_group()
