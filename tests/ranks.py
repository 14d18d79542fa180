"""Runs a function on several ranks: processes of their own, Gloo over loopback, a free port, a time limit.

Ranks are forked from a server that has imported torch, gradwire and pytest once, so that a rank starts in milliseconds.
"""

import contextlib
import faulthandler
import functools
import gc
import inspect
import multiprocessing
import os
import pickle
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gradwire
from gradwire_lab.ranks.network import find_free_port
from warm_interpreters import MODULES

_context = multiprocessing.get_context("forkserver")
_SOURCES = Path(gradwire.__file__).parent
# pytest and the schemes come with every file of tests: another 0.1 s.
_schemes = [
    ".".join(path.relative_to(_SOURCES.parent).with_suffix("").parts)
    for folder in ("codecs", "schemes")
    for path in sorted((_SOURCES / folder).rglob("*.py"))
    if path.name != "__init__.py"
]
_context.set_forkserver_preload([*MODULES, "pytest", *_schemes])


@dataclass
class Outcome:
    """What became of one rank: a result, an error, or a death."""

    result: Any = None
    error: BaseException | None = None
    traceback: str = ""
    exit_code: int | None = None


at_end = contextlib.ExitStack()  # what a rank closes when its function has returned, the last one first
_PORT_TAKEN = 98  # how rank 0 ends if another program has come to listen where its store should: all start again


def patience() -> float:
    """What time limits are multiplied by: how many threads want each core now. They are there for hangs, not for speed."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """[function(rank, world_size, *args) for every rank], each in its own process; raises if one does not return."""
    outcomes = try_ranks(function, world_size, *args, timeout_s=timeout_s)
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None:
            raise AssertionError(f"rank {rank} raised:\n{outcome.traceback}") from outcome.error
        assert outcome.exit_code == 0, f"rank {rank} ended with exit code {outcome.exit_code}"
    return [outcome.result for outcome in outcomes]


def on_ranks(
    worlds: int | Sequence[int] = (), timeout_s: float = 120, raises: type[BaseException] | None = None, match: str = ""
) -> Callable[[Callable[..., object]], Any]:
    """A test that every rank goes through: `def test_...(rank, world_size, ...)`, with pytest's other arguments. What
    it returns has to be the same on all ranks, to the bit. `worlds`: how many ranks, or several such numbers, each a
    case; none where a mark of its own says it. `raises`: what every rank has to raise, with `match` in its text."""

    def decorate(function: Callable[..., object]) -> Any:
        _, of_world, *others = inspect.signature(function).parameters.values()

        @functools.wraps(function)
        def test(**arguments: Any) -> None:
            n_ranks = arguments.get("world_size", worlds)
            given = [arguments[other.name] for other in others]
            if raises is None:
                assert_alike(run_ranks(test, n_ranks, *given, timeout_s=timeout_s))
                return
            for outcome in try_ranks(test, n_ranks, *given, timeout_s=timeout_s):
                assert isinstance(outcome.error, raises), outcome
                assert re.search(match, str(outcome.error), re.DOTALL), outcome

        is_one = isinstance(worlds, int)
        test.__signature__ = inspect.Signature(others if is_one else [of_world, *others])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world_size", worlds)(test) if worlds and not is_one else test

    return decorate


def agree(values: Any, group: Any = None) -> bool:
    """Asked by every rank, of the default group or `group`: whether all hold the same bits."""
    import torch
    import torch.distributed as dist

    raw = values.detach().contiguous().reshape(-1).view(torch.uint8)
    gathered = [torch.empty_like(raw) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, raw, group=group)
    return all(torch.equal(raw, other) for other in gathered)


def bits_of(tensor: Any) -> bytes:
    """Of any dtype."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_alike(results: Sequence[Any]) -> None:
    """All are the same: tensors to the bit, and what lists, tuples and dicts hold."""
    first, *others = results
    for other in others:
        assert type(other) is type(first)
        if isinstance(first, list | tuple | dict):
            keys = first if isinstance(first, dict) else range(len(first))
            assert len(other) == len(first)
            for key in keys:
                assert_alike([first[key], other[key]])
        elif hasattr(first, "detach"):
            assert (first.shape, first.dtype) == (other.shape, other.dtype)
            assert bits_of(first) == bits_of(other)
        else:
            assert other == first


def try_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120) -> list[Outcome]:
    """Like run_ranks, but errors and deaths of ranks are returned. A rank that hangs is killed and fails the test."""
    timeout_s *= patience()
    port = find_free_port()
    results: Any = _context.SimpleQueue()
    processes, outcomes = [], []
    for rank in range(world_size):
        given = (function, rank, world_size, port, results, timeout_s, args)
        processes.append(_context.Process(target=_run_rank, args=given, daemon=True))
        processes[-1].start()
        outcomes.append(Outcome())
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive() for process in processes) or not results.empty():
        while not results.empty():
            rank, pickled = results.get()
            outcomes[rank] = pickle.loads(pickled)
        if time.monotonic() > deadline:
            hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
            for process in processes:
                process.kill()
            raise AssertionError(f"ranks {hung} still ran after {timeout_s} s; outcomes so far: {outcomes}")
        if processes[0].exitcode == _PORT_TAKEN:
            break
        time.sleep(0.005)
    if processes[0].exitcode == _PORT_TAKEN:  # whether the loop has seen it or not
        for process in processes:
            process.kill()
            process.join()
        return try_ranks(function, world_size, *args, timeout_s=timeout_s / patience())
    for outcome, process in zip(outcomes, processes, strict=True):
        process.join()
        outcome.exit_code = process.exitcode
    return outcomes


def environment_of(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher tells a rank on this machine."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


def _run_rank(
    function: Callable[..., Any], rank: int, world_size: int, port: int, results: Any, timeout_s: float, args: Any
) -> None:
    import torch
    import torch.distributed as dist

    gc.freeze()  # what the server has imported: collecting garbage would walk through it, and copy its pages
    faulthandler.dump_traceback_later(0.9 * timeout_s)  # where a hung rank hangs, before it is killed
    os.environ.update(environment_of(rank, world_size, port))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group("gloo")
    except dist.DistNetworkError as error:
        if rank == 0 and "EADDRINUSE" in str(error):
            os._exit(_PORT_TAKEN)
        raise
    try:
        function = getattr(function, "__wrapped__", function)  # of a test on ranks, what each does
        outcome = Outcome(result=function(rank, world_size, *args))
        at_end.close()
    except BaseException as error:
        outcome = Outcome(error=error, traceback=traceback.format_exc())
        outcome.error.__cause__ = outcome.error.__context__ = outcome.error.__traceback__ = None
    # Pickled here: a queue would hand tensors over as file descriptors, which die with this process.
    results.put((rank, pickle.dumps(outcome)))
    if outcome.error is None and dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0)  # a failed group's threads must not hold up the process
