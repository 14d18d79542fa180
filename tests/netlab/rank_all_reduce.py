"""A rank for the tests: all-reduces in turns until one fails; prints a line a turn."""

import datetime

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
tensor = torch.ones(1 << 16)
for turn in range(100_000):
    dist.all_reduce(tensor)
    tensor.fill_(1)
    if turn % 50 == 0:
        print("turn", turn, flush=True)
