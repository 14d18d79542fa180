"""Ranks get torchrun's variables, their output is forwarded, their ends are collected; no rights are needed."""

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from lab_watch import CLI, is_running, wait_until

from gradwire.errors import InvalidArgument, PeerLost
from gradwire_lab.ranks.launch import start_ranks
from gradwire_lab.ranks.network import current_network
from gradwire_lab.ranks.supervisor import LaunchResult, end_on_signals, run_to_end
from programs import run
from ranks import patience

RUN_ON_LOOPBACK = [*CLI, "run", "--ranks", "2", "--rate", "none", "--"]


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def launch_ranks(command: list[str], n_ranks: int, timeout_s: float | None = None, **options: Any) -> LaunchResult:
    with start_ranks(command, n_ranks, **options) as launch:
        return launch.wait(timeout_s or 30 * patience())


def lines_of(script: str, n_ranks: int, *rate: str, **options: Any) -> list[str]:
    lines: list[str] = []
    with start_ranks(shell(script), n_ranks, *rate, on_line=lambda rank, line: lines.append(line), **options) as launch:
        launch.wait(30 * patience()).raise_if_failed()
        assert not launch.shaped
    return lines


def test_every_rank_gets_torchruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR GLOO_SOCKET_IFNAME OMP_NUM_THREADS MASTER_PORT"
    lines = sorted(lines_of("echo " + " ".join(f"${name}" for name in names.split()), 3))
    (port,) = {line.split()[-1] for line in lines}
    assert 1024 <= int(port) <= 65535
    assert lines == [f"{rank} 3 {rank} 3 127.0.0.1 lo 1 {port}" for rank in range(3)]


def test_ranks_on_loopback_are_told_so_and_variables_that_the_caller_sets_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    lines = lines_of("env", 2, "none", env={"MASTER_PORT": "1234"})
    variables = dict(line.split("=", 1) for line in lines if line.startswith(("GRADWIRE_", "OMP_NUM", "MASTER_PORT")))
    network = current_network(variables)
    assert (network.kind, network.rate_bps, network.n_ranks_on_machine) == ("loopback", None, 2)
    assert (variables["OMP_NUM_THREADS"], variables["MASTER_PORT"]) == ("3", "1234")


def test_output_is_forwarded_by_line_with_its_rank_and_stream(capfd: pytest.CaptureFixture[str]) -> None:
    script = "printf 'one\\ntwo'; printf 'trouble\\n' >&2"
    assert launch_ranks(shell(script), 2).status == 0
    output = capfd.readouterr()
    assert sorted(output.out.splitlines()) == ["[0] one", "[0] two", "[1] one", "[1] two"]
    assert sorted(output.err.splitlines()) == ["[0] trouble", "[1] trouble"]


def test_much_output_arrives_whole_and_in_order() -> None:
    assert lines_of("seq 1 200000", 1) == [str(number) for number in range(1, 200_001)]


def test_what_a_reader_of_lines_raises_comes_out_of_wait_and_hangs_no_rank() -> None:
    def refuse(rank: int, line: str) -> None:
        raise ValueError(f"cannot read {line}")

    with pytest.raises(ValueError, match="cannot read 1"):
        launch_ranks(shell("seq 1 100000"), 2, on_line=refuse)


@pytest.mark.parametrize(
    ("command", "n_ranks", "options", "status", "words"),
    [
        (shell("[ $RANK = 1 ] && exit 7; sleep 100"), 3, {"grace_s": 0.2}, 7,
         "rank 1 ended with status 7 (the first to fail; then ranks 0, 2 had to be ended)"),
        (shell("[ $RANK = 0 ] && kill -SEGV $$; sleep 100"), 2, {"grace_s": 0}, 139, "rank 0 was killed by SIGSEGV"),
        (shell("sleep 100"), 2, {"timeout_s": 0.3}, 124, "time is up; ranks 0, 1 had not finished"),
        (["/no/such/program"], 2, {"grace_s": 5}, 127, "cannot run /no/such/program"),
        (["/etc/passwd"], 2, {"grace_s": 5}, 126, "cannot run /etc/passwd"),
    ],
    ids=["fails, and the others are ended after their grace", "signal", "too long", "no program", "no permission"],
)  # fmt: skip
def test_a_rank_that_fails_is_named_with_the_shells_status(
    command: list[str], n_ranks: int, options: dict, status: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    result = launch_ranks(command, n_ranks, **options)
    assert result.status == status
    assert words in str(result) + capfd.readouterr().err


def test_the_others_have_their_grace_to_end_by_themselves() -> None:
    script = "[ $RANK = 1 ] && exit 7; sleep 0.5; exit 3"
    result = launch_ranks(shell(script), 2, grace_s=30)
    assert result.exit_codes == (3, 7)
    assert result.first_failed == 1
    assert result.ended_by_us == ()
    with pytest.raises(PeerLost, match="rank 1 ended with status 7"):
        result.raise_if_failed()


def test_a_rank_that_ignores_sigterm_or_is_stopped_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gradwire_lab.ranks.supervisor._TERM_TO_KILL_S", 0.3)
    fails = f"while [ $(ls {tmp_path} | wc -l) -lt 2 ]; do sleep 0.05; done; exit 1"  # once both are deaf
    stays = f"trap '' TERM; touch {tmp_path}/$RANK; [ $RANK = 1 ] && kill -STOP $$; while :; do sleep 0.1; done"
    assert launch_ranks(shell(f"[ $RANK = 0 ] && {{ {fails}; }}; {stays}"), 3, grace_s=0.3).exit_codes == (
        1,
        -signal.SIGKILL,
        -signal.SIGKILL,
    )


def test_what_a_rank_leaves_behind_is_ended_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    assert launch_ranks(shell(f"sleep 100 & echo $! > {file}"), 1).status == 0
    wait_until(lambda: not is_running(int(file.read_text())), "the rank's child ends")


@pytest.mark.parametrize(
    ("command", "n_ranks", "match"),
    [*((["true"], n, "whole number") for n in (0, -1, 1.5, True)), ([], 2, "no command")],
)
def test_a_bad_number_of_ranks_and_an_empty_command_are_refused(command: list[str], n_ranks: Any, match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        start_ranks(command, n_ranks)


def test_ranks_started_from_a_thread_outlive_it() -> None:
    launches = []
    thread = threading.Thread(target=lambda: launches.append(start_ranks(shell("sleep 0.5"), 2)))
    thread.start()
    thread.join()
    with launches[0] as launch:
        assert launch.wait(30 * patience()).status == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_the_command_line_reaches_the_ranks(number: int, status: int, tmp_path: Path) -> None:
    trap = f"trap 'echo got > {tmp_path}/$RANK; exit 5' INT TERM"
    script = f"{trap}; echo up > {tmp_path}/up$RANK; while :; do sleep 0.1; done"
    owner = subprocess.Popen([*RUN_ON_LOOPBACK, *shell(script)])
    wait_until(lambda: len(list(tmp_path.glob("up*"))) == 2, "the ranks start")
    owner.send_signal(number)
    assert owner.wait(30 * patience()) == status
    assert (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_reaches_a_command_that_has_time_to_end(number: int, raised: type, tmp_path: Path) -> None:
    script = "trap 'sleep 0.5; echo ended; exit 5' INT TERM; echo up; while :; do sleep 0.1; done"
    out = tmp_path / "out"

    def interrupt() -> None:
        wait_until(lambda: out.read_text() == "up\n", "the command starts")
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    with out.open("wb") as output, end_on_signals():
        thread.start()
        with pytest.raises(raised):
            run_to_end(shell(script), output)
    thread.join()
    assert out.read_text() == "up\nended\n"


def test_a_command_that_ends_by_itself_gives_its_status(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as output:
        assert run_to_end(shell("echo a; echo b >&2; exit 7"), output) == 7
    assert (tmp_path / "out").read_text() == "a\nb\n"


def test_ranks_on_loopback_die_with_a_killed_owner(tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/$RANK.new; mv {tmp_path}/$RANK.new {tmp_path}/$RANK; exec sleep 100"
    owner = subprocess.Popen([*RUN_ON_LOOPBACK, *shell(script)])
    wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)), "the ranks start")
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    owner.kill()
    owner.wait()
    wait_until(lambda: not any(map(is_running, pids)), "the ranks end")


def test_a_reader_that_goes_away_does_not_hang_the_ranks() -> None:
    script = f"{' '.join(RUN_ON_LOOPBACK)} seq 1 300000 | head -1"
    assert run(shell(script), 60).stdout.startswith("[")
