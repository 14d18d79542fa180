"""Importance asked for chunk by chunk is the importance of the whole bucket, whatever the chunks cut through."""

from __future__ import annotations

import pytest
import torch

from gradwire.schemes.gcomp.importance import QuantisationMetric


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 1e-3}),
        (torch.optim.RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.9}),
    ],
)
@pytest.mark.parametrize("window", [1, 7, 64, 1_000])
def test_windows_of_any_size_add_up_to_the_whole(cls: type, options: dict, window: int) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(12, 8, 2, 2).to(memory_format=torch.channels_last))
    parameters = [
        torch.nn.Parameter(torch.randn(100)),
        weight,
        torch.nn.Parameter(torch.randn(0)),
        torch.nn.Parameter(torch.randn(3)),
    ]
    frozen = torch.nn.Parameter(torch.randn(10))  # in the bucket, in no group: byte 0
    optimizer = cls(parameters, **options)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    in_bucket = [*parameters, frozen]
    offsets = [0, 100, 484, 484, 487]
    whole = torch.empty(497, dtype=torch.uint8)
    metric = QuantisationMetric(optimizer, world_size=3)
    metric.write_importance(in_bucket, offsets, whole, 4.0)
    assert whole.count_nonzero() > 400
    pieces = torch.full_like(whole, 77)
    for start in range(0, whole.numel(), window):
        metric.of_bucket(in_bucket, offsets, 4.0).write(start, pieces[start : start + window])
    assert torch.equal(pieces, whole)
