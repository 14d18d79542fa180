"""Plain first steps: as many as told, or as the optimizer suggests, then compressed, on all ranks alike."""

import logging
from typing import Any
from unittest.mock import patch

import pytest
import torch

import gradwire
from buckets import Driver
from gradwire import schemes
from gradwire.registry import parse_spec
from gradwire.schemes import plain_steps
from gradwire.schemes.auto.fidelity import FIRST_ADAM_STEP, TABLE
from logs import log_of
from ranks import at_end, on_ranks, run_ranks
from small_training import Training

N = 1_000
SHAPE = (50, 20)  # of N values; low rank compresses matrices
# Each scheme, the option that says how many first steps are plain, and how many they are beside Adam.
OPTION = {"one-bit": "warmup_steps", "two-bit": "warmup_steps", "top-k": "warmup_steps",
          "acp-sgd": "start_step", "power-sgd": "start_step", "power-sgd-overlap": "start_step"}  # fmt: skip
BESIDE_ADAM = {"one-bit": 50, "two-bit": 50, "top-k": 50, "acp-sgd": 100}
QUANTISERS = ["one-bit", "two-bit"]


def gradient_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(100 * rank + step))


@pytest.mark.parametrize("name", OPTION)
@on_ranks(2)
def test_the_first_steps_are_the_mean_and_the_others_are_compressed(rank: int, world_size: int, name: str) -> Any:
    driver = Driver(schemes.by_name(name, **{OPTION[name]: 3}), [torch.zeros(SHAPE)])
    found = []
    for step in range(5):
        found.append(driver.reduce([gradient_of(rank, step).view(SHAPE)])[0].flatten())
        mean = (gradient_of(0, step).double() + gradient_of(1, step).double()) / 2
        distance = float((found[-1].double() - mean).norm() / mean.norm())
        assert distance < 1e-6 if step < 3 else distance > 0.1, (step, distance)
        n_bytes = driver.last_buckets[0].record.bytes_sent
        assert (n_bytes >= 4 * N) == (step < 3), (step, n_bytes)
    return found


@pytest.mark.parametrize(("name", "option"), OPTION.items())
def test_plain_steps_count_as_settling_and_without_an_optimizer_there_are_none(name: str, option: str) -> None:
    told, default = schemes.by_name(name, **{option: 7}), schemes.by_name(name)
    assert (told.settling_steps, told.is_settled) == (7, False)
    assert (default.settling_steps, default.is_settled) == (0, True)
    assert told.configuration[option] == 7, "ranks must agree on it"


@pytest.mark.parametrize("name", ["one-bit", "top-k", "acp-sgd", "dgc"])
@on_ranks(1)
def test_the_log_names_the_warm_up_and_a_training_that_ended_within(rank: int, world_size: int, name: str) -> None:
    """But dgc's, which compresses from its first step."""
    option, texts = OPTION.get(name, "warmup_steps"), log_of("gradwire.schemes.plain_steps")
    driver = Driver(schemes.by_name(name, **{option: 9}), [torch.zeros(SHAPE)])
    driver.reduce([gradient_of(rank, 0).view(SHAPE)])
    at_end.close()
    ended = f"nothing was compressed: the last step was 0, and those before 9 are plain; lower {option}"
    expected = [] if name == "dgc" else [f"{name}: steps before 9 are reduced plainly", ended]
    assert len(texts) == len(expected)
    assert all(words in text for words, text in zip(expected, texts, strict=True))


Beside = tuple[dict[str, Any], list[str], int]


def beside(rank: int, world_size: int, name: str, options: dict[str, Any], optimizer: str) -> Beside:
    """What is chosen beside an optimizer, what the log says of it, and what a bind beside another chooses afterwards."""
    texts = log_of("gradwire.schemes.plain_steps", logging.WARNING)
    parameter = torch.nn.Parameter(torch.zeros(N))
    stepping = getattr(torch.optim, optimizer)([parameter], lr=0.1)
    scheme = schemes.by_name(name, **options)
    gradwire.Reducer(scheme, names={"weight": parameter}, optimizer=stepping).close()
    chosen = {key: scheme.configuration.get(key) for key in (OPTION[name], "scale_values")}
    gradwire.Reducer(scheme, names={"weight": parameter}, optimizer=torch.optim.SGD([parameter], lr=0.1)).close()
    return chosen, texts, scheme.settling_steps


@pytest.mark.parametrize("name", OPTION)
def test_the_optimizer_chooses_what_was_left_out_and_one_rank_says_so(name: str) -> None:
    """Plain steps, and scales by group where scales are by group."""
    option, steps = OPTION[name], BESIDE_ADAM.get(name, 0)
    is_by_group = name in QUANTISERS

    def chosen(n_plain: int, scale_values: int | None = None) -> dict[str, Any]:
        return {option: n_plain or (0 if option == "start_step" else None), "scale_values": scale_values}

    for_adam = chosen(steps, 64 if is_by_group else None)
    first, other = run_ranks(beside, 2, name, {}, "AdamW")
    assert (first[0], other[0], other[1]) == (for_adam, for_adam, [])
    if is_by_group:
        (text,) = first[1]
        assert f"{name} beside AdamW: warmup_steps=50, scale_values=64" in text
        assert 'fidelity="close"' in text
    else:
        said = [f"gradwire {name} beside AdamW: {option}={steps} (as published: {option}=0). Its loss"] if steps else []
        assert [text[: len(said[0])] for text in first[1]] == said
    assert first[2] == 0, "bound again beside SGD, it is as published"
    assert run_ranks(beside, 1, name, {}, "SGD") == [(chosen(0), [], 0)]
    scales = {"scale_values": 64} if is_by_group else {}
    for told in (0, 9):
        given = {option: told, **scales}
        assert run_ranks(beside, 1, name, given, "AdamW") == [({**chosen(told), **scales}, [], told)]
    for adaptive in ("AdamW", "RMSprop"):
        assert run_ranks(beside, 1, name, schemes.as_published(name, {}), adaptive) == [(chosen(0), [], 0)]


def test_where_schemes_take_turns_none_is_plain_when_its_turn_may_come() -> None:
    """`auto` lets coarse schemes race from `FIRST_ADAM_STEP` on; one that was plain then would look slow."""
    assert max(BESIDE_ADAM.values()) <= FIRST_ADAM_STEP
    for row in TABLE:
        chosen = plain_steps.BESIDE_ADAM.get(parse_spec(row.spec)[0], {})
        assert not {"warmup_steps", "start_step"} & {*chosen} or row.not_before == FIRST_ADAM_STEP, row.spec


@pytest.mark.parametrize(("name", "options"), [("one-bit", {"scale": "fixed"}), ("two-bit", {"relative": False})])
def test_one_fixed_scale_stays_one(name: str, options: dict[str, Any]) -> None:
    ((chosen, _, _),) = run_ranks(beside, 1, name, options, "Adam")
    assert chosen == {"warmup_steps": 50, "scale_values": None}


def linear() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(40, 40, bias=False)  # one tensor: DDP rebuilds no buckets


def loss_of(module: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    return module(gradient_of(rank, step)[:400].view(10, 40)).square().mean()


def train(rank: int, name: str | None, steps: range, state: Any = None) -> tuple[torch.Tensor, Any]:
    """A linear model under AdamW, with all defaults of a scheme, or without one; from a state on, if there is one."""
    training = Training(rank, name, lambda p: torch.optim.AdamW(p, lr=0.01), linear, loss_of)
    if state:
        training.load(state)
    training.take_steps(steps)
    saved = training.state() if name else None
    training.close()
    return training.flat(), saved


@pytest.mark.parametrize(("name", "n_plain"), [(name, n) for name, n in BESIDE_ADAM.items() if name != "two-bit"])
@on_ranks(2)
def test_a_training_resumed_within_first_steps_counts_on(rank: int, world_size: int, name: str, n_plain: int) -> None:
    """Weights after the plain steps and after four more, without a scheme, with one, and resumed along the way."""
    end = n_plain + 4
    found = {f"alone {n}": train(rank, None, range(n))[0] for n in (n_plain, end)}
    found |= {f"whole {n}": train(rank, name, range(n))[0] for n in (n_plain, end)}
    for cut in (n_plain - 20, n_plain, n_plain + 1, n_plain + 2):
        _, state = train(rank, name, range(cut))
        found[f"from {cut}"] = train(rank, name, range(cut, end), state)[0]
    whole = found[f"whole {end}"]
    assert torch.equal(found[f"alone {n_plain}"], found[f"whole {n_plain}"])
    assert not torch.equal(found[f"alone {end}"], whole)
    for key, resumed in found.items():
        assert not key.startswith("from") or torch.equal(resumed, whole), key


@pytest.mark.parametrize("name", OPTION)
@on_ranks(2, raises=gradwire.RankMismatch, match="disagree on step")
def test_a_rank_that_goes_past_the_end_of_the_plain_steps_is_told(rank: int, world_size: int, name: str) -> None:
    """Its messages are of another length than what the others send to find out where they are."""
    driver = Driver(schemes.by_name(name, **{OPTION[name]: 2}), [torch.zeros(SHAPE)])
    for driver.step in (0, 1, 3 if rank == 0 else 2):
        driver.reduce([gradient_of(rank, driver.step).view(SHAPE)])


@pytest.mark.parametrize("n_plain", [0, 2])
@on_ranks(2)
def test_ranks_compare_in_plain_steps_and_once_behind_them(rank: int, world_size: int, n_plain: int) -> None:
    driver = Driver(schemes.by_name("one-bit", warmup_steps=n_plain), [torch.zeros(SHAPE), torch.zeros(SHAPE)], [1, 1])
    compared = []
    with patch("gradwire.schemes.compressed.compare_preambles", lambda _, mine, __: compared.append(mine.step)):
        for step in range(5):
            driver.reduce([gradient_of(rank, step).view(SHAPE)] * 2)
    assert compared == [0, 1, 2][: n_plain + bool(n_plain)]


@pytest.mark.parametrize("name", ["one-bit", "top-k"])
@on_ranks(2, raises=gradwire.RankMismatch, match="configuration")
def test_ranks_whose_optimizers_choose_otherwise_are_told(rank: int, world_size: int, name: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(N))
    optimizer = (torch.optim.SGD if rank else torch.optim.AdamW)([parameter], lr=0.1)
    reducer = gradwire.Reducer(name, names={"weight": parameter}, optimizer=optimizer, timeout_s=100)
    reducer.all_reduce({"weight": torch.ones(N)}).wait()
