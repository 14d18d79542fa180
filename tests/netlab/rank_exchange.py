"""A rank for the tests: trains by the scheme that is named until an exchange fails; prints a line a turn, and the error."""

import sys

import torch
import torch.distributed as dist

import gradwire

dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 500))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
gradwire.attach(ddp, optimizer, sys.argv[1], timeout_s=4)
try:
    for turn in range(100_000):
        optimizer.zero_grad()
        ddp(torch.ones(1, 100)).square().mean().backward()
        optimizer.step()
        if turn % 20 == 0:
            print("turn", turn, flush=True)
except gradwire.PeerLost as error:
    print("PeerLost", error, flush=True)
    sys.exit(3)
