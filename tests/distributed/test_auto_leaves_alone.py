"""Under auto nothing ends that DDP trains, and auto may begin late: by a switch, or with a state loaded in mid-run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from auto_cases import Quick
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import GradwireError
from gradwire.schemes.auto.scheme import Auto
from ranks import on_ranks
from small_training import Training


@pytest.mark.parametrize(("how", "ends_at"), [("switch", 42), ("away and back", 42), ("load", 32), ("load late", 15)])
@on_ranks(2)
def test_a_switch_and_a_state_in_mid_run_are_gone_on_from(
    rank: int, world_size: int, how: str, ends_at: int
) -> torch.Tensor:
    """Long enough after whatever it is: votes are of five steps, and read two steps later."""
    quick = Quick(rank, {"one-bit": 2.0}, fidelity=["one-bit"])
    training = Training(rank, "gcomp" if how == "switch" else quick, timeout_s=100)
    attachment, saved = training.attachment, ()
    for step in range(42):
        if step == 3:
            saved = training.state()
        if step == 13 + 17 * (how == "load late"):  # late: with residuals
            if how == "switch":
                attachment.switch(Quick(rank, {}, fidelity=["bf16"]))
            elif how == "away and back":
                attachment.switch("gcomp")
                attachment.switch("auto")
            else:
                training.load(saved)
                assert attachment.step == 3
                assert not attachment.session.feedback.state_by_name(attachment.session.slots)
        training.take_steps([step])
    assert attachment.step == ends_at
    attachment.close()
    gradwire.attach(training.ddp, training.optimizer, timeout_s=100).close()  # and it may be attached again
    return training.flat()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 1, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.fft.fft(x) @ self.weight).abs()


# What no scheme takes: the model, what `auto` says, and who else refuses it when it is attached.
MODELS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "sparse": (lambda: nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 1)), "layer 0: a s", "one-bit"),
    "float64": (lambda: nn.Linear(8, 1).double(), "parameter weight: gradient dtype torch.float64", "one-bit"),
    "complex": (Complex, "parameter weight: gradient dtype torch.complex64", "power-sgd"),
    "python_reducer": (lambda: nn.Linear(8, 1), "python_reducer", "plain"),
}


def train(rank: int, make: Callable[[], nn.Module], loop: str, scheme: Any) -> tuple[torch.Tensor, str]:
    """One of the loops that DDP takes, and why `auto` stayed plain."""
    torch.manual_seed(5)
    model = make()
    ddp = DistributedDataParallel(model)
    parts: list[Any] = list(model.children()) if "optimizers" in loop else [ddp]
    optimizers = [torch.optim.SGD(part.parameters(), 0.01) for part in parts]
    given = optimizers if loop == "both optimizers" else optimizers[0]
    attachment: Any = None if scheme is None else gradwire.attach(ddp, given, scheme, timeout_s=100)
    generator = torch.Generator().manual_seed(rank)
    for step in range(30):
        x = torch.randn(16, 8, generator=generator, dtype=torch.float64)
        x = (9 * x).abs().long().clamp(max=49) if loop == "sparse" else x if loop == "float64" else x.float()
        ddp.zero_grad()
        (0.01 * ddp(x)).square().mean().backward()
        if loop == "changes by itself":
            for _ in range(3):
                with torch.no_grad():
                    torch._foreach_mul_(list(model.parameters()), 0.999)
                ddp(x).square().mean().backward()
        if loop == "scales up":
            for parameter in model.parameters():
                parameter.grad.div_(parameter.grad.norm() + 1e-12)  # type: ignore[union-attr]
        optimizers[0 if step % 4 == 3 else -1].step()
    why = attachment.scheme.stats()["auto"]["stays_plain"] if attachment and isinstance(scheme, Auto) else ""
    if attachment is not None:
        attachment.close()
    return torch.cat([torch.view_as_real(p.detach().to(torch.complex128)).flatten() for p in model.parameters()]), why


def eager(rank: int) -> Auto:
    return Quick(rank, {"gcomp": 3.0}, fidelity=["gcomp"])


@on_ranks(2)
def test_models_that_no_scheme_takes_train_as_under_ddp_and_are_named_when_a_scheme_is_attached(
    rank: int, world_size: int
) -> None:
    for name, (make, words, refuses) in MODELS.items():
        torch._dynamo.config.optimize_ddp = "python_reducer" if name == "python_reducer" else True
        with pytest.raises(GradwireError, match=words):
            train(rank, make, name, refuses)
        if name == "python_reducer":  # which the compiler would train
            ddp, auto = DistributedDataParallel(make()), eager(rank)
            gradwire.attach(ddp, torch.optim.SGD(ddp.parameters(), 0.1), auto, timeout_s=100).close()
            assert words in auto._stays_plain
            with pytest.raises(gradwire.Unsupported, match=words):
                gradwire.ddp_hook(None, (torch.ones(3), torch.ones(3)))  # type: ignore[arg-type]
            continue
        expected, _ = train(rank, make, name, None)
        values, why = train(rank, make, name, eager(rank))
        assert torch.equal(values, expected), name
        assert words in why, (name, why)
        assert torch.equal(train(rank, make, name, "plain")[0], expected), name


LOOPS = {
    "changes by itself": "changed 2 times",
    "scales up": "times as large",
    "two optimizers": "",
    "both optimizers": "",
}


@on_ranks(2)
def test_loops_that_a_scheme_cannot_serve_go_on_plainly_on_all_ranks(rank: int, world_size: int) -> list[str]:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1))

    said = []
    for loop, words in LOOPS.items():
        expected, (values, why) = train(rank, make, loop, None)[0], train(rank, make, loop, eager(rank))
        # One step of length 0.01 had lost bits that counted after it was scaled up; all others are DDP's.
        assert (values - expected).abs().max() < (2e-3 if loop == "scales up" else 1e-5), loop
        assert words in why if words else not why, (loop, why)
        said.append(why)
    return said
