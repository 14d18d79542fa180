"""`ahead=1` around any scheme: formula 8 in float64, nothing lost, the same bits after a resume, and what it refuses."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
import gradwire_lab  # noqa: F401  (registers periodic)
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.schemes import Ahead, by_name
from ranks import on_ranks
from small_training import Training, batch_of

LOW_RANK = "rank=2,min_compression_rate=0,start_step=0,exempt=none"
# By scheme, whether what it sends and what it keeps add up to the gradients.
SCHEMES = {
    "plain": True, "one-bit:warmup_steps=0": True, "top-k:share=0.2,warmup_steps=0": True,
    f"acp-sgd:{LOW_RANK},feedback_decay=1": True, f"power-sgd-overlap:{LOW_RANK}": True,
    "slimgc:codec=two-bit,threshold_bytes=300": True, "homomorphic": True, "terngrad": False,
    "dgc:share=0.2": False,
}  # fmt: skip
Rule = Callable[[list[Tensor], list[Tensor], dict[str, Any]], tuple[list[Tensor], dict[str, Any]]]


def momentum(
    weights: list[Tensor], gradients: list[Tensor], state: dict[str, Any]
) -> tuple[list[Tensor], dict[str, Any]]:
    v = [0.9 * old + g for old, g in zip(state["v"], gradients, strict=True)] if state else gradients
    return [w - 0.1 * one for w, one in zip(weights, v, strict=True)], {"v": v}


def adamw(weights: list[Tensor], gradients: list[Tensor], state: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    t, zeros = state.get("t", 0) + 1, [torch.zeros_like(w) for w in weights]
    m = [0.9 * old + 0.1 * g for old, g in zip(state.get("m", zeros), gradients, strict=True)]
    v = [0.999 * old + 0.001 * g * g for old, g in zip(state.get("v", zeros), gradients, strict=True)]
    moved = [
        w * (1 - 1e-2 * 1e-2) - 1e-2 * (a / (1 - 0.9**t)) / ((b / (1 - 0.999**t)).sqrt() + 1e-8)
        for w, a, b in zip(weights, m, v, strict=True)
    ]
    return moved, {"t": t, "m": m, "v": v}


RULES: dict[str, tuple[Rule, Callable[[Any], torch.optim.Optimizer]]] = {
    "momentum": (momentum, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "adamw": (adamw, lambda p: torch.optim.AdamW(p, lr=1e-2)),
}


def narrow() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3))


def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    kind = next(module.parameters()).dtype
    return (module(batch_of(rank, step)[:, :12].to(kind)) - 1).square().mean()


def mean_of(values: list[Tensor]) -> list[Tensor]:
    means = [value / dist.get_world_size() for value in values]
    for one in means:
        dist.all_reduce(one)
    return means


def watch_means(scheme: Ahead, parameters: list[Tensor]) -> list[list[Tensor]]:
    """What the inner scheme makes of the gradients of each step, in float64, in the order of the parameters."""
    steps: list[list[Tensor]] = []
    reduce = scheme.inner.reduce

    def watched(bucket: Any) -> Any:
        if bucket.index == 0:
            steps.append([torch.empty(0)] * len(parameters))
        mine, done = steps[-1], reduce(bucket)

        def note(_: Any) -> Any:
            for slot, (start, end) in zip(bucket.slots, bucket.spans, strict=True):
                place = next(i for i, p in enumerate(parameters) if p is slot.parameter)
                mine[place] = bucket.buffer[start:end].double().view(slot.shape)
            return done.value()

        return done.then(note)  # with a callback beside it, the step could go on before the note is taken

    scheme.inner.reduce = watched  # type: ignore[method-assign]
    return steps


def assert_near(found: Iterable[Any], expected: Iterable[Tensor], where: object) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one.double(), other, atol=2e-5), where


def follow(rank: int, spec: str, rule_name: str, adds_up: bool, local: str) -> None:
    rule, make = RULES[rule_name]
    scheme = by_name(spec, ahead=1, local=local, sync_steps=1)
    assert isinstance(scheme, Ahead)
    training = Training(rank, None, make, narrow, loss_of, {"bucket_cap_mb": 0.001})
    parameters = list(training.ddp.parameters())
    means = watch_means(scheme, parameters)
    attachment = gradwire.attach(training.ddp, training.optimizer, scheme, timeout_s=100)
    twin = narrow().double()
    shared = [p.detach().double() for p in parameters]
    state: dict[str, Any] = {}
    own: list[Tensor] | None = None
    left = [torch.zeros_like(w) for w in shared]
    where = (spec, rule_name, local)
    for step in range(8):
        # The weights on which this rank computes: those that ranks share, moved by its own last gradient (formula 8).
        start = shared
        if own is not None and step > 1:
            is_sgd = local == "sgd"
            rate = training.optimizer.param_groups[0]["lr"]
            start = [w - rate * g for w, g in zip(shared, own, strict=True)] if is_sgd else rule(shared, own, state)[0]
        elif own is not None:  # the first step has waited
            shared, state = rule(shared, means[step - 1], state)
            start = shared
        assert_near(parameters, start, (*where, step))
        for w, twins in zip(start, twin.parameters(), strict=True):
            twins.data.copy_(w)
        mine = torch.autograd.grad(loss_of(twin, rank, step), list(twin.parameters()))
        training.take_steps([step])
        assert_near([p.grad for p in parameters], mine, (*where, step))
        if own is not None and step > 1:  # the call of this step has taken the one before
            shared, state = rule(shared, means[step - 1], state)
        own = [p.grad.double() for p in parameters]
        left = [old + g for old, g in zip(left, mean_of(own), strict=True)]
    saved = attachment.state_dict()["state"]  # takes the last step
    shared, state = rule(shared, means[-1], state)
    assert_near(parameters, shared, (*where, "saved"))
    if adds_up:
        names = [name for name, _ in training.ddp.module.named_parameters()]
        kept = [saved.get("residuals", {}).get(name) for name in names]
        unsent = mean_of(
            [torch.zeros_like(w) if r is None else r.double().view(w.shape) for r, w in zip(kept, shared, strict=True)]
        )
        for place, (sum_of, late) in enumerate(zip(left, unsent, strict=True)):
            sent = torch.stack([step[place] for step in means]).sum(0)
            assert torch.allclose(sent + late, sum_of, atol=1e-4), (*where, "what was sent and what is kept")
    training.take_steps([8])
    attachment.close()  # takes the last step too
    shared, state = rule(shared, means[-1], state)
    assert_near(parameters, shared, (*where, "closed"))
    assert attachment.stats()["steps_ahead"] == 8


@on_ranks(2)
def test_every_scheme_follows_the_formula_and_loses_nothing(rank: int, world_size: int) -> None:
    for place, (spec, adds_up) in enumerate(SCHEMES.items()):
        follow(rank, spec, ("adamw", "momentum")[place % 2], adds_up, ("peek", "peek", "sgd")[place % 3])


def run_scaled(rank: int, is_scaled: bool) -> Tensor:
    """Scales that are powers of two, and change after every second step while the lane is behind."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) if is_scaled else None
    scheme = by_name("two-bit:warmup_steps=0,levels=4,scale_values=64", ahead=1, sync_steps=0)
    assert isinstance(scheme, Ahead)
    step_of_lane = scheme.inner._send  # type: ignore[attr-defined]

    def late(*args: Any) -> Any:
        time.sleep(0.05)
        return step_of_lane(*args)

    scheme.inner._send = late  # type: ignore[attr-defined]
    training = Training(rank, scheme, RULES["momentum"][1], narrow, loss_of, timeout_s=100, scaler=scaler)
    for step in range(6):
        if scaler is None:
            training.take_steps([step])
        else:
            training.take_scaled_step(scaler, step)
    training.close()
    return training.flat()


@on_ranks(2)
def test_a_loss_scale_that_changes_meanwhile_is_that_of_the_step(rank: int, world_size: int) -> None:
    plain, scaled = run_scaled(rank, False), run_scaled(rank, True)
    assert torch.allclose(plain, scaled, atol=1e-6), float((plain - scaled).abs().max())


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("auto", "watches DDP's own steps"),
        ("aqgb", "takes the optimizer's step itself"),
        ("gcomp", "reads parameters"),
        ("slimgc:codec=gcomp", "reads parameters"),
        ("one-bit-adam", "exchanges the optimizer's momenta"),
        ("periodic", "leaves ranks with different results"),
        ("one-bit:ahead=1", "takes the optimizer's step itself"),
    ],
)
def test_what_a_step_ahead_cannot_be_combined_with_is_named(spec: str, words: str) -> None:
    inner = by_name(spec)
    with pytest.raises(Unsupported, match=f"'{inner.name}' {words}"):
        Ahead(inner)


@on_ranks(1)
def test_attach_says_where_and_how_steps_may_be_ahead(rank: int, world_size: int) -> None:
    def attach(scheme: Any, ahead: Any, **options: Any) -> dict[str, Any]:
        return Training(rank, scheme, ahead=ahead, **options).close()

    assert attach("one-bit", 1, local="sgd", warmup_steps=0)["scheme"] == "one-bit"
    assert "steps_ahead" in attach(by_name("one-bit"), 1, max_grad_norm=1.0)
    assert "steps_ahead" not in attach("slimgc", 0, backup=False)
    for scheme, ahead, options, words in (
        ("one-bit", 2, {}, "ahead is 1 step"),
        (by_name("one-bit"), 1, {"warmup_steps": 0}, "no option 'warmup_steps'"),
        ("one-bit", 0, {"local": "sgd"}, "no option 'local'"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            attach(scheme, ahead, **options)
    model = narrow()
    with pytest.raises(Unsupported, match="inside DDP"):
        gradwire.attach(model, torch.optim.SGD(model.parameters()), "one-bit", ahead=1)


@on_ranks(2)
def test_who_takes_the_step_takes_gradients_as_they_lie_in_memory(rank: int, world_size: int) -> None:
    def permuted() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(128, 5))
        model[3].weight = nn.Parameter(model[3].weight.detach().t().contiguous().t())
        return model.to(memory_format=torch.channels_last)

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(batch_of(rank, step).view(-1)[:108].view(1, 3, 6, 6)).square().mean()

    def ended(scheme: Any) -> Tensor:
        training = Training(rank, scheme, lambda p: torch.optim.SGD(p, lr=0.1), permuted, loss).after(range(4))
        if training.attachment is not None:
            training.close()
        return training.flat()

    alone = ended(None)
    for scheme in (by_name("plain", ahead=1, sync_steps=100), "broadcast:bits=32"):
        assert torch.allclose(ended(scheme), alone, atol=1e-6), scheme
