"""The aggregator `switch` between real ranks: exact integers, counted bytes, and errors that reach every rank."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradwire.errors import CorruptMessage, InvalidArgument, PeerLost, Unsupported
from gradwire.exchange import aggregators
from gradwire.telemetry.recorder import Recorder
from gradwire.wire.communicator import Communicator
from gradwire.wire.wire import Wire
from ranks import run_ranks, try_ranks
from switch_cases import Serving, clients


def values_of(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Over the whole range of the dtype."""
    generator = torch.Generator().manual_seed(rank)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, (n,), dtype=dtype, generator=generator)


def wire_for(communicator: Communicator, recorder: Recorder, step: int = 0) -> Wire:
    """As an aggregator wants it: with a record."""
    wire = Wire(communicator)
    wire.record = recorder.open_bucket(step, 0, 4)
    return wire


def reduce_everything(rank: int, world_size: int, address: str) -> dict[str, Any]:
    communicator, recorder = Communicator(timeout_s=100), Recorder(rank, world_size)
    aggregator = aggregators.by_name("switch", address=address, slots=64)
    aggregator.bind(communicator, recorder)

    def on_lane() -> dict[str, Any]:
        wire = wire_for(communicator, recorder)
        results: dict[str, Any] = {}
        for n in (0, 1, 1000, 70_001):
            words, largest = values_of(rank, n, torch.int32), values_of(rank, n, torch.int32)
            aggregator.or_words(words, wire)
            aggregator.max_int32(largest, wire)
            short, long = values_of(rank, n, torch.int32), values_of(rank, n, torch.int64)
            long_too = values_of(rank + 50, n, torch.int64)
            for one in [aggregator.start_sum(values, wire) for values in (short, long, long_too)]:
                one()
                one()  # the second does nothing
            results[str(n)] = (words, largest, short, long, long_too)
        results["record"] = (wire.record.bytes_sent, wire.record.bytes_received)
        results["stats"] = aggregator.stats()
        with pytest.raises(Unsupported, match="integers only"):
            aggregator.start_sum(torch.zeros(4), wire)
        with pytest.raises(InvalidArgument):
            aggregator.start_sum(torch.zeros((2, 2), dtype=torch.int32), wire)
        return results

    results = communicator.submit(on_lane).wait()
    aggregator.close()
    results["after"] = aggregator.stats()
    aggregator.bind(communicator, recorder)  # again: a new job of the same ranks
    again = values_of(rank, 300, torch.int32)
    communicator.submit(lambda: aggregator.start_sum(again, wire_for(communicator, recorder, 1))()).wait()
    results["again"] = again
    aggregator.close()
    communicator.close()
    return results


@pytest.mark.parametrize("is_first_full", [False, True])
def test_sums_ors_and_maxima_of_ranks_are_exact_and_their_bytes_are_counted(is_first_full: bool) -> None:
    world_size = 3
    with Serving() as serving, Serving(n_slots=1) as full, clients(full.port, 1, job=9, slots=1):
        first = f"localhost:{full.port}," if is_first_full else ""
        results = run_ranks(reduce_everything, world_size, f"{first}localhost:{serving.port}")
        counters = serving.counters()
        assert (full.counters()["refusals"] > 0) == is_first_full
    assert counters["n_jobs"] == 0
    assert counters["jobs_admitted"] == 2
    for n in (0, 1, 1000, 70_001):
        short = [values_of(rank, n, torch.int32) for rank in range(world_size)]
        wide = [[values_of(rank + more, n, torch.int64) for rank in range(world_size)] for more in (0, 50)]
        wanted = (
            short[0] | short[1] | short[2],
            torch.stack(short).amax(0),
            (short[0].long() + short[1] + short[2]).to(torch.int32),
            *(one[0] + one[1] + one[2] for one in wide),
        )
        for rank in range(world_size):
            for got, expected in zip(results[rank][str(n)], wanted, strict=True):
                assert torch.equal(got, expected), (rank, n)
    for result in results:
        stats = result["stats"]
        assert stats["switch"] == "emulation"
        # Everything but the packets that join and leave lies in some record.
        assert 0 <= stats["bytes_sent"] - result["record"][0] < 1000
        assert 0 <= stats["bytes_received"] - result["record"][1] < 1000
        n_packets = 3 * (1 + 4 + 274) + 2 * (1 + 12 + 821)
        assert result["record"][0] == 1064 * (n_packets + stats["packets_resent"])
        assert result["after"]["packets_sent"] == stats["packets_sent"]
    assert len({result["again"].numpy().tobytes() for result in results}) == 1


def end_while_others_wait(rank: int, world_size: int, address: str, dies: bool) -> None:
    """After a sum, rank 1 raises an error, or dies, where the others begin another."""
    communicator, recorder = Communicator(timeout_s=3 if dies else 60), Recorder(rank, world_size)
    aggregator = aggregators.by_name("switch", address=address)
    aggregator.bind(communicator, recorder)
    wire = wire_for(communicator, recorder)

    def on_lane() -> None:
        aggregator.start_sum(torch.ones(1000, dtype=torch.int32), wire)()
        if rank == 1 and dies:
            os._exit(3)
        if rank == 1:
            raise CorruptMessage("a sketch of rank 1 was damaged")
        aggregator.start_sum(torch.ones(1000, dtype=torch.int32), wire)()

    communicator.submit(on_lane).wait()


@pytest.mark.parametrize(("world_size", "dies"), [(2, False), (3, True)])
def test_a_rank_that_fails_or_dies_outside_the_switch_ends_the_others_sums(world_size: int, dies: bool) -> None:
    error = PeerLost if dies else CorruptMessage
    words = "rank 1 sent nothing" if dies else "rank 1 raised: a sketch of rank 1 was damaged"  # when the time is up
    with Serving() as serving:
        outcomes = try_ranks(end_while_others_wait, world_size, f"127.0.0.1:{serving.port}", dies)
    first_to_end = outcomes.pop(1)
    assert first_to_end.exit_code == 3 if dies else isinstance(first_to_end.error, CorruptMessage)
    for outcome in outcomes:
        assert isinstance(outcome.error, error), outcome.traceback
        assert words in str(outcome.error)


def test_addresses_that_lead_nowhere_are_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    two, many = SimpleNamespace(world_size=2), SimpleNamespace(world_size=33)
    monkeypatch.delenv("GRADWIRE_SWITCH", raising=False)
    for address in (None, "", "host", "host:", ":1", "host:0", "host:65536", "host:x"):
        with pytest.raises(InvalidArgument, match=r"host:port"):
            aggregators.by_name("switch", address=address).bind(two, None)
    monkeypatch.setenv("GRADWIRE_SWITCH", "127.0.0.1:4790")
    aggregators.by_name("switch").bind(two, None)
    with pytest.raises(Unsupported, match="process-group"):
        aggregators.by_name("switch").bind(many, None)
    for slots in (0, 3, 1 << 21):
        with pytest.raises(InvalidArgument):
            aggregators.by_name("switch", slots=slots)
