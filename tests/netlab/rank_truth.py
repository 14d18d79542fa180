"""A rank for the tests: trains a few steps under each scheme named; prints what it counted and what the kernel sent."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import gradwire_lab  # noqa: F401 - registers the baselines
from gradwire import schemes

HEADER_BYTES = 14 + 20 + 32  # Ethernet, IPv4, TCP with time stamps: of every packet, acknowledgements too
N_WARM, N_STEPS = 3, 4  # DDP rebuilds its buckets after the first
LONGER = {"auto": (12, 8), "periodic": (8, 8), "slimgc": (12, 8)}  # they measure in the first 10; it sends in every 8th


def read_kernel() -> tuple[int, int]:
    """(bytes, packets) that this rank's interface has sent, of all ranks that share it."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, columns = line.partition(":")
        if name.strip() == interface:
            return int(columns.split()[8]), int(columns.split()[9])
    raise SystemExit(f"no interface {interface}")


def train(scheme: str) -> dict[str, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 700), nn.Linear(700, 512))
    ddp = DistributedDataParallel(model)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3, momentum=0.9)
    if schemes.needs_momenta(scheme):
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    attachment = gradwire.attach(ddp, optimizer, scheme)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def take_steps(n_steps: int) -> None:
        for _ in range(n_steps):
            optimizer.zero_grad()
            ddp(torch.randn(8, 512, generator=generator)).square().mean().backward()
            optimizer.step()

    n_warm, n_steps = LONGER.get(scheme, (N_WARM, N_STEPS))
    take_steps(n_warm)
    attachment.flush()  # blocks that are still on their way are counted when they have come
    counted = attachment.stats()["bytes_sent"]
    dist.barrier()
    before = read_kernel()
    take_steps(n_steps)
    attachment.flush()
    counted = attachment.stats()["bytes_sent"] - counted
    dist.barrier()  # now everything sent has arrived, so the kernel has counted it
    after = read_kernel()
    attachment.close()
    return {"counted": counted, "kernel": after[0] - before[0], "packets": after[1] - before[1], "steps": n_steps}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        print(json.dumps({"rank": dist.get_rank(), "scheme": name, **train(name)}), flush=True)
    dist.destroy_process_group()
