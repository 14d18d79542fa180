"""An optimizer is known by its class's bases, its groups' options and its state's names; else it is unknown."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from gradwire import InvalidArgument, Unsupported
from gradwire.core.optimizers import Optimizers


def _kind(name: str, state: tuple[str, ...] = (), **defaults: Any) -> Any:
    """A class of another library's, whose step leaves `state`."""

    def step(self: Any, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update({key: torch.zeros(1) for key in state})

    def begin(self: Any, parameters: Any) -> None:
        Optimizer.__init__(self, parameters, {"lr": 0.1, **defaults})

    return type(name, (Optimizer,), {"__init__": begin, "step": step})


class _Sam(Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1)


def _matrix() -> nn.Parameter:
    return nn.Parameter(torch.ones(3, 3))


BETAS = (0.9, 0.99)
# Each with its family before its first step and after.
KINDS: dict[str, tuple[Any, str, str]] = {
    "AdamW": (torch.optim.AdamW, "adam", "adam"),
    "Adagrad": (torch.optim.Adagrad, "adam", "adam"),
    "Adafactor": (torch.optim.Adafactor, "adam", "adam"),
    "SGD": (torch.optim.SGD, "sgd", "sgd"),
    "subclass of SGD": (type("Mine", (torch.optim.SGD,), {}), "sgd", "sgd"),
    "Rprop": (torch.optim.Rprop, "sign", "sign"),
    "LBFGS": (torch.optim.LBFGS, "unknown", "unknown"),
    "Muon": (torch.optim.Muon, "muon", "muon"),
    "Muon of another": (_kind("SingleDeviceMuon", ("momentum_buffer",), momentum=0.9), "muon", "muon"),
    "its Adam": (_kind("MuonWithAuxAdam", ("exp_avg", "exp_avg_sq"), use_muon=False, betas=BETAS, eps=1e-8), "adam", "adam"),
    "AdamW8bit": (_kind("AdamW8bit", ("state1", "state2", "qmap1"), betas=BETAS, eps=1e-8), "adam", "adam"),
    "Lion8bit": (_kind("Lion8bit", ("state1", "qmap1"), betas=BETAS, eps=0.0), "sign", "sign"),
    "AdamWScheduleFree": (_kind("AdamWScheduleFree", ("z", "exp_avg_sq"), betas=BETAS, eps=1e-8), "adam", "adam"),
    "SGDScheduleFree": (_kind("SGDScheduleFree", ("z",), momentum=0.9), "unknown", "unknown"),
    "momentum": (_kind("Own", ("momentum_buffer",), momentum=0.9), "unknown", "unknown"),
    "by its state": (_kind("Own", ("exp_avg_sq_row", "exp_avg_sq_col"), eps=(1e-30, 1e-3)), "unknown", "adam"),
    "SOAP": (_kind("SOAP", ("exp_avg_sq", "GG"), betas=BETAS, eps=1e-8, precondition_frequency=10), "unknown", "unknown"),
    "SAM": (_Sam, "sgd", "sgd"),
    "an object around it": (lambda given: SimpleNamespace(optimizer=torch.optim.Adam(given)), "adam", "adam"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_has_the_family_of_what_it_is(kind: str) -> None:
    make, before, after = KINDS[kind]
    parameter = _matrix()
    given = make([parameter])
    optimizers = Optimizers(given)
    assert optimizers.family_of(parameter) == before
    parameter.grad = torch.ones(3, 3)
    if kind not in ("SAM", "LBFGS"):
        next(iter(optimizers)).step()
    assert optimizers.families() == {after}
    assert optimizers.family_of(_matrix()) == "unknown"  # of whoever steps it


def test_several_are_read_live_and_a_shared_parameter_is_named() -> None:
    first, second, late = (_matrix() for _ in range(3))
    muon, adamw = torch.optim.Muon([first]), torch.optim.AdamW([second, first])
    optimizers = Optimizers([muon, adamw, muon])
    assert list(optimizers) == [muon, adamw]
    assert str(optimizers) == "Muon and AdamW"
    assert [parameter is first for parameter in optimizers.shared()] == [True]
    assert optimizers.of(late) is optimizers.of(first) is None
    assert optimizers.family_of(first) == "unknown"
    adamw.add_param_group({"params": [late], "lr": 0.5})
    assert optimizers.of(late) == (adamw, adamw.param_groups[1])
    adamw.load_state_dict(adamw.state_dict())  # makes new groups
    place = optimizers.of(late)
    assert place is not None
    assert place.group is adamw.param_groups[1]


@pytest.mark.parametrize(
    ("given", "error"), [([], InvalidArgument), ("adam", Unsupported), ([nn.Linear(1, 1)], Unsupported)]
)
def test_what_is_no_optimizer_is_refused(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Optimizers(given)
