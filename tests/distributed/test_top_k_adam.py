"""top-k-adam's messages, and what waits where a parameter is not used; its trainings are in test_frozen_adam.py."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from frozen_adam_oracle import FREEZE, SHARE, attach, start
from gradwire.codecs.selection import take_largest
from gradwire_lab.schemes.top_k_adam import ShortElements
from ranks import on_ranks, run_ranks

BLOCK = 65_536


def packed(n_elements: int, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """The values, what was left of them, and the payload."""
    values = torch.randn(n_elements, generator=torch.Generator().manual_seed(n_elements))
    left = values.clone()
    indices, taken, is_finite = take_largest(left, max(1, round(share * n_elements)))
    assert is_finite
    return values, left, ShortElements().pack(indices, taken, left)


def is_noted(payload: Tensor, n_elements: int) -> bool:
    """Whether the wire is told that a message is not whole, or its elements lie outside of the bucket."""
    wire = mock.Mock()
    indices, _ = ShortElements().unpack(payload, n_elements, wire)
    (is_wrong,) = wire.note_error.call_args.args
    return bool(is_wrong) or not bool(((indices >= 0) & (indices < n_elements)).all())


@pytest.mark.parametrize("n_elements", [1, 1_000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
@pytest.mark.parametrize("share", [1e-5, 0.01, 1.0])
def test_the_largest_come_back_in_bfloat16_and_the_rest_stays(n_elements: int, share: float) -> None:
    values, left, payload = packed(n_elements, share)
    k = max(1, round(share * n_elements))
    assert payload.numel() == -(-n_elements // BLOCK) + k
    assert not is_noted(payload, n_elements)
    indices, taken = ShortElements().unpack(payload, n_elements, mock.Mock())
    expected = torch.zeros(n_elements)
    places = values.abs().argsort(descending=True)[:k]
    expected[places] = values[places].bfloat16().float()
    assert torch.equal(torch.zeros(n_elements).index_add(0, indices, taken), expected)
    assert torch.equal(left, values - expected)


@pytest.mark.parametrize("word", [0, 1, 2, -1])
def test_a_wrong_count_or_place_is_noted(word: int) -> None:
    n_elements = 2 * BLOCK + 5
    _, _, payload = packed(n_elements, 0.001)
    altered = payload.clone()
    if word < 0:  # all in the last block, of 5 values
        altered[0], altered[1], altered[2] = 0, 0, payload[:3].sum()
    else:
        altered[word] += 1
    assert is_noted(altered, n_elements)
    altered = payload.clone()
    altered[0], altered[1] = -1, payload[0] + payload[1] + 1
    assert is_noted(altered, n_elements)


@on_ranks(3)
def test_an_element_is_four_bytes(rank: int, world_size: int) -> None:
    training = start(rank, "top-k-adam", share=SHARE)
    training.take_steps(range(FREEZE + 2))
    sent = [step.bytes_sent for step in training.attachment.recorder.steps]
    training.close()
    message = 4 * (3 + 1 + round(SHARE * training.flat().numel()))  # checksum, finite, CRC; one block; the elements
    assert sent[-1] == 2 * message
    assert sent[FREEZE - 1] > 2 * message


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.branch = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, uses_branch: bool) -> Tensor:
        x = torch.tanh(self.stem(x))
        return (self.branch(x) if uses_branch else x).square().mean()


def leave_out(rank: int, world_size: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Momentum, residual, running mean and weight of the branch: at first, after a step that only rank 0 used it in,
    and after one that no rank did."""
    ddp = DistributedDataParallel(Branched(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
    attachment = attach(ddp, optimizer, scheme="top-k-adam", share=SHARE)
    seen = []
    for step in range(FREEZE + 4):
        optimizer.zero_grad()
        uses_branch = step < FREEZE + 2 or (step == FREEZE + 2 and rank == 0)
        ddp(torch.randn(8, 6, generator=torch.Generator().manual_seed(9 * step + rank)), uses_branch).backward()
        optimizer.step()
        if step > FREEZE:
            state, weight = attachment.state_dict()["state"], ddp.module.branch.weight
            own = [state[kind]["branch.weight"].clone() for kind in ("momenta", "residuals")]
            seen.append([*own, optimizer.state[weight]["exp_avg"].clone(), weight.detach().clone()])
    attachment.close()
    return seen, [parameter.detach().clone() for parameter in ddp.parameters()]


def test_what_a_rank_did_not_use_waits_there() -> None:
    (first, ours), (second, theirs) = run_ranks(leave_out, 2)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    before, by_one, by_none = first
    assert not any(torch.equal(one, other) for one, other in zip(before, by_one, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(by_one, by_none, strict=True))
    before, by_one, by_none = second
    assert all(torch.equal(one, other) for one, other in zip(before[:2], by_one[:2], strict=True))
    assert not torch.equal(before[3], by_one[3]), "the other rank's updates are taken"
    assert all(torch.equal(one, other) for one, other in zip(by_one, by_none, strict=True))
