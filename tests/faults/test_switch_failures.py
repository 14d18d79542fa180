"""A switch or a rank that dies, is restarted, leaves or disagrees: a typed error that says so, on every rank, in time."""

import socket
import time
from functools import partial
from typing import Any

import pytest

from gradwire import _native
from gradwire.errors import IncompatibleVersion, InvalidArgument, PeerLost, RankMismatch, Unsupported
from switch_cases import ADD, OR, Relay, Serving, Trouble, assert_reduced, at_once, clients, sums, try_at_once


def make_client(port: int, worker: int = 0, n_workers: int = 1, job: int = 7) -> Any:
    return _native.SwitchClient("127.0.0.1", port, job, worker, n_workers, 16)


def assert_lost(outcomes: list[Any], words: str) -> None:
    for outcome in outcomes:
        assert isinstance(outcome, PeerLost)
        assert words in str(outcome)


def test_a_switch_that_was_never_there_raises_peer_lost() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(PeerLost, match="did not answer"):
            make_client(silent.getsockname()[1]).join(0.3)
        port = silent.getsockname()[1]
    with pytest.raises(PeerLost, match="did not answer"):
        make_client(port).join(0.3)


def test_ranks_may_come_before_the_switch() -> None:
    with Serving() as serving:
        port = serving.port
    clients_of_it = [make_client(port, worker, 2) for worker in range(2)]
    joins = (partial(one.join, 10.0) for one in clients_of_it)
    *_, (_, late) = at_once([*joins, lambda: (time.sleep(0.2), Serving(port=port))])
    with late:
        assert_reduced(clients_of_it, 1000, ADD, seed=0)


def test_a_switch_that_dies_in_mid_sum_raises_peer_lost_on_every_rank() -> None:
    serving = Serving()
    with clients(serving.port, 3) as workers:
        assert_reduced(workers, 1000, ADD, seed=0)
        # Rank 2 keeps out, so that the sum cannot end before the switch does.
        outcomes = try_at_once([*sums(workers[:2], 30.0), lambda: (time.sleep(0.2), serving.end())])
        assert_lost(outcomes[:2], "nobody listens there any more")


def test_a_switch_that_falls_silent_raises_peer_lost_after_the_time_out() -> None:
    with Serving() as serving, Relay(serving.port, Trouble(), seed=0) as relay, clients(relay.port, 2) as workers:
        assert_reduced(workers, 1000, ADD, seed=0)
        relay._trouble = Trouble(lost=1.0)
        outcomes = try_at_once(sums(workers, 0.5))
        relay._trouble = Trouble()
        assert_lost(outcomes, "did not answer for 0.5 s")


def test_a_restarted_switch_raises_peer_lost_that_says_so() -> None:
    serving = Serving()
    with clients(serving.port, 2) as workers:
        assert_reduced(workers, 1000, ADD, seed=0)
        epoch, port = serving.server.epoch, serving.port
        serving.end()
        with Serving(port=port) as again:
            assert again.server.epoch != epoch
            assert_lost(try_at_once(sums(workers, 30.0)), "restarted")


def test_a_rank_that_sends_nothing_is_named_by_the_others() -> None:
    with Serving() as serving, clients(serving.port, 4) as workers:
        assert_reduced(workers, 1000, ADD, seed=0)
        outcomes = try_at_once(sums([*workers[:2], workers[3]], 0.7, n=9000))
        assert_lost(outcomes, "rank 2 sent nothing")


def test_a_slow_rank_is_waited_for_without_sending_everything_again() -> None:
    with Serving() as serving, clients(serving.port, 2, slots=1024) as workers:
        assert_reduced(workers, 1000, ADD, seed=0)

        def run_apart(calls: Any) -> None:
            at_once([calls[0], lambda: (time.sleep(1.0), calls[1]())])

        assert_reduced(workers, 256 * 1000, ADD, seed=1, run=run_apart)


def test_a_rank_that_leaves_in_mid_sum_is_named_by_the_others_at_once() -> None:
    with Serving() as serving, clients(serving.port, 3) as workers:
        assert_reduced(workers, 1000, ADD, seed=0)
        outcomes = try_at_once([*sums(workers[:2], 60.0), lambda: (time.sleep(0.1), workers[2].leave())])
        assert_lost(outcomes[:2], "rank 2 has left")


def test_a_rank_that_leaves_after_a_sum_takes_no_result_from_the_others() -> None:
    with (
        Serving() as serving,
        Relay(serving.port, Trouble(lost=0.3), 3) as relay,
        clients(relay.port, 2, slots=4) as two,
    ):

        def run_and_leave(calls: Any) -> None:
            at_once([lambda c=c, w=w: (c(), w.leave()) for c, w in zip(calls, two, strict=True)])

        assert_reduced(two, 2_000, ADD, seed=1, run=run_and_leave)


def test_ranks_in_different_calls_raise_rank_mismatch() -> None:
    with Serving() as serving, clients(serving.port, 2) as workers:
        outcomes = try_at_once([*sums(workers[:1], 1.0), *sums(workers[1:], 1.0, operation=OR)])
        # Whoever comes second is told; the other hears of it through the process group, or when its time is up.
        kinds = {type(outcome) for outcome in outcomes}
        assert RankMismatch in kinds
        assert kinds <= {RankMismatch, PeerLost}


def test_a_job_that_finds_no_slots_is_refused_until_another_ends() -> None:
    with Serving(n_slots=16) as serving:
        with clients(serving.port, 1, job=1, slots=16), pytest.raises(Unsupported, match="no slots left"):
            make_client(serving.port, job=2).join(5.0)
        with clients(serving.port, 1, job=2, slots=64) as workers:
            assert workers[0].n_slots == 16  # fewer than it asked for, rather than none
            assert_reduced(workers, 5000, ADD, seed=0)


def test_a_silent_job_loses_its_slots_only_after_its_lease_and_is_told() -> None:
    with Serving(n_slots=16, lease_s=0.2) as serving, clients(serving.port, 1, job=1, slots=16) as old:
        time.sleep(0.3)
        with clients(serving.port, 1, job=2, slots=16) as new:
            assert_reduced(new, 100, ADD, seed=0)
            with pytest.raises(PeerLost, match="silent"):
                at_once(sums(old, 5.0, n=100))
        assert serving.counters()["jobs_evicted"] == 1


def test_a_second_process_in_a_ranks_place_and_another_world_size_are_refused() -> None:
    with Serving() as serving, clients(serving.port, 2):
        for worker, n_workers in ((0, 2), (0, 3)):
            with pytest.raises(Unsupported, match="refused"):
                make_client(serving.port, worker, n_workers).join(5.0)


def test_a_switch_of_another_version_raises_incompatible_version() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        join = make_client(other.getsockname()[1]).join
        answer = b"GWSW\x02\x02" + bytes(34)
        outcome, _ = try_at_once([lambda: join(5.0), lambda: other.sendto(answer, other.recvfrom(4096)[1])])
        assert isinstance(outcome, IncompatibleVersion)
        assert "version 2" in str(outcome)


def test_a_rank_of_another_version_is_told_by_the_switch() -> None:
    with Serving() as serving, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as rank:
        rank.settimeout(5.0)
        rank.sendto(b"GWSW\x02\x01" + bytes(34), ("127.0.0.1", serving.port))
        answer = rank.recv(4096)
        assert answer[:6] == b"GWSW\x01\x03"
        assert answer[8:16] == bytes(8)


def test_a_stopped_client_ends_its_sum() -> None:
    with Serving() as serving, clients(serving.port, 2) as workers:
        outcome, _ = try_at_once([*sums(workers[:1], 60.0), lambda: (time.sleep(0.1), workers[0].stop())])
        assert isinstance(outcome, PeerLost)


@pytest.mark.parametrize(("worker", "n_workers", "slots"), [(0, 33, 16), (2, 2, 16), (0, 0, 16), (0, 1, 3), (0, 1, 0)])
def test_what_a_bitmap_or_a_mask_cannot_hold_is_refused(worker: int, n_workers: int, slots: int) -> None:
    with pytest.raises(InvalidArgument):
        _native.SwitchClient("127.0.0.1", 4790, 1, worker, n_workers, slots)
