"""A complete data-parallel script with gradwire. Run it with: torchrun --nproc-per-node 4 examples/ddp_minimal.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import gradwire  # 1 of 2


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)  # the same weights and data on every rank

    # A task that can be learned: the class with the largest of ten noisy sums.
    inputs = torch.randn(4096, 64)
    targets = (inputs @ torch.randn(64, 10)).argmax(1)
    dataset = TensorDataset(inputs, targets)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    attachment = gradwire.attach(ddp, optimizer, "gcomp")  # 2 of 2

    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            ratio = attachment.stats()["ratio"]
            print(f"epoch {epoch}: loss {loss.item():.4f}, {ratio:.1%} of the bytes of a float32 all-reduce")

    attachment.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
