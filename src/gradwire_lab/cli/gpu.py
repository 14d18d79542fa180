"""`gradwire gpu check`: what this machine's GPUs show of gradwire, section by section, in one record."""

import argparse
import contextlib
import functools
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradwire.errors import InvalidArgument
from gradwire_lab.cli.options import add_json, switch
from gradwire_lab.ranks.launch import run_gradwire
from gradwire_lab.results.records import write_json

SECTIONS = ("devices", "copies", "kernel rates", "one rank", "two ranks")
_RANK = "GRADWIRE_GPU_RANK"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["check"], help="check: run every section in turn; takes a few minutes")
    add_json(parser, "the record; sections that passed on this device are not repeated")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="only this section; repeatable")
    switch(parser, "--again", "repeat sections that have passed")


def run(arguments: argparse.Namespace) -> int:
    """Exit status: 0 if every section asked for has passed, 1 if one failed or there is no device to check."""
    from gradwire_lab.bench.device_checks import why_no_device

    if os.environ.get(_RANK):
        return _run_rank()
    record, reason = _read(arguments.json), why_no_device()
    record |= _describe(has_device=reason is None)
    if reason is None:
        return run_sections(_sections(), record, arguments)
    record["sections"] = {name: {"status": "not run", "reason": reason} for name in SECTIONS}
    _write(arguments.json, record)
    print(f"gradwire gpu: nothing was checked: {reason}", file=sys.stderr)
    return 1


def run_sections(sections: dict[str, Callable[[], dict[str, Any]]], record: dict[str, Any], arguments: Any) -> int:
    """Run what was asked for, and keep each section's outcome as soon as it is there."""
    kept = record.setdefault("sections", {})
    asked = arguments.section or list(sections)
    for name in asked:
        before = kept.get(name, {})
        if before.get("status") == "passed" and before.get("key") == record["key"] and not arguments.again:
            print(f"{name}: passed before")
            continue
        print(f"{name}: ...", flush=True)
        started = time.perf_counter()
        try:
            outcome = {"status": "passed", **sections[name]()}
        except Exception as error:  # whatever it is belongs into the record, and the next section still has its say
            outcome = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        kept[name] = {"key": record["key"], **outcome, "wall_s": round(time.perf_counter() - started, 3)}
        _write(arguments.json, record)
        print(": ".join(filter(None, (name, outcome["status"], outcome.get("error")))), flush=True)
    return int(any(kept[name]["status"] == "failed" for name in asked))


def _sections() -> dict[str, Callable[[], dict[str, Any]]]:
    import torch

    from gradwire.gpu.kernels import MAKERS, kernels_on
    from gradwire_lab.bench import device_checks as checks

    current = torch.accelerator.current_accelerator()
    assert current is not None
    device = torch.device(current.type, torch.accelerator.current_device_index())

    def measure_kernels() -> dict[str, Any]:
        if device.type not in MAKERS:
            return {"status": "not run", "reason": f"kernels are for NVIDIA GPUs, and this is {device}"}
        kernels = kernels_on(device)
        return checks.list_kernels(kernels) | checks.measure_kernels(kernels)

    return {
        "devices": lambda: checks.describe_devices(device),
        "copies": lambda: checks.measure_copies(device),
        "kernel rates": measure_kernels,
        "one rank": lambda: _check_in_ranks(1),
        "two ranks": lambda: _check_in_ranks(2),
    }


def _check_in_ranks(n_ranks: int) -> dict[str, Any]:
    """Every scheme in ranks of their own: on a device each where there are enough, else they share one, over Gloo. Over
    NCCL, those that work on the device do so too."""
    import torch

    are_enough = torch.accelerator.device_count() >= n_ranks and torch.cuda.is_available()
    backend = "cpu:gloo,cuda:nccl" if are_enough else "gloo"
    run_gradwire(["gpu", "check"], n_ranks, env={_RANK: backend}, timeout_s=400)
    return {"backend": backend, "n_ranks": n_ranks}


def _run_rank() -> int:
    import torch
    import torch.distributed as dist

    from gradwire_lab.bench.device_checks import check_features, check_schemes

    rank, backend = int(os.environ["LOCAL_RANK"]), os.environ[_RANK]
    current = torch.accelerator.current_accelerator()
    assert current is not None
    device = torch.device(current.type, rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(backend)
    for placement in ("staged", "device") if "nccl" in backend else ("staged",):
        note = functools.partial(print, f"  {placement}:") if rank == 0 else lambda _: None
        check_schemes(device, note=note, placement=placement)
    if dist.get_world_size() == 1:
        check_features(device)
    dist.destroy_process_group()
    return 0


def _describe(has_device: bool) -> dict[str, Any]:
    import torch

    from gradwire.telemetry.environment import describe_environment

    environment, name = describe_environment(), str(torch.accelerator.current_accelerator()) if has_device else None
    name = torch.cuda.get_device_name() if has_device and torch.cuda.is_available() else name
    # What a section that has passed may be left out for: the same code on the same device.
    key = f"{environment['commit']} {torch.__version__} {name}"
    record = {"benchmark": "gpu-check", "machine": platform.node(), "device": name, "key": key}
    return {**record, "environment": environment}


def _read(path: Path | None) -> dict[str, Any]:
    if path is None or not path.exists():
        return {}
    with contextlib.suppress(ValueError):
        record = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(record, dict) and record.get("benchmark") == "gpu-check":
            return record
    raise InvalidArgument(f"{path} is no record of `gradwire gpu check`; name another file")


def _write(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        write_json(path, record)
