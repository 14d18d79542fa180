"""One process: a script for several ranks runs unchanged, and an attachment takes no part in what is forked from it."""

import logging
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import InvalidArgument, Unsupported
from ranks import on_ranks


def train(scheme: str) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attachment = gradwire.attach(model, optimizer, scheme)
    for _ in range(2):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    attachment.load_state_dict(attachment.state_dict(all_ranks=True))
    attachment.switch("one-bit")
    assert "the user's" in str(attachment.fail(ValueError("the user's own")))
    stats = attachment.stats()
    attachment.close()
    assert attachment.closed
    return stats


@pytest.mark.parametrize("scheme", ["auto", "gcomp"])
def test_a_model_that_nothing_wraps_is_left_alone_by_one_process(
    scheme: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert train(scheme) == {"scheme": scheme, "world_size": 1}
    assert [record.message for record in caplog.records if "one rank has nothing to exchange" in record.message]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises((Unsupported, InvalidArgument), match=r"name a scheme|not initialised"):
        train(scheme)


@on_ranks(1)
def test_so_it_is_by_a_group_of_one(rank: int, world_size: int) -> None:
    assert train("auto") == {"scheme": "auto", "world_size": 1}


@on_ranks(1)
def test_timeouts_are_numbers_that_a_clock_can_count(rank: int, world_size: int) -> None:
    for timeout_s in (float("inf"), float("nan"), 1e30, 10**400, "x", 0):
        with pytest.raises(InvalidArgument, match=r"timeout_s is a number of seconds above 0"):
            gradwire.Reducer("one-bit", timeout_s=timeout_s)  # type: ignore[arg-type]


@on_ranks(2)
def test_backward_in_a_forked_child_says_that_it_was_forked(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    attachment = gradwire.attach(ddp, torch.optim.SGD(ddp.parameters(), 0.1), "one-bit", timeout_s=20)
    for _ in range(3):  # until DDP has cut its buckets anew, for which it needs its group
        ddp(torch.ones(4, 3)).sum().backward()
    dist.barrier()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            ddp(torch.ones(4, 3)).sum().backward()
        except InvalidArgument as error:
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ddp(torch.ones(4, 3)).sum().backward()  # the parent goes on
    attachment.close()
    assert code == 7


@on_ranks(2)
def test_what_one_process_saved_several_begin_anew_from(rank: int, world_size: int) -> None:
    reducer = gradwire.Reducer("one-bit", names={"x": torch.ones(4)}, timeout_s=100)
    reducer.load_state_dict({"alone": True})
    assert reducer.step == 0
    reducer.close()
