"""Checkpoints of a training run: everything that the next step depends on, of every rank.

    DIR/step-00000100/shared.pt    model, optimizer, scheduler, step, identity of the run; written by rank 0
    DIR/step-00000100/rank-2.pt    the scheme's state and the random state of rank 2

One that is there is whole: renamed when all ranks, which must see one folder, are done. Files load with `weights_only=True`.
"""

import contextlib
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import CorruptMessage, IncompatibleVersion, InvalidArgument, RankMismatch

_FORMAT = 1
_KEPT = 2  # the newest, and one more in case the newest came to harm
_NAME = re.compile(r"step-(\d{8})")


def find_newest(folder: Path) -> Path | None:
    """The checkpoint of the highest step in `folder`, or None."""
    if not folder.is_dir():
        return None
    found = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())
    return found[-1] if found else None


def save(
    folder: Path, step: int, identity: dict[str, Any], shared: dict[str, Any], own: dict[str, Any], device: torch.device
) -> None:
    """Write the checkpoint of `step`; a collective call. `shared` is taken from rank 0, `own` from every rank. Raises:
    RankMismatch, on every rank, when any of them could not write its part; earlier checkpoints are untouched."""
    rank = dist.get_rank()
    final, unfinished = folder / f"step-{step:08d}", folder / f".step-{step:08d}"
    head = {"format": _FORMAT, "step": step, "world_size": dist.get_world_size(), "identity": identity}
    with _together("write", unfinished, device):
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)  # of a run that died in the middle
            unfinished.mkdir(parents=True)
    with _together("write", unfinished, device):
        if rank == 0:
            _write(unfinished / "shared.pt", {**head, **shared})
        _write(unfinished / f"rank-{rank}.pt", {**head, **own})
    with _together("rename", unfinished, device):
        if rank == 0:
            shutil.rmtree(final, ignore_errors=True)
            unfinished.rename(final)
            for path in sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name))[:-_KEPT]:
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _together(verb: str, path: Path, device: torch.device) -> Iterator[None]:
    """What is done inside goes well on all ranks, or it raises on all. Raises: RankMismatch."""
    failure: Exception | None = None
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        failure = error
    failed = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=device)
    failed[dist.get_rank()] = failure is not None
    dist.all_reduce(failed)
    if bool(failed.any()):
        ranks = failed.nonzero().flatten().tolist()
        reason = f": {failure}" if failure is not None else ""
        raise RankMismatch(f"rank(s) {ranks} could not {verb} the checkpoint {path}{reason}") from failure


def load(
    path: Path, identity: dict[str, Any], world_size: int, rank: int
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """(step, shared, own) of a checkpoint, checked against this run.

    Raises: CorruptMessage (a file is missing, damaged or of another step), IncompatibleVersion (format),
        RankMismatch (world size), InvalidArgument (another workload, scheme, batch size or seed: named).
    """
    shared = _read(path / "shared.pt")
    if shared["world_size"] != world_size:
        raise RankMismatch(
            f"{path} was written by {shared['world_size']} ranks, this run has {world_size}: "
            f"resume with --ranks {shared['world_size']}"
        )
    for key, expected in identity.items():
        found = shared["identity"].get(key)
        if found != expected:
            raise InvalidArgument(
                f"{path} was written with {key}={found!r}, this run has {expected!r}: use the same, or another folder"
            )
    own = _read(path / f"rank-{rank}.pt")
    if own["step"] != shared["step"]:
        raise CorruptMessage(f"{path}: rank-{rank}.pt is of step {own['step']}, shared.pt of step {shared['step']}")
    return int(shared["step"]), shared, own


def _write(path: Path, content: dict[str, Any]) -> None:
    with open(path, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())  # or the rename below could outlive the data it names


def _read(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CorruptMessage(f"{path} is missing; delete the checkpoint, an older one may be beside it") from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise CorruptMessage(f"{path} is damaged ({reason}); delete the checkpoint") from error
    if not isinstance(content, dict) or not {"format", "step", "world_size", "identity"} <= content.keys():
        raise CorruptMessage(f"{path} is not a checkpoint of gradwire train")
    if content["format"] != _FORMAT:
        raise IncompatibleVersion(f"{path} has format {content['format']}, this gradwire reads {_FORMAT}")
    return content
