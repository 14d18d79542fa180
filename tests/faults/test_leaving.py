"""However a script ends, its processes end: without close(), after an exception, on Ctrl-C, in the middle of a step."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from subprocess import PIPE

import pytest

from gradwire_lab.ranks.network import find_free_port
from programs import TORCHRUN, run
from ranks import environment_of, patience

SOURCES = str(Path(__file__).parents[2] / "src")
SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import gradwire
from gradwire import schemes

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 3))
ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
attachment = gradwire.attach(ddp, optimizer, os.environ["SCHEME"], timeout_s=300)

def take_step():
    optimizer.zero_grad()
    ddp(torch.full((4, 20), float(rank))).square().mean().backward()
    optimizer.step()

for _ in range(3):
    take_step()
"""


def run_script(ending: str, scheme: str, world_size: int = 2) -> list[subprocess.CompletedProcess[str]]:
    """Start `world_size` ranks of SCRIPT + `ending`; how each of them ended. A rank that hangs fails the test."""
    port = find_free_port()
    command = [sys.executable, "-X", "faulthandler", "-c", SCRIPT + textwrap.dedent(ending)]
    processes = []
    for rank in range(world_size):
        variables = {**os.environ, **environment_of(rank, world_size, port), "PYTHONPATH": SOURCES, "SCHEME": scheme}
        processes.append(subprocess.Popen(command, env=variables, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True))
    ended = []
    try:
        for process in processes:  # in turn: the next one's stdin is open until this one has ended
            out, err = process.communicate(timeout=150 * patience())
            ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
    return ended


@pytest.mark.parametrize("scheme", ["gcomp", "plain"])
def test_script_that_ends_without_closing_ends_well(scheme: str) -> None:
    for rank in run_script("print('done')", scheme):
        assert (rank.returncode, rank.stdout) == (0, "done\n"), rank.stderr
        assert "Traceback" not in rank.stderr, rank.stderr


def test_script_that_ends_while_its_lane_computes_ends_well() -> None:
    """Whatever comes back from native code while the interpreter goes down ends the process by SIGABRT."""
    ending = """
    matrix, ends = torch.randn(1000, 1000), time.monotonic() + 2.5
    def compute():
        while time.monotonic() < ends:
            matrix @ matrix
    attachment.scheme.session.communicator.submit(compute)
    if os.fork() == 0:
        sys.exit()  # a child that ends as scripts do
    print(os.wait()[1])
    """
    for rank in run_script(ending, "plain"):
        assert (rank.returncode, rank.stdout) == (0, "0\n"), rank.stderr


def test_new_process_group_after_the_old_one_takes_new_attachments_and_goes_without_closing_them() -> None:
    ending = """
    dist.destroy_process_group()
    attachment.close()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    attachment = gradwire.attach(ddp, optimizer, "gcomp", timeout_s=300)
    take_step()
    dist.destroy_process_group()
    print(attachment.stats()["n_steps"])
    """
    for rank in run_script(ending, "gcomp"):
        assert (rank.returncode, rank.stdout) == (0, "1\n"), rank.stderr
        assert "Traceback" not in rank.stderr, rank.stderr


def test_uncaught_exception_on_one_rank_ends_all_with_its_traceback() -> None:
    ending = """
    for step in range(100):
        if rank == 1 and step == 5:
            raise ZeroDivisionError("the user's own bug")
        take_step()
    """
    zero, one = run_script(ending, "gcomp")
    assert (zero.returncode, one.returncode) == (1, 1)
    assert "ZeroDivisionError: the user's own bug" in one.stderr
    assert "PeerLost: rank 0 lost rank 1" in zero.stderr


def test_interrupt_ends_a_rank_though_its_lane_waits_for_a_peer() -> None:
    """Rank 1 lives on and never comes to the step; rank 0's lane waits for it when rank 0 is interrupted."""
    ending = """
    if rank == 1:
        sys.stdin.read()  # until rank 0 has ended
        os._exit(7)
    from gradwire.core.bucket import Bucket
    attachment.scheme.reduce(Bucket(torch.ones(1000), step=9))
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    while True:
        time.sleep(0.1)
    """
    zero, one = run_script(ending, "truncated-float")
    assert zero.returncode == -signal.SIGINT, zero.stderr
    assert "KeyboardInterrupt" in zero.stderr
    assert one.returncode == 7


@pytest.mark.parametrize("scheme", ["gcomp", "one-bit"])
def test_death_of_the_rank_that_hosts_the_store_is_a_typed_error_on_the_others(scheme: str) -> None:
    """Where nobody can leave a note of who was lost, and who is asked for one does not answer."""
    ending = """
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        for _ in range(100):
            take_step()
    except gradwire.PeerLost as error:
        print(type(error).__name__, "rank 0" in str(error), time.monotonic() - started)
    """
    zero, *others = run_script(ending, scheme, world_size=3)
    assert zero.returncode == -signal.SIGKILL
    # Without a note a rank may see first that the other one, which has heard of it already, breaks off.
    told = [rank.stdout.split() for rank in others]
    assert [name for name, *_ in told] == ["PeerLost"] * 2, [rank.stderr for rank in others]
    assert all(float(after_s) < 60 * patience() for *_, after_s in told)
    assert any(names_it == "True" for _, names_it, _ in told)


@pytest.mark.parametrize("scheme", ["gcomp", "one-bit"])
def test_stopped_peer_is_lost_after_the_timeout_and_is_told_so_when_it_goes_on(scheme: str) -> None:
    ending = """
    attachment.close()
    attachment = gradwire.attach(ddp, optimizer, os.environ["SCHEME"], timeout_s=3)
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    take_step()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        for _ in range(100):
            take_step()
    except gradwire.PeerLost as error:
        print("PeerLost", rank == 1 or "rank 1" in str(error))
    finally:
        if rank == 0:
            os.kill(pids[1], signal.SIGCONT)
    """
    for rank in run_script(ending, scheme):
        assert rank.stdout == "PeerLost True\n", rank.stderr


def test_torchrun_trains_with_two_ranks(tmp_path: Path) -> None:
    ending = """
    stats = attachment.stats()
    sums = [None, None]
    dist.all_gather_object(sums, float(sum(p.double().sum() for p in model.parameters())))
    assert sums[0] == sums[1], sums
    attachment.close()
    dist.destroy_process_group()
    if rank == 0:
        print("trained", stats["world_size"], stats["n_steps"], gradwire.thread_count())
    """
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + textwrap.dedent(ending))
    ended = run([*TORCHRUN, script], env={**os.environ, "PYTHONPATH": SOURCES, "SCHEME": "gcomp"})
    n_threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"trained 2 3 {n_threads}\n"
