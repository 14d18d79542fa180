"""A rank for the tests: all-reduces in turns until one fails; prints a line a turn."""

import datetime

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
group = dist.new_group(timeout=datetime.timedelta(seconds=3))  # short, but not for the start on a busy machine
tensor = torch.ones(1 << 16)
for turn in range(100_000):
    dist.all_reduce(tensor, group=group)
    tensor.fill_(1)
    if turn % 50 == 0:
        print("turn", turn, flush=True)
