"""Local SGD whose ranks may die, leave and join at any outer step: torchft's lighthouse says who is there.

torchft_lighthouse --min_replicas 2 --bind 0.0.0.0:29510                              # once, on any host
TORCHFT_LIGHTHOUSE=http://HOST:29510 python examples/diloco_elastic.py 0              # 1, 2, ... on others

Here, alone: torchrun --nproc-per-node 2 examples/diloco_elastic.py (needs `pip install torchft`).
"""

import datetime
import os
import socket
import sys

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager
from torchft.coordination import LighthouseServer

import gradwire

number = int(sys.argv[1] if len(sys.argv) > 1 else os.environ["RANK"])
lighthouse, address, host = None, os.environ.get("TORCHFT_LIGHTHOUSE"), socket.gethostname()
if address is None:  # all on this host
    host = "127.0.0.1"
    dist.init_process_group("gloo")
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2) if number == 0 else None
    addresses = [lighthouse.address() if lighthouse else None]
    dist.broadcast_object_list(addresses)
    address = addresses[0]

torch.manual_seed(number)  # a rank that comes takes the model of those that are there
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=gradwire.Members(), use_async_quorum=False, min_replica_size=2, load_state_dict=None, state_dict=None,
    rank=0, world_size=1, store_addr=host, store_port=store.port, lighthouse_addr=address,
    replica_id=f"rank{number}", quorum_timeout=datetime.timedelta(minutes=10),
)  # fmt: skip
loop = gradwire.LocalSgd(model, optimizer, "embedded-float:bits=4", every=10, group=manager)

generator = torch.Generator().manual_seed(number)
while manager.current_step() < 8:  # exchanges that are done
    x = torch.randn(16, 32, generator=generator)
    loss = (model(x) - x[:, :8]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

print(
    f"loss {loss.item():.3f}, {loop.stats()['bytes_sent']:,} bytes sent, {manager.num_participants()} ranks at the end"
)
loop.close()
manager.shutdown(wait=False)
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
