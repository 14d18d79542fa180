"""Made-up results of the right shape, for the tests of the report. None of these figures was measured."""

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

ENVIRONMENT: dict[str, Any] = {
    "cpu": "Example CPU 3.0 GHz", "n_cores": 2, "memory_bytes": 25_276_510_208, "os": "Linux 6.1", "python": "3.11.7",
    "torch": "2.13.0+cpu", "gradwire": "0.1.0", "commit": "0123456789ab", "network": "netlab 1000000000",
    "date": "2025-03-01T12:00:00+00:00",
}  # fmt: skip

# scheme: (share of a plain ring's bytes, encode s, decode s, size of the deviation of the loss)
SCHEMES = {
    "plain": (1.0, 0.0, 0.0, 0.0),
    "gcomp": (0.42, 0.031, 0.024, 2e-6),
    "truncate": (0.56, 0.012, 0.011, 8e-5),
    "zstd": (0.88, 0.21, 0.06, 0.0),
}


def write_run(folder: Path, scheme: str, n_steps: int = 300, workload: str = "gpt", seed: int = 1) -> Path:
    """A run folder as `gradwire train` leaves it."""
    folder.mkdir(parents=True)
    share, encode_s, decode_s, deviation = SCHEMES[scheme]
    noise, jitter = random.Random(seed), random.Random(scheme)
    ring_bytes, strayed, lines = 1.5 * 26_000_000, 0.0, []
    for step in range(n_steps):
        strayed += jitter.gauss(0, deviation)
        loss = 1.9 + 8.8 * math.exp(-step / 35) + 1.1 * math.exp(-step / 220) + noise.gauss(0, 0.07) + strayed
        sent = int(ring_bytes * share * jitter.uniform(0.99, 1.01))
        exposed_s = max(0.0, sent * 8 / 1e9 + 0.6 * (encode_s + decode_s) - 0.12) * jitter.uniform(0.95, 1.1)
        times = {"encode_s": encode_s, "decode_s": decode_s, "communicate_s": sent * 8 / 1e9, "exposed_s": exposed_s}
        counts = {"bytes_sent": sent, "bytes_received": sent, "ratio": sent / ring_bytes}
        lines.append(json.dumps({"step": step, "loss": loss, "iteration_s": 0.28 + exposed_s, **counts, **times}))
    (folder / "steps.jsonl").write_text("\n".join(lines) + "\n")
    config = {"scheme": scheme, "workload": workload, "ranks": 4, "steps": n_steps, "seed": seed, "rate_bps": 1e9}
    (folder / "config.json").write_text(json.dumps({**config, "scheme_options": {}, "data": "real", **ENVIRONMENT}))
    (folder / "summary.json").write_text(json.dumps({"loss": 2.0, "wire_bytes_origin": "counted"}))
    return folder


def codec_records() -> list[dict[str, Any]]:
    table = [
        ("gcomp", "paper", 0.38, 2.1, 2.6, 2.61),
        ("gcomp", "none", 0.85, 2.4, 2.9, 2.61),
        ("zstd", "", 0.921, 0.52, 1.1, None),
        ("zlib", "", 0.924, 0.021, 0.22, None),
        ("lz4", "", 1.003, 1.9, 4.1, None),
        ("blosc2", "", 0.853, 0.94, 1.6, None),
        ("zipnn", "", 0.846, 1.2, 1.7, None),
        ("pcodec", "", 0.839, 0.28, 0.75, None),
    ]
    records = []
    for (gradients, factor), threads in itertools.product((("gpt_adamw.npz", 1.0), ("resnet_sgd.npz", 0.97)), (1, 2)):
        for codec, importance, ratio, encode, decode, bits in table:
            encode_gb_per_s = encode * (1 + 0.8 * (threads - 1))
            records.append({
                "codec": codec, "importance": importance, "gradients": gradients, "threads": threads, "ratio": ratio * factor,
                "encode_gb_per_s": encode_gb_per_s, "encode_gb_per_s_low": 0.95 * encode_gb_per_s,
                "encode_gb_per_s_high": 1.04 * encode_gb_per_s, "decode_gb_per_s": decode * (1 + 0.7 * (threads - 1)),
                "exponent_bits": bits, **ENVIRONMENT,
            })  # fmt: skip
    return records


# scheme: (share of a plain ring's bytes, codec s for 25 MB)
_REDUCED = {
    "ddp": (1.0, 0.0),
    "plain": (1.0, 0.0),
    "ddp-bf16": (0.5, 0.006),
    "ddp-powersgd": (0.03, 0.05),
    "gcomp": (0.42, 0.055),
    "truncate": (0.56, 0.02),
    "zstd": (0.9, 0.3),
}
RATES: tuple[float | None, ...] = (100e6, 1e9, None)


def _measured(name: str, seconds: float, rate_bps: float | None, **fields: Any) -> dict[str, Any]:
    network = f"netlab {rate_bps:.0f}" if rate_bps else "netlab none"
    times = {name: seconds, f"{name}_low": 0.97 * seconds, f"{name}_high": 1.05 * seconds}
    return {"ranks": 4, "rate_bps": rate_bps, **times, **fields, **ENVIRONMENT, "network": network}


def allreduce_records() -> list[dict[str, Any]]:
    records = []
    for rate_bps, n_bytes in itertools.product(RATES, (1000, 1_000_000, 100_000_000)):
        for scheme, (share, codec_s) in _REDUCED.items():
            wire_bytes = 1.5 * n_bytes * share
            time_s = 0.002 + wire_bytes * 8 / (rate_bps or 2.2e9) + codec_s * n_bytes / 25e6
            sizes = {"n_bytes": n_bytes, "wire_bytes": wire_bytes, "gradients": "gpt_adamw.npz"}
            records.append({"scheme": scheme, **_measured("time_s", time_s, rate_bps, **sizes)})
    return records


def train_records() -> list[dict[str, Any]]:
    records = []
    for rate_bps, (scheme, (share, codec_s)) in itertools.product(RATES, _REDUCED.items()):
        wire_bytes = 1.5 * 26e6 * share
        exposed_s = max(0.01, wire_bytes * 8 / (rate_bps or 2.2e9) - 0.1)
        parts = {"compute_s": 0.28 + 0.7 * codec_s, "codec_s": codec_s, "exposed_s": exposed_s, "wait_s": 0.012}
        iteration_s = parts["compute_s"] + exposed_s + parts["wait_s"]
        more = {"wire_bytes": wire_bytes, "loss": 2.4, "data": "real", "options": "", "workload": "gpt"}
        records.append({"scheme": scheme, **_measured("iteration_s", iteration_s, rate_bps, **parts, **more)})
    return records


def write_all(folder: Path) -> list[Path]:
    """Every kind of input there is; returns the paths to hand to the report."""
    runs = [write_run(folder / "runs" / scheme, scheme) for scheme in SCHEMES]
    paths = [runs[0].parent]
    for name, records in (("codec", codec_records()), ("allreduce", allreduce_records()), ("train", train_records())):
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(json.dumps(records, indent=1))
    return paths
