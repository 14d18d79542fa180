"""FSDP2 over all ranks: weights travel bit for bit in fewer bytes, gradients by a scheme.

torchrun --nproc-per-node 2 examples/fsdp2_shards.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradwire

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 8))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

attachment = gradwire.attach(model, optimizer, "gcomp", weights="exact")

generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(20):
    x = torch.randn(16, 32, generator=generator)
    loss = (model(x).float() - x[:, :8]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

stats = attachment.stats()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}, {stats['bytes_sent']:,} bytes sent")
    for kind in ("weights", "gradients"):
        print(f"{kind}: {stats[f'{kind}_bytes_sent'] / stats[f'{kind}_original_bytes']:.2f} of FSDP2's bytes")
attachment.close()
dist.destroy_process_group()
