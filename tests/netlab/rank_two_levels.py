"""What a rank does in test_netlab_nodes: NAME NODES STEPS; one step reduces 4 MB."""

import os
import sys

import torch
import torch.distributed as dist

import gradwire
from gradwire.schemes.two_level import TwoLevel

name, topology, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo")
rank, local = dist.get_rank(), int(os.environ["LOCAL_WORLD_SIZE"])
assert int(os.environ["LOCAL_RANK"]) == rank % local
assert int(os.environ["GROUP_RANK"]) == rank // local
if topology == "inside":  # a group for each node: nothing goes through a link
    first = rank // local * local
    reducer = gradwire.Reducer(name, group=list(range(first, first + local)), timeout_s=60)
else:
    reducer = gradwire.Reducer(TwoLevel(name) if topology == "two-level" else name, timeout_s=60)
values = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(rank))
for _ in range(steps):
    reducer.all_reduce({"w": values.clone()}).wait()
reducer.close()
dist.destroy_process_group()
