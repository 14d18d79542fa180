"""The importance bytes lie beside their gradients in DDP's own buckets, whatever a parameter's memory layout."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire import _native
from gradwire.schemes.gcomp.importance import Promise, QuantisationMetric
from ranks import on_ranks


class Odd(torch.nn.Module):
    """Half the sum of squares of oddly laid out parameters: the gradient of each is the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.randn(4, 6, 5, 7)
        self.plain = torch.nn.Parameter(values.clone())
        self.channels_last = torch.nn.Parameter(values.contiguous(memory_format=torch.channels_last) + 1)
        self.transposed = torch.nn.Parameter(torch.randn(30, 20).t())
        self.sliced = torch.nn.Parameter(torch.randn(20, 30)[:, ::3])
        self.expanded = torch.nn.Parameter(torch.randn(3, 1, 1))
        self.empty = torch.nn.Parameter(torch.randn(0, 3))

    def forward(self) -> Tensor:
        return torch.stack([0.5 * parameter.square().sum() for parameter in self.parameters()]).sum()


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
@on_ranks(1)
def test_every_byte_belongs_to_the_gradient_at_its_place(
    rank: int, world_size: int, gradient_as_bucket_view: bool
) -> None:
    torch.manual_seed(0)
    model = Odd()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=gradient_as_bucket_view, bucket_cap_mb=0.002)
    metric = QuantisationMetric(torch.optim.SGD(model.parameters(), lr=1.0), 1, Promise(format=1))
    n_checked = 0

    # DDP reads the annotations of a hook: as types, not as strings.
    def check(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        nonlocal n_checked
        parameters, flat = bucket.parameters(), bucket.buffer()
        sizes = [parameter.numel() for parameter in parameters]
        found, expected = torch.empty((2, flat.numel()), dtype=torch.uint8)
        metric.write_importance(parameters, [sum(sizes[:i]) for i in range(len(sizes))], found)
        _native.importance(flat, None, None, 0.0, 1.0, 0.0, expected)  # SGD at rate 1: S = |parameter| = |gradient|
        assert torch.equal(found, expected)
        n_checked += flat.numel()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(flat)
        return future

    ddp.register_comm_hook(None, check)
    for _ in range(3):  # DDP rebuilds its buckets after the first step
        ddp().backward()
        model.zero_grad()
    assert n_checked == 3 * sum(parameter.numel() for parameter in model.parameters())
