"""Describes where a result was measured: machine, versions, commit, network. Every benchmark record and run carries it."""

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

__all__ = ["describe_environment", "machine_id"]

_LOOPBACK_HOSTS = ("localhost", "127.", "::1")


def describe_environment() -> dict[str, str | int]:
    """The machine, the versions and the network of this process, flat and JSON-serialisable.

    Returns: `cpu`, `n_cores` (those this process may use), `memory_bytes`, `os`, `python`, `torch`, `gradwire`,
        `commit` (of gradwire's sources, with `-dirty` where they are altered; `unknown` for an installed package),
        `network` (`netlab RATE_BPS`, `loopback`, or `cluster` when MASTER_ADDR is another host),
        `date` (UTC, ISO 8601).
    Cost: starts git once or twice; call it once a run. Does not import torch.
    """
    return {
        "cpu": _cpu_model(),
        "n_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "gradwire": _version("gradwire"),
        "commit": _commit(Path(__file__).resolve().parent),
        "network": _network(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def machine_id() -> str:
    """The same in all processes that share a kernel, whatever their host names and namespaces."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"  # or gradwire used from its source folder


def _commit(folder: Path) -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        # An installed package may lie inside some other project's checkout, whose commit would be a false witness.
        git("ls-files", "--error-unmatch", "recorder.py")
        commit = git("rev-parse", "--short=12", "HEAD")
        altered = git("status", "--porcelain", "--untracked-files=no", "--", ":(top)src", ":(top)native")
        return commit + ("-dirty" if altered else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _network() -> str:
    named = os.environ.get("GRADWIRE_NETWORK")
    if named:
        return named
    return "loopback" if os.environ.get("MASTER_ADDR", "localhost").startswith(_LOOPBACK_HOSTS) else "cluster"
