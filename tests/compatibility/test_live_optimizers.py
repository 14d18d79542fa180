"""The quantisation metric follows the optimizer as it is now, and refuses what it does not know."""

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire import schemes
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.schemes.gcomp import terms
from gradwire.schemes.gcomp.importance import Promise, QuantisationMetric
from gradwire.schemes.gcomp.watch import OptimizerWatch


def importance_of(optimizer: torch.optim.Optimizer, *parameters: Tensor, **options: Any) -> list[Tensor]:
    return read(QuantisationMetric(optimizer, 1), *parameters, **options)


def read(metric: QuantisationMetric, *parameters: Tensor, **options: Any) -> list[Tensor]:
    sizes = [parameter.numel() for parameter in parameters]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    out = torch.full((sum(sizes),), 99, dtype=torch.uint8)
    metric.write_importance(parameters, offsets, out, **options)
    return list(out.split(sizes))


def parameter_of(*shape: int, seed: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3)


def take_steps(optimizer: torch.optim.Optimizer, n_steps: int = 1) -> torch.optim.Optimizer:
    """The optimizer, after that."""
    random = torch.Generator().manual_seed(1)
    for _ in range(n_steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=random).to(parameter.dtype).mul_(0.01)
        optimizer.step()
    return optimizer


def fresh(optimizer: torch.optim.Optimizer, *parameters: Tensor) -> list[Tensor]:
    """What a metric made only now, of a copy of everything, says."""
    memo: dict[int, Any] = {}
    twin = copy.deepcopy(optimizer, memo)
    return importance_of(twin, *(memo[id(parameter)] for parameter in parameters))


def test_groups_have_their_own_hyper_parameters() -> None:
    p = parameter_of(1000)
    q = torch.nn.Parameter(p.detach().clone())
    optimizer = torch.optim.SGD([{"params": [p], "lr": 0.1}, {"params": [q], "lr": 0.4}])
    at_p, at_q = importance_of(optimizer, p, q)
    assert torch.equal(at_p.int() - at_q.int(), torch.full((1000,), 8, dtype=torch.int32))  # two octaves


def test_a_learning_rate_schedule_is_followed() -> None:
    p = parameter_of(1000)
    optimizer = torch.optim.AdamW([p], lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    metric = QuantisationMetric(optimizer, 4)
    seen = []
    for _ in range(4):
        take_steps(optimizer)
        schedule.step()
        seen.append(read(metric, p)[0])
        assert torch.equal(seen[-1], read(QuantisationMetric(optimizer, 4), p)[0])
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(seen))


def test_groups_added_and_state_loaded_after_the_metric_was_made_are_seen() -> None:
    p, q = parameter_of(100), parameter_of(100, seed=2)
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    metric = QuantisationMetric(optimizer, 1)
    assert read(metric, q)[0].count_nonzero() == 0
    optimizer.add_param_group({"params": [q], "lr": 0.2})
    take_steps(optimizer)
    assert torch.equal(torch.cat(read(metric, p, q)), torch.cat(fresh(optimizer, p, q)))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.025
    before = read(metric, p)[0]
    optimizer.load_state_dict(saved)
    assert torch.equal(read(metric, p)[0], fresh(optimizer, p)[0])
    assert not torch.equal(read(metric, p)[0], before)


def test_momentum_switched_off_leaves_its_buffer_out() -> None:
    p = parameter_of(1000)
    optimizer = take_steps(torch.optim.SGD([p], lr=0.1, momentum=0.9))
    optimizer.param_groups[0]["momentum"] = 0.0
    assert torch.equal(importance_of(optimizer, p)[0], importance_of(torch.optim.SGD([p], lr=0.1), p)[0])


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_nothing_is_dropped_before_an_adaptive_optimizer_has_a_history(cls: type[torch.optim.Optimizer]) -> None:
    p = parameter_of(1000)
    assert importance_of(cls([p], lr=0.01), p)[0].count_nonzero() == 0  # type: ignore[call-arg]


def test_reading_leaves_the_optimizer_as_it_was() -> None:
    p = parameter_of(10)
    optimizer = torch.optim.Adam([p], lr=0.01)
    importance_of(optimizer, p)
    assert len(optimizer.state) == 0
    take_steps(optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    importance_of(optimizer, p)
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    assert all(torch.equal(before["state"][0][name], after["state"][0][name]) for name in before["state"][0])


@pytest.mark.parametrize("lr", [0.0, 1e-42, 0.1])
def test_a_step_size_of_zero_or_beyond_float32_drops_nothing(lr: float) -> None:
    p = parameter_of(1000)
    for momentum in (0.0, 0.9):
        optimizer = take_steps(torch.optim.SGD([p], lr=lr, momentum=momentum))
        assert (importance_of(optimizer, p)[0].count_nonzero() == 0) == (lr < 0.1)


def test_dampening_of_one_drops_nothing() -> None:
    p = parameter_of(1000)
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9, dampening=1.0)
    assert importance_of(optimizer, p)[0].count_nonzero() > 0  # PyTorch's first step ignores it
    take_steps(optimizer)
    assert importance_of(optimizer, p)[0].count_nonzero() == 0


def test_parameters_of_size_zero_and_elements_of_no_parameter_are_left_alone() -> None:
    p, empty = parameter_of(5), parameter_of(0)
    out = torch.full((20,), 99, dtype=torch.uint8)
    QuantisationMetric(torch.optim.SGD([p, empty], lr=0.1), 1).write_importance([empty, p], [3, 10], out)
    assert (out[:10] == 99).all()
    assert (out[15:] == 99).all()
    assert (out[10:15] != 99).all()


def test_a_frozen_or_foreign_parameter_keeps_all_its_bits() -> None:
    p, foreign = parameter_of(10), parameter_of(10)
    at_p, at_foreign = importance_of(torch.optim.SGD([p], lr=0.1), p, foreign)
    assert at_p.count_nonzero() > 0
    assert at_foreign.count_nonzero() == 0


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": lambda values: values.contiguous(memory_format=torch.channels_last),
    "transposed": lambda values: values.permute(3, 1, 0, 2),
    "sliced": lambda values: values[:, :, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("momentum_layout", ["own", "contiguous"])
def test_bytes_come_in_the_order_of_the_gradient_in_a_bucket(layout: str, momentum_layout: str) -> None:
    # The layout contract of DDP's reducer: dense parameters keep their memory order, others go row by row.
    p = torch.nn.Parameter(LAYOUTS[layout](torch.randn(4, 3, 5, 6)))
    optimizer = take_steps(torch.optim.SGD([p], lr=0.1, momentum=0.9))
    if momentum_layout == "contiguous":
        optimizer.state[p]["momentum_buffer"] = optimizer.state[p]["momentum_buffer"].contiguous()
    found = importance_of(optimizer, p)[0]

    flat = torch.nn.Parameter(p.detach().reshape(-1))
    plain = torch.optim.SGD([flat], lr=0.1, momentum=0.9)
    plain.state[flat]["momentum_buffer"] = optimizer.state[p]["momentum_buffer"].reshape(-1)
    row_by_row = importance_of(plain, flat)[0].reshape(p.shape)
    in_bucket = torch.empty(p.numel(), dtype=torch.uint8)
    strides = p.contiguous().stride() if layout == "sliced" else p.stride()
    in_bucket.as_strided(p.shape, strides).copy_(row_by_row)
    assert torch.equal(found, in_bucket)


@pytest.mark.parametrize("n_elements", [1, (1 << 18) - 1, (1 << 18) + 1, 3 << 18])
def test_half_precision_goes_tile_by_tile_without_a_seam(n_elements: int) -> None:
    p = torch.nn.Parameter(parameter_of(n_elements).detach().to(torch.bfloat16))
    optimizer = take_steps(torch.optim.Adam([p], lr=0.01), 2)
    wide = torch.nn.Parameter(p.detach().float())
    twin = torch.optim.Adam([wide], lr=0.01)
    twin.state[wide] = {name: value.float() for name, value in optimizer.state[p].items()}
    assert torch.equal(importance_of(optimizer, p)[0], importance_of(twin, wide)[0])


@pytest.mark.parametrize(
    ("make", "decay"),
    [
        (type("InheritsStep", (torch.optim.AdamW,), {}), 1e-2),
        (functools.partial(torch.optim.Adam, decoupled_weight_decay=True), 0.9),
    ],
    ids=["subclass", "decoupled Adam"],
)
def test_what_steps_as_adamw_does_is_adamw(make: Any, decay: float) -> None:
    p = parameter_of(1000)
    adamw = torch.optim.AdamW([p], lr=0.01, weight_decay=decay)
    optimizer = take_steps(make([p], lr=0.01, weight_decay=decay))
    adamw.load_state_dict(optimizer.state_dict())
    assert torch.equal(importance_of(optimizer, p)[0], importance_of(adamw, p)[0])


class OwnStep(torch.optim.SGD):
    """SGD with a momentum, written anew; with `normalises`, its update of a matrix has a norm of 1."""

    normalises = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                buffer = self.state[parameter].setdefault("buffer", torch.zeros_like(parameter))
                buffer.mul_(group["momentum"]).add_(parameter.grad)
                is_whole = self.normalises and parameter.dim() > 1
                parameter.sub_(group["lr"] * (buffer / buffer.norm() if is_whole else buffer))


class Normalising(OwnStep):
    normalises = True


class Wrapper(torch.optim.Optimizer):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers goes with it."""
    monkeypatch.setattr(terms, "_RULES", dict(terms._RULES))


@pytest.mark.parametrize(
    ("make", "is_plain"),
    [(OwnStep, True), (torch.optim.ASGD, True), (Normalising, False), (torch.optim.Rprop, False), (Wrapper, False)],
)
def test_a_step_without_a_rule_is_probed_and_only_what_is_as_plain_as_sgd_is_taken_for_it(
    make: Any, is_plain: bool
) -> None:
    p, vector = parameter_of(30, 40), parameter_of(50)
    optimizer = make(OwnStep([p]) if make is Wrapper else [p, vector])
    for group in optimizer.param_groups:
        group["momentum"] = 0.9
    metric, life = QuantisationMetric(optimizer, 1), QuantisationMetric(optimizer, 1, Promise(horizon="life"))
    before = copy.deepcopy(optimizer.state_dict())
    assert metric.is_known == is_plain
    known = torch.optim.SGD([p], lr=optimizer.param_groups[0]["lr"])
    expected = read(QuantisationMetric(known, 1), p)[0] if is_plain else torch.zeros(1200, dtype=torch.uint8)
    assert (read(metric, p)[0].int() - expected.int()).abs().max() <= 1
    if make is OwnStep:  # a tenth: 4 log2 10 quarter octaves less
        assert (expected.int() - read(life, p)[0].int() - 13).abs().max() <= 1
    assert str(optimizer.state_dict()) == str(before)


@pytest.mark.usefixtures("registry")
def test_a_registered_rule_and_a_wrapper_that_is_looked_through_are_followed() -> None:
    p = parameter_of(1000)
    inner, adam = Normalising([p], lr=0.1), torch.optim.Adam([p], lr=0.1)
    expected = importance_of(torch.optim.SGD([p], lr=0.1), p)[0]
    gradwire.register_update(Normalising, lambda parameter, group, state: terms.Terms(0.0, 1 / group["lr"]))
    assert torch.equal(importance_of(inner, p)[0], expected)
    gradwire.register_update("Wrapper", "optimizer")
    assert torch.equal(importance_of(Wrapper(inner), p)[0], expected)
    take_steps(adam)
    assert torch.equal(importance_of(Wrapper(adam), p)[0], importance_of(adam, p)[0])


def _raise(*_: Any) -> None:
    raise ZeroDivisionError("eta is 0")


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("optimizer", "rule", "error", "words"),
    [
        (Normalising, _raise, Unsupported, "raised ZeroDivisionError for a parameter of shape \\(3,\\): eta is 0"),
        (Normalising, lambda *_: 0.1, Unsupported, "gave 0.1"),
        (Normalising, lambda *_: terms.Terms(0.0, 1.0, life=math.nan), Unsupported, "a life of at least 1"),
        (Normalising, lambda *_: terms.Terms(0.0, 1.0, first_moment=torch.ones(2)), Unsupported, "shape \\(2,\\)"),
        (Normalising, "optimizer", InvalidArgument, "no optimizer: None"),
        (Normalising, "no name", InvalidArgument, "a rule is a function"),
        (torch.nn.Linear, _raise, InvalidArgument, "takes an optimizer's class"),
    ],
)  # fmt: skip
def test_a_rule_that_fails_or_gives_nonsense_is_named(optimizer: Any, rule: Any, error: type, words: str) -> None:
    def register_and_read() -> None:
        gradwire.register_update(optimizer, rule)
        p = parameter_of(3)
        importance_of(Normalising([p]), p)

    with pytest.raises(error, match=words):
        register_and_read()


def test_a_learning_rate_raised_after_the_backward_pass_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    p = parameter_of(3)
    optimizer = torch.optim.SGD([p], lr=0.1)
    watch = OptimizerWatch(optimizer, _raise)
    for rate in (0.11, 0.3, 0.9):
        watch.before_reduction([p])
        optimizer.param_groups[0]["lr"] = rate
        take_steps(optimizer)
    watch.close()
    assert [record.args for record in caplog.records] == [(0.3 / 0.11,)]


@pytest.mark.parametrize("tolerance", [0, -1.0, math.nan, math.inf, 1e9, 1e-9, True, "1", None])
def test_a_tolerance_beyond_sense_is_refused(tolerance: Any) -> None:
    with pytest.raises(InvalidArgument, match="tolerance is"):
        schemes.by_name("gcomp", tolerance=tolerance)


def test_no_ranks_and_differentiable_are_refused_at_once_and_when_a_group_brings_it() -> None:
    with pytest.raises(InvalidArgument, match="world_size"):
        QuantisationMetric(torch.optim.SGD([parameter_of(3)], lr=0.1), 0)
    with pytest.raises(Unsupported, match="differentiable"):
        QuantisationMetric(torch.optim.Adam([parameter_of(3)], differentiable=True), 1)
    optimizer = torch.optim.Adam([parameter_of(3)])
    metric = QuantisationMetric(optimizer, 1)
    q = parameter_of(3)
    optimizer.add_param_group({"params": [q], "differentiable": True})
    with pytest.raises(Unsupported, match="differentiable"):
        read(metric, q)


def test_incomplete_or_foreign_state_and_complex_parameters_are_refused() -> None:
    p = parameter_of(10)
    optimizer = take_steps(torch.optim.Adam([p]))
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(Unsupported, match="max_exp_avg_sq"):
        importance_of(optimizer, p)
    optimizer.param_groups[0]["amsgrad"] = False
    optimizer.state[p]["exp_avg"] = torch.zeros(4)
    with pytest.raises(Unsupported, match="shape"):
        importance_of(optimizer, p)
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(Unsupported, match="complex64"):
        importance_of(torch.optim.SGD([p], lr=0.1), p)


ROOM = torch.zeros(12, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("out", "offsets", "loss_scale", "words"),
    [
        *((out, [0], 1.0, None) for out in (torch.zeros(10), ROOM.repeat(2)[:20:2], ROOM[:10].repeat(2, 1), ROOM[:9])),
        *((ROOM, [offset], 1.0, None) for offset in (3, -1)),
        *((ROOM[:10], [0], loss_scale, None) for loss_scale in (0.0, math.inf, math.nan)),
        *((ROOM[:10], offsets, 1.0, "offset") for offsets in ([], [0, 0])),  # one per parameter
    ],
)
def test_bad_arguments_are_refused(out: Tensor, offsets: list[int], loss_scale: float, words: str | None) -> None:
    p = parameter_of(10)
    with pytest.raises(InvalidArgument, match=words):
        QuantisationMetric(torch.optim.SGD([p], lr=0.1), 1).write_importance([p], offsets, out, loss_scale)
