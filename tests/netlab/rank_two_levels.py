"""What a rank does in test_truth_of_byte_counts: NAME:TOPOLOGY...; a step reduces 4 MB. Rank 0 prints what its node has sent:
`framed` as its interface counts it, and `sent` without the headers of Ethernet, IP and TCP, both by the gradient's bytes."""

import json
import os
import sys

import torch
import torch.distributed as dist
from rank_truth import HEADER_BYTES, read_kernel

import gradwire
from gradwire.schemes.two_level import TwoLevel

N_STEPS = 8


def make(name: str, topology: str) -> gradwire.Reducer:
    if topology == "inside":  # a group for each node: nothing goes through a link
        first = rank // local * local
        return gradwire.Reducer(name, group=list(range(first, first + local)), timeout_s=60)
    return gradwire.Reducer(TwoLevel(name) if topology == "two-level" else name, timeout_s=60)


dist.init_process_group("gloo")
rank, local = dist.get_rank(), int(os.environ["LOCAL_WORLD_SIZE"])
assert int(os.environ["LOCAL_RANK"]) == rank % local
assert int(os.environ["GROUP_RANK"]) == rank // local
values = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(rank))
for case in sys.argv[1:]:
    reducer = make(*case.split(":"))
    reducer.all_reduce({"w": values.clone()}).wait()  # what only a first step sends
    dist.barrier()
    framed, sent = [], []
    for _ in range(N_STEPS):
        before = read_kernel()
        dist.barrier()  # else another rank of the node may have sent some of the step before this one reads
        reducer.all_reduce({"w": values.clone()}).wait()
        dist.barrier()
        n_bytes, n_packets = (after - earlier for after, earlier in zip(read_kernel(), before, strict=True))
        dist.barrier()
        framed.append(n_bytes / values.nbytes)
        sent.append((n_bytes - HEADER_BYTES * n_packets) / values.nbytes)
    reducer.close()
    if rank == 0:  # the least: on a busy machine TCP sends some packets twice
        print(json.dumps({"case": case, "framed": sum(framed) / N_STEPS, "sent": min(sent)}), flush=True)
dist.destroy_process_group()
