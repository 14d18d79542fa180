"""LocalSgd with torchft's manager: ranks that die, leave and join at outer steps. Each rank is a process of its own."""

import functools
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from elastic import by_step, site
from gradwire.doors.elastic import Quorum
from gradwire.wire.communicator import Meeting
from ranks import on_ranks, patience


@pytest.mark.parametrize(
    ("scheme", "fragments", "dies_in_exchange"),
    [("plain", 1, False), ("gcomp:importance=none", 1, True), ("one-bit:error_feedback=false", 2, True)],
)
def test_others_go_on_with_the_mean_of_who_is_there(
    tmp_path: Path, scheme: str, fragments: int, dies_in_exchange: bool
) -> None:
    flags = [tmp_path / "all are here", tmp_path / "another one comes"]
    plan = {"scheme": scheme, "fragments": fragments, "n_rounds": 30, "waits": {8: str(flags[0]), 16: str(flags[1])}}
    with site() as here:
        here.start(0, **plan)
        here.start(1, **plan, leaves_at=14)
        here.start(2, **plan, dies_at=9, dies_in_exchange=dies_in_exchange)
        here.start(3, **plan)
        for name in range(4):
            here.wait_for(name, "starts")
        time.sleep(patience())  # until it has asked for a quorum, too
        flags[0].touch()
        here.start(4, **plan)
        here.wait_for(4, "starts")
        time.sleep(patience())
        flags[1].touch()
        said, statuses = here.end()
    assert statuses == {0: 0, 1: 0, 2: 9, 3: 0, 4: 0}
    assert {told["name"] for told in said if told.get("done") == 30} == {0, 3, 4}
    (came,) = [told["came"] for told in said if told["name"] == 4 and "came" in told]
    assert 9 < came < 30
    steps = by_step(said)
    for name in (0, 3):  # of whom one may have had the mean before a rank died, and the other not
        done = {told["step"] for told in said if told["name"] == name and "step" in told}
        assert len({9, *range(11, 30)} - done) <= 1
    n_checked = 0
    for step in range(11, 30):
        told = steps[step]
        assert len({one["bits"] for one in told}) == 1, "all who are there hold the same bits"
        givers = [one["given"][0] for one in told if one["given"]]
        if scheme == "plain" and len(told) == told[0]["n"]:
            n_checked += 1
            mean = sum(givers) / len(givers)
            assert all(abs(one["start"] - mean - one["end"]) < 1e-5 for one in told), step
    assert scheme != "plain" or n_checked > 5
    assert {one["name"] for one in steps[29]} == {0, 3, 4}


def test_a_comer_with_another_model_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    flag = tmp_path / "go"
    with site() as here:
        for name in range(2):
            here.start(name, n_rounds=20, waits={5: str(flag)})
        here.start(2, width=25)
        here.wait_for(0, "came")
        here.wait_for(2, "starts")
        flag.touch()
        said, statuses = here.end()
    assert statuses == {0: 0, 1: 0, 2: 3}
    (refused,) = [told for told in said if "error" in told]
    assert (refused["name"], refused["error"]) == (2, "InvalidArgument")
    assert "train another model: '0.bias' is not the same there" in refused["words"]
    assert all(len({one["bits"] for one in told}) == 1 for told in by_step(said).values())


def test_a_scheme_that_cannot_serve_here_is_refused() -> None:
    with site() as here:
        for name in range(2):
            here.start(name, scheme="gcomp", n_rounds=4)
        said, statuses = here.end()
    assert statuses == {0: 3, 1: 3}
    assert all(told["error"] == "InvalidArgument" for told in said if "error" in told)
    assert any("reads the optimizer" in told["words"] for told in said if "error" in told)


def test_too_few_ranks_for_a_quorum_end_with_peer_lost() -> None:
    with site() as here:
        here.start(0, n_rounds=10_000, quorum_timeout_s=4 * patience())
        here.start(1, n_rounds=10_000, dies_at=5)
        started = time.monotonic()
        said, statuses = here.end()
    assert statuses == {0: 3, 1: 9}
    (lost,) = [told for told in said if "error" in told]
    assert lost["error"] == "PeerLost"
    assert "no quorum of enough ranks came together in time" in lost["words"]
    assert time.monotonic() - started < 60 * patience()


@on_ranks(1)
def test_managers_that_do_not_fit_are_refused(rank: int, world_size: int) -> None:
    net, manager = nn.Linear(3, 2), SimpleNamespace(start_quorum=None)  # a manager's, but it is not torchft's
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for scheme, delay, words in (
        ("plain", 0, r"Manager\(pg=gradwire.Members\(\), use_async_quorum=False"),
        ("plain", 1, "leave out delay="),
        (gradwire.schemes.by_name("gcomp"), 0, "give the name of 'gcomp'"),
    ):
        with pytest.raises(gradwire.InvalidArgument, match=words):
            gradwire.LocalSgd(net, optimizer, scheme, 2, group=manager, delay=delay)


@on_ranks(2)
def test_what_was_not_sent_outlives_the_ranks_it_was_made_among(rank: int, world_size: int) -> None:
    manager = SimpleNamespace(_pg=gradwire.Members(), _use_async_quorum=False, register_state_dict_fn=lambda *_: None)
    manager.errored, manager.current_step = lambda: None, lambda: 1
    store = dist.distributed_c10d._get_default_store()

    def make(meeting: Meeting) -> gradwire.Reducer:
        return gradwire.Reducer("one-bit", meeting, names={"a": torch.zeros(40, 30)})

    quorum = Quorum(manager, make, dict, lambda _: None)
    quorum._has_come = False
    norms = []
    for number, sent in enumerate([torch.randn(40, 30), torch.full((40, 30), 1e-6)]):
        quorum._members.meeting = Meeting(dist.PrefixStore(f"meeting{number}", store), rank, world_size)
        quorum._exchange(functools.partial(dict, a=sent))
        quorum.keep()
        norms.append(float(quorum._kept["residuals"]["a"].norm()))
    quorum.close()
    assert 0 < norms[1] < 0.9 * norms[0], norms  # the second took it along, and would have left nothing of its own
