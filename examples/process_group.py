"""gradwire below the framework: DDP as it is, on a process group whose all-reduces go through a scheme.

torchrun --nproc-per-node 2 examples/process_group.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

gradwire.register_backend("gcomp:importance=uniform,bits=12")
dist.init_process_group("gradwire")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 16)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(20):
    x = torch.randn(32, 64, generator=generator)
    loss = (model(x) - x[:, :16]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

n_bytes = sum(stats["bytes_sent"] for stats in dist.group.WORLD.stats().values())
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}, {n_bytes:,} bytes sent")
dist.destroy_process_group()
