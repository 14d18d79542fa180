"""FSDP2 inside each node, gradwire on the slow link between nodes.

    torchrun --nnodes 2 --nproc-per-node 2 ... examples/fsdp2_between_nodes.py

Here on the CPU; four ranks of one machine stand for two nodes of two.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)  # HSDP: whole copies between nodes, shards inside
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

attachment = gradwire.attach(model, optimizer, "gcomp")  # takes the all-reduce between nodes over

generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(20):
    x = torch.randn(16, 32, generator=generator)
    loss = (model(x) - x[:, :8]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}, {attachment.stats()['bytes_sent']:,} bytes sent between nodes")
attachment.close()
dist.destroy_process_group()
