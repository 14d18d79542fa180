"""torchft: gradwire reduces inside each replica group, torchft's manager between the groups that are there.

torchrun --nproc-per-node 2 examples/torchft_manager.py    # one group of two ranks; needs `pip install torchft`
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

import gradwire

dist.init_process_group("gloo")
rank = dist.get_rank()
lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1) if rank == 0 else None
address = [lighthouse.address() if lighthouse else None]
dist.broadcast_object_list(address)  # of a service of its own, where there are several groups

torch.manual_seed(0)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)))
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
attachment = gradwire.attach(ddp, optimizer, "gcomp")

manager = Manager(
    pg=ProcessGroupGloo(), min_replica_size=1, use_async_quorum=False, lighthouse_addr=address[0],
    load_state_dict=lambda state: ddp.load_state_dict(state), state_dict=ddp.state_dict,
    rank=rank, world_size=dist.get_world_size(), store_addr=os.environ["MASTER_ADDR"],
    store_port=int(os.environ["MASTER_PORT"]),
)  # fmt: skip
generator = torch.Generator().manual_seed(rank)
for _ in range(50):
    manager.start_quorum()
    x = torch.randn(16, 32, generator=generator)
    optimizer.zero_grad()
    loss = (ddp(x) - x[:, :8]).square().mean()
    loss.backward()
    for parameter in ddp.parameters():
        manager.allreduce(parameter.grad).wait()
    if manager.should_commit():
        optimizer.step()

if rank == 0:
    print(f"loss {loss.item():.3f}, {attachment.stats()['bytes_sent']:,} bytes sent, step {manager.current_step()}")
attachment.close()
manager.shutdown(wait=False)
dist.destroy_process_group()
