"""A loop of one's own, without DDP: gradwire averages named tensors.

torchrun --nproc-per-node 2 examples/custom_loop.py
"""

import torch
import torch.distributed as dist
from torch import nn

import gradwire

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

reducer = gradwire.Reducer("one-bit", names=model)  # error feedback belongs to the names

generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(20):
    x = torch.randn(16, 32, generator=generator)
    loss = (model(x) - x[:, :8]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    work = reducer.all_reduce({name: p.grad for name, p in model.named_parameters()})
    # ... whatever else there is to do ...
    work.wait()
    optimizer.step()

if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}, {reducer.stats()['bytes_sent']:,} bytes sent")
reducer.close()
dist.destroy_process_group()
