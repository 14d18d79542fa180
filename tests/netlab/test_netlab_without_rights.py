"""Without root: a lab in a user namespace where the kernel allows one, else loopback, and every result says which."""

import shutil
import subprocess
import sys
from unittest.mock import Mock

import pytest
from lab_watch import CLI

from gradwire_lab.ranks.netlab.fabric import UnavailableError, become_able
from programs import run, run_well

# Runs a command as uid 0 without any capability, in a user namespace that may have no further ones below it: what a
# locked-down kernel looks like from the inside.
REFUSE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
user_id, group_id = os.geteuid(), os.getegid()
if libc.unshare(0x10000000):
    sys.exit(77)
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user_id} 1"), ("gid_map", f"0 {group_id} 1")):
    open(f"/proc/self/{name}", "w").write(text)
open("/proc/sys/user/max_user_namespaces", "w").write("0")
for capability in range(64):
    libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.execv(sys.argv[1], sys.argv[1:])
"""
SHOW = ["sh", "-c", "echo $GRADWIRE_NETWORK; grep CapEff /proc/self/status; tail -n +3 /proc/net/dev | cut -d: -f1"]


def run_refused(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`gradwire netlab run` where the kernel refuses every namespace."""
    done = run([sys.executable, "-c", REFUSE, *CLI, "run", "--ranks", "2", *arguments], 60)
    if done.returncode == 77:
        pytest.skip("no user namespace here, not even to lock one down in")
    return done


def test_where_nothing_is_allowed_ranks_run_on_loopback_and_are_told_so_and_so_are_counters_and_events() -> None:
    wanted = ["--rate", "1gbit", "--counters", "--at", "0:rate:0=1mbit"]
    done = run_refused(*wanted, "--", "sh", "-c", f"{SHOW[-1]}; sleep 0.5")
    assert done.returncode == 0, done.stderr
    assert "[0] loopback\n" in done.stdout
    assert "[1] loopback\n" in done.stdout
    assert "no shaped network" in done.stderr
    assert "run as root" in done.stderr
    assert "set_rate needs a shaped network" in done.stderr
    assert "no counters" in done.stderr


def test_where_nothing_is_allowed_a_shaped_network_can_be_required() -> None:
    done = run_refused("--require-shaping", "--", "true")
    assert done.returncode == 1
    assert "Unsupported: no shaped network" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_user_without_rights_gets_a_shaped_lab_in_a_user_namespace() -> None:
    command = [*CLI, "run", "--ranks", "2", "--rate", "100mbit", "--counters", "--", *SHOW]
    if run_well(["id", "-u"]) != "0\n":
        prefix = []
    elif (setpriv := shutil.which("setpriv")) is None:
        pytest.skip("setpriv (util-linux) is not installed")
    else:  # a real user id; allowed to read files, for Python may be installed where nobody can look
        read = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        prefix = [setpriv, "--reuid=65534", "--regid=65534", "--clear-groups", *read]
    done = run([*prefix, *command], 60)
    if "user namespace" in done.stderr:
        pytest.skip(f"this kernel refuses unprivileged user namespaces: {done.stderr}")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        lines = [line.split("] ", 1)[1].strip() for line in done.stdout.splitlines() if line.startswith(f"[{rank}]")]
        assert lines[0] == "netlab 100000000"
        assert int(lines[1].split()[1], 16) == 0, "a rank must not keep the namespace's capabilities"
        assert {"lo", "eth0"} <= set(lines[2:])
    assert "headers included" in done.stderr


def test_a_kernel_that_refuses_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=PermissionError(1, "Operation not permitted"))
    monkeypatch.setattr("gradwire_lab.ranks.netlab.fabric.unshare", refuse)
    with pytest.raises(UnavailableError, match="Operation not permitted"):
        become_able()
