"""What a case may end in, and the checks that every kind needs."""

import hashlib
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

import gradwire
from ranks import Outcome, bits_of, try_ranks


class Found(AssertionError):
    """A promise that a case saw broken."""


class Refused(Exception):
    """What was drawn is not served, and gradwire said so by a typed error on every rank: no failure, but counted."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Found(what)


def launch(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120) -> list[Outcome]:
    """What becomes of function(rank, world_size, *args) on each rank, in new processes. Raises: Found (one hangs).

    The ranks' warnings and torch's own log are kept out of the campaign's output: what was drawn is full of them.
    """
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # read when the launching helper's server starts
    try:
        return try_ranks(_run_quietly, world_size, function, *args, timeout_s=timeout_s)
    except AssertionError as error:
        raise Found(f"a rank hangs: {error}") from error


def _run_quietly(rank: int, world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    return function(rank, world_size, *args)


def results_of(outcomes: list[Outcome]) -> list[Any]:
    """Every rank's result. Raises: Refused (all ranks refuse alike), Found (anything else that is no result)."""
    errors = [outcome.error for outcome in outcomes]
    kinds = {type(error) for error in errors}
    if len(kinds) == 1 and isinstance(errors[0], gradwire.Unsupported | gradwire.InvalidArgument):
        raise Refused(f"{type(errors[0]).__name__}: {errors[0]}")
    for rank, outcome in enumerate(outcomes):
        require(outcome.error is None, f"rank {rank} raised:\n{outcome.traceback}")
        require(outcome.exit_code == 0, f"rank {rank} ended with exit code {outcome.exit_code}")
    return [outcome.result for outcome in outcomes]


def hash_of(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(map(bits_of, model.parameters()))).hexdigest()


def require_equal(hashes: list[list[str]], what: str = "parameters") -> None:
    """`hashes`: by rank, then by step. Raises: Found."""
    for step, found in enumerate(zip(*hashes, strict=True)):
        require(len(set(found)) == 1, f"{what} differ between ranks after step {step}: {[h[:8] for h in found]}")
