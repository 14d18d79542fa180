"""Schemes that reduce named tensors, and how: to the same bits, resumed with the same bits, or failing on all ranks."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

import gradwire
from gradwire import schemes
from ranks import Outcome, agree

REDUCING = sorted(
    name
    for name in schemes.names()
    if not (schemes.owns_step(name) or schemes.needs_momenta(name)) and name not in ("auto", "periodic")
)
# Codecs that keep no state are one case: embedded-float stands for them.
STATEFUL = [name for name in REDUCING if name not in ("truncate", "truncated-float", "zlib", "zstd")]
OPTIONS: dict[str, dict[str, Any]] = {
    "gcomp": {"importance": "none"},
    "slimgc": {"threshold_bytes": 100},
    "homomorphic": {"aggregator": "process-group"},
}
Shapes = Mapping[str, tuple[int, ...]]


def draw(shapes: Shapes, rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def reduced(reducer: gradwire.Reducer, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`tensors`, which hold their means now."""
    reducer.all_reduce(tensors).wait()
    return tensors


def reduce_and_resume(rank: int, make: Callable[[], schemes.Scheme], shapes: Shapes) -> dict[str, Any]:
    """Three steps, the second and third under way at once, whose bits all ranks share; a resumed run goes on with the bits
    of one that was not. Returns the state that was resumed."""
    reducer = gradwire.Reducer(make(), bucket_mb=4 / 1024, timeout_s=100)
    reduced(reducer, draw(shapes, rank, 0))
    pair = draw(shapes, rank, 1), draw(shapes, rank, 2)
    for work in [reducer.all_reduce(tensors) for tensors in pair]:
        work.wait()
    for key, tensor in (*pair[0].items(), *pair[1].items()):
        assert agree(tensor), (reducer.scheme.name, key)
    state = copy.deepcopy(reducer.state_dict())
    resumed = gradwire.Reducer(make(), names=draw(shapes, rank, 0), bucket_mb=4 / 1024, timeout_s=100)
    resumed.load_state_dict(state)
    ends = [reduced(one, draw(shapes, rank, 3)) for one in (reducer, resumed)]
    reducer.close()
    resumed.close()
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in shapes), reducer.scheme.name
    return state


FAILURES: dict[str, tuple[type[Exception], str]] = {
    "mismatch": (gradwire.RankMismatch, "disagree on configuration"),
    "codec": (gradwire.RankMismatch, "rank 1 failed"),
    "death": (gradwire.PeerLost, ""),
}


def assert_failure_is_told(how: str, outcomes: list[Outcome], lost: str = "") -> None:
    """Rank 1 has ended with exit code 7 if it is death, of which others say `lost`; all others raise the error."""
    error, words = FAILURES[how]
    for rank, outcome in enumerate(outcomes):
        if how == "death" and rank == 1:
            assert outcome.exit_code == 7
        else:
            assert isinstance(outcome.error, error), (rank, outcome)
            assert (words or lost) in str(outcome.error)
