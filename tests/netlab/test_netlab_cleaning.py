"""Nothing of a lab is left: after its end, Ctrl-C, SIGTERM, a killed owner, even with its network process."""

import signal
import subprocess
from pathlib import Path

import pytest
from lab_watch import CLI, Started, is_running, wait_until

from gradwire_lab.ranks.netlab import Netlab
from gradwire_lab.ranks.netlab.stale import end_stale_labs, find_stale_labs, lab_identity
from programs import child_pids, run_well
from ranks import patience

pytestmark = pytest.mark.root

N_RANKS = 3


def start_lab(folder: Path) -> tuple[subprocess.Popen[bytes], Started]:
    """A lab that another process owns, with ranks that sleep and one child of a rank that left its session."""
    script = f"setsid sleep 100 & touch {folder}/$RANK; sleep 100"
    owner = subprocess.Popen([*CLI, "run", "--ranks", str(N_RANKS), "--rate", "1gbit", "--", "sh", "-c", script])
    wait_until(lambda: len(list(folder.iterdir())) == N_RANKS, "the ranks start")
    started = Started(owner.pid)
    assert len(started.pids) >= 1 + 2 * N_RANKS
    assert len(started.namespaces) >= N_RANKS
    return owner, started


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_nothing_is_left_after_an_interrupt_or_a_killed_owner(number: int, status: int, tmp_path: Path) -> None:
    owner, started = start_lab(tmp_path)
    owner.send_signal(number)
    assert owner.wait(30 * patience()) == status
    started.wait_for_the_end()


def test_clean_ends_what_is_left_when_owner_and_network_process_are_killed_at_once(tmp_path: Path) -> None:
    owner, started = start_lab(tmp_path)
    identity = lab_identity(owner.pid)
    (fabric,) = [pid for pid in child_pids(owner.pid) if b"fabric.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    # Stopped first, so that neither can react to the other's end; the ranks' children have no parent to die with.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        subprocess.run(["kill", f"-{number.value}", str(owner.pid), str(fabric)], check=True)
    owner.wait()
    wait_until(lambda: identity in find_stale_labs(), "the lab is found to be stale")
    assert f"a lab of dead process {owner.pid}" in run_well([*CLI, "clean"])
    started.wait_for_the_end()
    assert identity not in find_stale_labs()


def test_clean_leaves_a_lab_that_is_in_use_alone() -> None:
    with Netlab(2, "1gbit") as lab:
        lab.start(["sleep", "0.5"])
        end_stale_labs()
        lab.wait(30 * patience()).raise_if_failed()
        assert len(lab.counters()) == 2


def test_an_exception_in_the_with_statement_ends_the_ranks() -> None:
    def fail_with_a_running_lab() -> None:
        with Netlab(2, "1gbit") as lab:
            pids.extend(lab.start(["sleep", "100"]).pids)
            raise RuntimeError("on purpose")

    pids: list[int] = []
    with pytest.raises(RuntimeError, match="on purpose"):
        fail_with_a_running_lab()
    assert len(pids) == 2
    assert not any(map(is_running, pids))


def test_a_process_that_left_the_ranks_session_ends_with_the_lab(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with Netlab(1, "1gbit") as lab:
        lab.run(["sh", "-c", f"setsid sleep 100 & echo $! > {file}; sleep 0.5"]).raise_if_failed()
        assert is_running(int(file.read_text()))
    wait_until(lambda: not is_running(int(file.read_text())), "the stray process ends")
