"""Save at a random step and go on in fresh processes: the same bits; another world size and broken states: typed errors.

A broken state is refused, or was not broken where it counts; after a refusal training goes on as if nothing had been loaded.
"""

import io
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

import gradwire
from campaign import models
from campaign.findings import hash_of, launch, require, require_equal, results_of
from campaign.schemes_drawn import draw_variant, optimizer_of, variant_of
from ranks import patience
from small_training import Training

TAMPERINGS = (
    "drop a field", "other type", "other version", "other scheme", "other rank", "drop in state", "other type in state",
    "other shape in state", "extra name in state", "flip bytes", "cut off", "not a state",
)  # fmt: skip


def draw(choose: random.Random) -> dict[str, Any]:
    mode = choose.choice(["exact", "exact", "other world size", "tampered", "tampered"])
    n_before = choose.randint(1, 6)
    return {
        "mode": mode,
        "scheme": draw_variant(choose, repeats=True),
        "world_size": choose.choice([1, 2, 3]),
        "model": choose.choice(["mlp", "attention", "convolutions"]),
        "optimizer": choose.choice([*models.OPTIMIZERS]),
        "amp": choose.random() < 0.2,
        "n_before": n_before,
        "n_steps": n_before + choose.randint(1, 4),
        "tampering": choose.choice(TAMPERINGS),
        "draw": choose.randrange(2**31),
    }


def run(case: dict[str, Any]) -> None:
    world_size, mode = case["world_size"], case["mode"]
    may_differ = variant_of(case).replicas_may_differ
    with tempfile.TemporaryDirectory() as folder:
        through = results_of(launch(train_through, world_size, case, folder))
        if not may_differ:
            require_equal([[one["hash"]] for one in through])
        if mode == "other world size":
            others = results_of(launch(load_elsewhere, world_size + 1, case, folder))
            if not may_differ:
                require_equal([[one["hash"]] for one in others])
            return
        resumed = results_of(launch(resume, world_size, case, folder))
        for rank, (one, expected) in enumerate(zip(resumed, through, strict=True)):
            stands = f"rank {rank} stands at step {one['step']}, not {expected['step']}"
            require(one["step"] == expected["step"], stands)
            what = "after a refused state" if mode == "tampered" else "resumed"
            require(one["hash"] == expected["hash"], f"rank {rank} has other bits {what} than in one go: {one['said']}")


def _loss(module: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    return (module(models.batch_for(rank, step)) - 1).square().mean()


class _Training(Training):
    def __init__(self, rank: int, case: dict[str, Any]) -> None:
        torch.manual_seed(2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3, enabled=case["amp"])
        made = variant_of(case).make(), models.OPTIMIZERS[optimizer_of(case)], models.MODELS[case["model"]], _loss
        # DDP's first step in a process has other buckets than all later ones, but for models that may leave parameters
        # unused; and where buckets end decides how sums are rounded, with DDP alone too.
        ddp = {"bucket_cap_mb": 25, "find_unused_parameters": True}
        scaler = self.scaler if case["amp"] else None
        super().__init__(rank, *made, ddp, scaler=scaler, timeout_s=60 * patience())

    def train(self, first: int, end: int) -> None:
        for step in range(first, end):
            self.take_scaled_step(self.scaler, step)

    def save(self, path: Path) -> None:
        # Ours first: it takes the steps that were called for.
        state = {
            "gradwire": self.attachment.state_dict(),
            "model": self.ddp.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }
        torch.save(state, path)

    def restore(self, saved: dict[str, Any]) -> None:
        self.ddp.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scaler.load_state_dict(saved["scaler"])
        self.attachment.load_state_dict(saved["gradwire"])

    def end(self, said: str = "") -> dict[str, Any]:
        step = self.attachment.step
        self.attachment.close()
        return {"hash": hash_of(self.ddp.module), "step": step, "said": said}


def train_through(rank: int, world_size: int, case: dict[str, Any], folder: str) -> dict[str, Any]:
    training = _Training(rank, case)
    training.train(0, case["n_before"])
    training.save(Path(folder) / f"{rank}.pt")
    training.train(case["n_before"], case["n_steps"])
    return training.end()


def resume(rank: int, world_size: int, case: dict[str, Any], folder: str) -> dict[str, Any]:
    """In fresh processes. Where the case asks for it, a tampered state is offered too."""
    training = _Training(rank, case)
    raw = (Path(folder) / f"{rank}.pt").read_bytes()
    saved = torch.load(io.BytesIO(raw), weights_only=True)
    if case.get("plant") == "stale":
        models.nudge(next(iter(saved["model"].values())))
    training.restore(saved)
    said = ""
    if case["mode"] == "tampered":
        said = _try_tampered(training, case, raw)
        if said == "accepted":  # what was tampered with may count; a refusal must have changed nothing
            training.attachment.load_state_dict(torch.load(io.BytesIO(raw), weights_only=True)["gradwire"])
    training.train(case["n_before"], case["n_steps"])
    return training.end(said)


def _try_tampered(training: _Training, case: dict[str, Any], raw: bytes) -> str:
    tampering, draw = case["tampering"], random.Random(case["draw"])
    if tampering in ("flip bytes", "cut off"):
        broken = bytearray(raw)
        if tampering == "cut off":
            del broken[draw.randrange(len(broken)) :]
        for _ in range(20):
            if broken:
                broken[draw.randrange(len(broken))] ^= 1 << draw.randrange(8)
        try:
            state = torch.load(io.BytesIO(bytes(broken)), weights_only=True)["gradwire"]
        except Exception as error:
            return f"torch.load: {type(error).__name__}"  # its matter; no code of the file has run
    else:
        state = tamper(torch.load(io.BytesIO(raw), weights_only=True)["gradwire"], tampering, draw)
    if case.get("plant") == "untyped":
        raise KeyError("planted")
    try:
        training.attachment.load_state_dict(state)
    except gradwire.GradwireError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def tamper(state: dict[str, Any], how: str, draw: random.Random) -> Any:
    wrong = draw.choice([None, "x", -1, [], {}, 2**70, 1.5, torch.zeros(3), torch.full((2, 2), torch.nan)])
    inner = state["state"]
    if how == "not a state":
        return wrong
    if how in ("drop a field", "other type"):
        key = draw.choice(sorted(state))
        if how == "drop a field":
            del state[key]
        else:
            state[key] = wrong
    elif how.startswith("other v"):
        state["version"] += draw.choice([1, 1000, -1])
    elif how == "other scheme":
        state["scheme"] = "plain" if state["scheme"] != "plain" else "zlib"
    elif how == "other rank":
        state["rank"] += 1
    elif inner:
        while True:
            key = draw.choice(sorted(inner, key=str))
            if not isinstance(inner[key], dict) or not inner[key] or draw.random() < 0.2:
                break
            inner = inner[key]
        if how == "drop in state":
            del inner[key]
        elif how == "other shape in state" and isinstance(inner[key], torch.Tensor):
            inner[key] = torch.zeros(inner[key].numel() + 1)
        elif how == "extra name in state":
            inner[f"{key} of nobody"] = inner[key]
        else:
            inner[key] = wrong
    return state


def load_elsewhere(rank: int, world_size: int, case: dict[str, Any], folder: str) -> dict[str, Any]:
    """With one rank more: refused by name, or taken where the caller asks for it; training goes on either way."""
    training = _Training(rank, case)
    saved = torch.load(Path(folder) / "0.pt", weights_only=True)
    training.ddp.module.load_state_dict(saved["model"])
    try:
        training.attachment.load_state_dict(saved["gradwire"])
        raise AssertionError("the state of another world size was taken without a word")
    except gradwire.InvalidArgument as error:
        said = str(error)
    try:
        training.attachment.load_state_dict(saved["gradwire"], strict=False)
        said = "taken"
    except gradwire.GradwireError:
        pass
    training.train(case["n_before"], case["n_steps"])
    return training.end(said)
