"""SlimGC's buckets on the lane: the next one may begin while the last one's results travel."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
import torch
from slimgc_cases import COARSE, SHAPES, flat, gradients_of, residuals_of

from buckets import Driver
from gradwire.schemes.slimgc import SlimGC, exchange
from gradwire.wire.communicator import Communicator
from gradwire.wire.wire import HostWire
from ranks import agree, on_ranks


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_buckets_that_overlap_give_the_bits_of_one_after_the_other(rank: int, world_size: int) -> None:
    """Whichever ranks begin the next bucket while results travel: the same bits, and a step with a NaN changes nothing."""
    submit, bytes_ahead = Communicator.submit, exchange._PULL_BYTES_AHEAD

    def in_order(self: Communicator, task: Any, *args: Any, may_overtake: bool = False) -> Any:
        return submit(self, task, *args)

    def all_at_once(self: Communicator, task: Any, *args: Any, may_overtake: bool = False) -> Any:
        if may_overtake and args[0].index == 0:
            submit(self, time.sleep, 0.02)  # the other buckets are there before this one is begun
        return submit(self, task, *args, may_overtake=may_overtake)

    orders = (in_order, all_at_once, all_at_once if rank % 2 else in_order)
    for n_bytes, options in (
        (bytes_ahead, {"codec": "one-bit"}),
        (1, {"codec": "one-bit", "group_elements": 20}),
        (1, {"codec": "two-bit", "group_elements": 64, "pull": "raw"}),
        (bytes_ahead, {**COARSE, "group_elements": 50}),
        (bytes_ahead, {"codec": "one-bit", "topology": "all-reduce"}),
        (bytes_ahead, {"codec": "two-bit", "threshold_bytes": 100}),
    ):
        runs = []
        for order in orders:
            exchange._PULL_BYTES_AHEAD, Communicator.submit = n_bytes, order  # type: ignore[method-assign]
            try:
                driver = Driver(
                    SlimGC(**{"threshold_bytes": 0, **options}),
                    [torch.zeros(shape) for shape in SHAPES],
                    [1, 1, 1, 2, 2],
                )
                results = []
                for step in range(5):
                    gradients, before = gradients_of(rank, step), residuals_of(driver)
                    if step == 3 and rank == world_size - 1:
                        gradients[2].view(-1)[7] = math.inf
                    reduced = flat(driver.reduce(gradients))
                    assert agree(reduced)
                    results += [reduced.view(torch.int32), residuals_of(driver).view(torch.int32)]
                    assert torch.equal(residuals_of(driver), before) == (step == 3)
                assert driver.scheme.stats()["n_steps_not_finite"] == 1
                runs.append(torch.cat(results))
                driver.close()
            finally:
                exchange._PULL_BYTES_AHEAD, Communicator.submit = bytes_ahead, submit  # type: ignore[method-assign]
        assert torch.equal(runs[0], runs[1]), options
        assert torch.equal(runs[0], runs[2]), options


@on_ranks(2)
def test_a_raw_bucket_that_is_finite_does_not_hide_a_nan_in_another(rank: int, world_size: int) -> None:
    """The look at a raw bucket's mean, on a thread of the backend's, lasts until the lane has found a NaN in the next one."""
    is_finite = HostWire.all_finite

    def slow(self: HostWire, values: torch.Tensor) -> bool:
        found = is_finite(self, values)
        if threading.current_thread().name != "gradwire-lane":
            time.sleep(0.2)
        return found

    HostWire.all_finite = slow  # type: ignore[method-assign]
    shapes = (7, 300, 300)  # raw, compressed, compressed
    driver = Driver(SlimGC("two-bit", threshold_bytes=100), [torch.zeros(n) for n in shapes], [1, 1, 1])
    for step in range(3):
        gradients, before = [torch.full((n,), 0.1 + step) for n in shapes], driver.scheme.state_dict()["residuals"]
        if step == 1:
            gradients[1][7] = math.inf
        driver.reduce(gradients)
        after = driver.scheme.state_dict()["residuals"]
        is_unchanged = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        assert is_unchanged == (step == 1)
    driver.close()
