"""Hostile bytes for every decoder: cut, longer, flipped, random, spliced, true messages for another caller, sealed lies.

In a process of its own, whose death is a finding. Whatever comes in, a decoder raises one of gradwire's errors or fills
exactly the output that it was given; altered bytes with a checksum that is not theirs are never taken. Sealed lies have
the right checksums, so that what lies behind them is reached; under the sanitizers fuzz/ makes such, too.
"""

import contextlib
import io
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

import gradwire
from campaign import models
from campaign.findings import Found, launch, require, results_of
from gradwire import codecs
from sealing import SEALS

CODECS: list[tuple[str, dict[str, Any]]] = [
    ("gcomp", {"importance": "none"}), ("gcomp", {"importance": "uniform", "bits": 5}), ("truncate", {"bits": 5}),
    ("embedded-float", {"bits": 7}), ("embedded-float", {"bits": 32, "partition": 64}),
    ("truncated-float", {"bits": 6}), ("truncated-float", {"bits": 4, "format": "fp8-e4m3"}),
    ("one-bit", {}), ("two-bit", {}), ("ternary", {}), ("qsgd", {}), ("qsgd", {"levels": 100, "block": 128}),
    ("thc", {}), ("raw", {}), ("zlib", {}), ("zstd", {}),
]  # fmt: skip
CODECS += [(name, {}) for name in codecs.names() if name not in {listed for listed, _ in CODECS}]
ATTACKS = ("cut", "longer", "flip", "random", "splice", "other caller", "sealed")
# Attacks after which the checksum cannot be right, so that bytes must be refused.
MUST_REFUSE = ("cut", "longer", "flip", "random")
_CANARY = 0xA5


def draw(choose: random.Random) -> dict[str, Any]:
    if choose.random() < 0.1:
        return {"target": "inspect", "draw": choose.randrange(2**31), "n_tries": 40}
    name, options = choose.choice(CODECS)
    return {
        "target": "codec",
        "codec": (name, options),
        "dtype": choose.choice(["float32", "float32", "bfloat16", "float16"]),
        "pattern": choose.choice([p for p in models.PATTERNS if p != "one rank only"]),
        "n_values": choose.choice([0, 1, 7, 100, 300, 300, 1_000, 17_000]),
        "attack": choose.choice(ATTACKS),
        "draw": choose.randrange(2**31),
        "n_tries": 400,
    }


def run(case: dict[str, Any]) -> None:
    if case["target"] == "codec" and case["codec"][0] == "one-bit" and case["n_values"] == 0:
        case = {**case, "n_values": 1}
    results_of(launch(attack, 1, case))


def attack(rank: int, world_size: int, case: dict[str, Any]) -> int:
    draw_ = random.Random(case["draw"])
    if case["target"] == "inspect":
        return _attack_inspection(case, draw_)
    codec = codecs.by_name(case["codec"][0], **case["codec"][1])
    dtype = models.DTYPES[case["dtype"]]
    values = _values(case["pattern"], dtype, case["n_values"], draw_.randrange(1_000))
    message = _encode(codec, values)
    n_taken = 0
    for _ in range(case["n_tries"]):
        n_out, dtype_out = values.numel(), dtype
        broken = bytearray(message)
        if case["attack"] == "other caller":
            n_out, dtype_out = _other_caller(draw_, n_out, dtype)
        else:
            broken = spoil(case["attack"], broken, draw_, values.numel())
            if bytes(broken) == message:
                continue
        taken = _decode(case, codec, bytes(broken), n_out, dtype_out)
        n_taken += taken
        must_refuse = case["attack"] in MUST_REFUSE or (case["attack"] == "other caller" and n_out != values.numel())
        require(not (taken and must_refuse), f"bytes were taken that are no message: {bytes(broken)[:64].hex()}...")
    return n_taken


def _values(pattern: str, dtype: torch.dtype, n: int, seed: int) -> torch.Tensor:
    flat = torch.cat([one.reshape(-1) for one in models.gradients_for(pattern, dtype, 0, 2, seed)])
    return flat.repeat(1 + n // flat.numel())[:n].clone()


def _encode(codec: Any, values: torch.Tensor) -> bytes:
    out = torch.empty(codec.max_encoded_bytes(values.numel(), values.dtype), dtype=torch.uint8)
    return bytes(out[: codec.encode(values, out)].numpy().tobytes())


def spoil(how: str, broken: bytearray, draw_: random.Random, n_values: int) -> bytearray:
    n = len(broken)
    if how == "cut":
        del broken[draw_.randrange(n) :]
    elif how == "longer":
        broken += draw_.randbytes(draw_.choice([1, 4, 60, 5_000]))
    elif how == "flip":
        first = draw_.randrange(n)
        # A burst of at most 32 bits, which every CRC of 32 bits sees.
        for bit in range(first * 8, min(8 * n, first * 8 + draw_.randint(1, 32))):
            if bit == first * 8 or draw_.random() < 0.5:
                broken[bit // 8] ^= 1 << bit % 8
    elif how == "random":
        broken[:] = draw_.randbytes(draw_.choice([0, 1, 27, 28, 40, 48, 64, 500, 4_000]))
        if draw_.random() < 0.5:
            broken[:6] = b"GW" + draw_.choice([b"GC", b"GE", b"QT", b"EF", b"TF", b"HT"]) + b"\1\0"
    elif how == "splice":
        at, other = draw_.randrange(n), draw_.randrange(n)
        broken[at:] = broken[other:] + broken[:at]
    elif how == "sealed":
        for _ in range(draw_.randint(1, 3)):
            at = draw_.randrange(4, min(n, draw_.choice([28, 48, n])))
            broken[at] = draw_.choice([0, 1, 0x7F, 0xFF, broken[at] ^ 1 << draw_.randrange(8), draw_.randrange(256)])
        seal(broken, n_values)
    return broken


def _other_caller(draw_: random.Random, n: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """A true message, but for another number of values or another dtype."""
    if draw_.random() < 0.7:
        return draw_.choice([0, 1, n + 1, max(0, n - 1), 2 * n + 3, 16_384, 40_000]), dtype
    return n, draw_.choice(list(models.DTYPES.values()))


def _decode(case: dict[str, Any], codec: Any, message: bytes, n: int, dtype: torch.dtype) -> bool:
    """Whether the message was taken. Raises: Found (another error than ours, bytes outside of the output)."""
    room = torch.full((64 + n * dtype.itemsize + 64,), _CANARY, dtype=torch.uint8)
    out = room[64 : 64 + n * dtype.itemsize].view(dtype)
    raw = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
    plant = case.get("plant")
    taken = True
    try:
        codec.decode(raw, out)
    except gradwire.GradwireError:
        taken = plant == "accepts"
    except Exception as error:
        raise Found(f"{type(error).__name__}: {error} for {message[:64].hex()}...") from error
    if plant == "untyped":
        raise Found("IndexError: planted")
    if plant == "overruns":
        room[-1] = 0
    if plant == "dies":
        os.abort()
    require(bool((room[:64] == _CANARY).all() and (room[-64:] == _CANARY).all()), "written outside of the output")
    return taken


# ---- sealed lies

_SEALS = {b"GWGE": "raw", b"GWQT": "qsgd", b"GWGC": "gcomp", b"GWEF": "embedded-float", b"GWTF": "truncated-float"}


def seal(message: bytearray, n: int) -> bool:
    """Make the checksums right; False for a format of which they are not known. `n`: values that it was made of."""
    name = _SEALS.get(bytes(message[:4]))
    if name is not None:
        SEALS[name](torch.frombuffer(message, dtype=torch.uint8), n)
    return name is not None


# ---- files that `gradwire inspect` is given


def _attack_inspection(case: dict[str, Any], draw_: random.Random) -> int:
    """`inspect` says what a file is or why it is nothing, with a status, and never a traceback."""
    from gradwire_lab import cli

    n_known = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(case["n_tries"]):
            name, options = draw_.choice(CODECS)
            pattern = draw_.choice(["normal", "sparse", "zero"])
            message = bytearray(_encode(codecs.by_name(name, **options), _values(pattern, torch.float32, 200, number)))
            how = draw_.choice(["none", *ATTACKS])
            path = Path(folder) / draw_.choice(["message.bin", "state.pt", "run.jsonl", "result.json"])
            path.write_bytes(bytes(message if how in ("none", "other caller") else spoil(how, message, draw_, 200)))
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                try:
                    status = cli.main(["inspect", str(path)])
                except SystemExit as end:
                    status = end.code if isinstance(end.code, int) else 1
                except Exception as error:
                    raise Found(
                        f"inspect raised {type(error).__name__}: {error} for {path.read_bytes()[:64].hex()}"
                    ) from error
            require("Traceback" not in said.getvalue(), said.getvalue())
            n_known += status == 0
    return n_known
