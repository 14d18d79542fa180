"""A model with an attachment is copied, saved and wrapped as DDP's own are; odd optimizers and hook states are told apart."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from ddp_cases import adamw, attach, batches, build_model, finish, sgd, take_step, wrap
from torch.optim.swa_utils import AveragedModel

import gradwire
from gradwire import schemes
from ranks import agree, on_ranks


def saved_and_loaded(ddp: Any) -> Any:
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@on_ranks(2)
def test_model_with_an_attachment_is_copied_and_saved_as_any_other(rank: int, world_size: int) -> None:
    for scheme in ("gcomp", "one-bit", "broadcast"):
        ddp = wrap(build_model())
        optimizer = adamw(ddp)
        attachment = attach(ddp, optimizer, schemes.by_name(scheme, **schemes.as_published(scheme, {})))
        for state in ("attached", "closed"):
            for batch in batches(rank, 2):
                take_step(ddp, optimizer, batch)
            if state == "closed":
                attachment.close()
            attachment.flush()
            twins = [copy.deepcopy(ddp), saved_and_loaded(ddp), AveragedModel(ddp).module]
            for twin in twins:
                for mine, theirs in zip(ddp.parameters(), twin.parameters(), strict=True):
                    assert torch.equal(mine, theirs), (scheme, state)
        for twin in twins:  # a copy trains by itself, and with an attachment of its own
            twin_optimizer = sgd(twin)
            take_step(twin, twin_optimizer, next(batches(rank)))
            again = gradwire.attach(twin, twin_optimizer, scheme, timeout_s=100)
            for batch in batches(rank, 3):
                take_step(twin, twin_optimizer, batch)
            assert agree(finish(twin, again)), scheme
    hooked = wrap(build_model())
    state = gradwire.HookState("plain", timeout_s=100)
    hooked.register_comm_hook(state, gradwire.ddp_hook)
    assert saved_and_loaded(copy.deepcopy(hooked)).module is not hooked.module
    state.close()


class HandedThrough(torch.optim.Optimizer):
    """As Accelerate wraps an optimizer: a torch Optimizer by name alone, without its own fields."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


@on_ranks(2)
def test_optimizer_that_hands_through_to_another_is_taken_for_the_one_inside(rank: int, world_size: int) -> None:
    ddp = wrap(build_model())
    with pytest.raises(gradwire.Unsupported, match=r"attach the optimizer inside it \(AdamW\)"):
        gradwire.attach(ddp, HandedThrough(adamw(ddp)), "broadcast", timeout_s=100)
    HandedThrough.__module__ = "accelerate.optimizer"
    for scheme in ("gcomp", "broadcast", "acp-sgd"):
        ends = []
        for given in (HandedThrough, lambda optimizer: optimizer):
            ddp = wrap(build_model())
            optimizer = given(adamw(ddp))
            attachment = attach(ddp, optimizer, schemes.by_name(scheme, **schemes.as_published(scheme, {})))
            for batch in batches(rank):
                take_step(ddp, optimizer, batch)
            ends.append(finish(ddp, attachment))
        assert torch.equal(*ends), scheme


@pytest.mark.parametrize("what", ["nothing", "group"])
@on_ranks(2, raises=Exception, match="needs a gradwire.HookState, got")
def test_hook_with_another_state_says_what_it_needs(rank: int, world_size: int, what: str) -> None:
    ddp = wrap(build_model())
    ddp.register_comm_hook(None if what == "nothing" else ddp.process_group, gradwire.ddp_hook)
    take_step(ddp, sgd(ddp), next(batches(rank)))
