"""Local SGD (DiLoCo): every rank steps by itself, and every 10 steps they exchange how far they went, in 4 bits.

torchrun --nproc-per-node 2 examples/diloco.py
"""

import torch
import torch.distributed as dist
from torch import nn

import gradwire

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

scheme = gradwire.schemes.by_name("embedded-float", bits=4)
loop = gradwire.LocalSgd(model, optimizer, scheme, every=10)

generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(50):
    x = torch.randn(16, 32, generator=generator)
    loss = (model(x) - x[:, :8]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # every tenth one also takes the outer step

if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}, {loop.stats()['bytes_sent']:,} bytes sent")
loop.close()
dist.destroy_process_group()
