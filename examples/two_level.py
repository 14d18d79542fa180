"""Several ranks a node: plain sums inside the node, a scheme between nodes; each value leaves a node once.

torchrun --nnodes 2 --nproc-per-node 2 ... examples/two_level.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

# Ranks a node are LOCAL_WORLD_SIZE, which torchrun sets; without two nodes, two ranks stand for one here.
nodes = min(2, int(os.environ["LOCAL_WORLD_SIZE"]))
attachment = gradwire.attach(ddp, optimizer, gradwire.schemes.TwoLevel("gcomp", nodes))

generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(20):
    x = torch.randn(16, 32, generator=generator)
    loss = (ddp(x) - x[:, :8]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}, {attachment.stats()['bytes_sent']:,} bytes sent between nodes")
attachment.close()
dist.destroy_process_group()
