"""Muon for the matrices, AdamW for the rest: `attach` takes both. A run that stops and resumes ends with the same bits.

torchrun --nproc-per-node 2 examples/muon_and_adamw.py [--save FOLDER | --load FOLDER]"""

import argparse
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

parser = argparse.ArgumentParser()
parser.add_argument("--save", type=Path, help="stop after half of the steps, and write a state for each rank there")
parser.add_argument("--load", type=Path, help="go on from what --save wrote")
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(64, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
)
hidden = [model[1].weight, model[3].weight]  # Muon is for hidden matrices: not for embeddings, heads, norms and biases
rest = [parameter for parameter in model.parameters() if not any(parameter is matrix for matrix in hidden)]
optimizers = [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]
parts = [model, *optimizers]
states = torch.load(args.load / f"rank{dist.get_rank()}.pt") if args.load else []
for part, state in zip(parts, states, strict=False):
    part.load_state_dict(state)


def train(first: int, last: int, scheme_state: dict | None = None) -> dict:
    """Wrap the model, take these steps and return the attachment's state."""
    ddp = DistributedDataParallel(model)
    attachment = gradwire.attach(ddp, optimizers, "gcomp", importance="uniform", bits=12)
    if scheme_state is not None:
        attachment.load_state_dict(scheme_state)
    for step in range(first, last):
        x = torch.randint(64, (32,), generator=torch.Generator().manual_seed(1_000 * step + dist.get_rank()))
        loss = (ddp(x) - (x % 7)[:, None] / 7).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    print(f"rank {dist.get_rank()}: loss {loss.item():.3f}, {attachment.stats()['bytes_sent']:,} bytes sent")
    scheme_state = attachment.state_dict()
    attachment.close()
    return scheme_state


state = states[-1] if states else train(0, 20)
if args.save:
    torch.save([*(part.state_dict() for part in parts), state], args.save / f"rank{dist.get_rank()}.pt")
else:
    train(20, 40, state)
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"parameters {zlib.crc32(bits):08x}")
dist.destroy_process_group()
