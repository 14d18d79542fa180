"""Ray Train: `prepare_model` gives a DDP model on each worker, and that is what gradwire takes.

python examples/ray_train.py    # two workers on CPUs; needs `pip install "ray[train]"`
"""

import tempfile
import zlib

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

import gradwire


def train(settings: dict) -> None:
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    ddp = prepare_model(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    attachment = gradwire.attach(ddp, optimizer, settings["scheme"])

    generator = torch.Generator().manual_seed(rank)
    for _ in range(50):
        x = torch.randn(16, 32, generator=generator)
        optimizer.zero_grad()
        loss = (ddp(x) - x[:, :8]).square().mean()
        loss.backward()
        optimizer.step()

    flat = torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])
    parameters = f"{zlib.crc32(flat.numpy().tobytes()):08x}"
    print(f"loss {loss.item():.3f}, {attachment.stats()['bytes_sent']:,} bytes sent, parameters {parameters}")
    attachment.close()


if __name__ == "__main__":
    ray.init(num_cpus=3, include_dashboard=False)  # two workers and the trainer
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            train,
            train_loop_config={"scheme": "gcomp"},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=folder),
        ).fit()
