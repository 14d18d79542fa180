"""Accelerate: one line after `prepare`; `save_state` and `load_state` carry the scheme's state.

torchrun --nproc-per-node 2 examples/accelerate_train.py [--steps 8] [--save DIR] [--load DIR]
"""

import argparse
import zlib

import torch
from accelerate import Accelerator
from torch import nn

from gradwire.integrations.accelerate import attach

parser = argparse.ArgumentParser()
parser.add_argument("--scheme", default="auto")
parser.add_argument("--first", type=int, default=0)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--save")
parser.add_argument("--load")
args = parser.parse_args()

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))

attachment = attach(accelerator, model, optimizer, args.scheme)

if args.load:
    accelerator.load_state(args.load)
for step in range(args.first, args.steps):
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(2 * step + accelerator.process_index))
    accelerator.backward((model(x) - x.roll(1, 1)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
if args.save:
    accelerator.save_state(args.save)

if accelerator.is_main_process:
    print(
        f"parameters {zlib.crc32(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()):08x}"
    )
attachment.close()
accelerator.end_training()
