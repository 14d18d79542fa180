"""A rank for the tests: all-reduces by torch, or trains by the scheme that is named, until it fails; prints a line now and
then, and the error."""

import datetime
import itertools
import sys

import torch
import torch.distributed as dist

import gradwire

dist.init_process_group("gloo")
if sys.argv[1] == "all-reduce":
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))  # short, but not for the start on a busy machine
    tensor = torch.zeros(1 << 16)

    def turn() -> None:
        dist.all_reduce(tensor, group=group)
else:
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 500))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    gradwire.attach(ddp, optimizer, sys.argv[1], timeout_s=4)

    def turn() -> None:
        optimizer.zero_grad()
        ddp(torch.ones(1, 100)).square().mean().backward()
        optimizer.step()


try:
    for number in itertools.count():
        turn()
        if number % 20 == 0:
            print("turn", number, flush=True)
except (gradwire.PeerLost, RuntimeError) as error:
    print(type(error).__name__, error, flush=True)
    sys.exit(3)
