"""Per-step figures of all ranks, gathered every few steps into one record a step."""

from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_TIMES = ("forward_backward_s", "optimizer_s", "encode_s", "decode_s", "communicate_s", "importance_s", "table_s",
          "wait_s", "exposed_s", "cpu_s")  # fmt: skip
_COUNTS = ("bytes_sent", "bytes_received", "original_bytes", "n_messages", "n_fallbacks")
# Of schemes whose `step_figures` tell them.
_OWN = ("bits_per_value", "first_bits_per_value", "acknowledged_bps", "ceiling_bits", "contention")
_KEYS = ("loss", "iteration_s", *_TIMES, *_COUNTS, *_OWN)

N_WARM_UP_STEPS = 2  # DDP's first step uses one bucket, and its second rebuilds them


class Meter:
    """Collects this rank's steps; `gather` turns them into records over all ranks.

    A record has the loss as the mean over ranks (float64), `iteration_s` of the slowest rank, the other times and the
    bytes as means per rank, and `ratio`: bytes sent by all ranks / what a float32 ring all-reduce sends.
    """

    def __init__(self, device: torch.device, is_computed: bool) -> None:
        self._device, self._is_computed = device, is_computed
        self._pending: list[tuple[int, list[float]]] = []
        self._elapsed_s = 0.0
        self.records: list[dict[str, Any]] = []

    def add(self, step: int, figures: dict[str, float]) -> None:
        """Note one step of this rank."""
        self._pending.append((step, [float(figures.get(key, 0.0)) for key in _KEYS]))

    def gather(self) -> list[dict[str, Any]]:
        """The records of the steps since the last call, on all ranks; a collective call."""
        if not self._pending:
            return []
        world_size = dist.get_world_size()
        mine = torch.tensor([row for _, row in self._pending], dtype=torch.float64, device=self._device)
        tables = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(tables, mine)
        by_rank = torch.stack(tables).cpu()  # (ranks, steps, figures)
        records = [self._merge(step, by_rank[:, row]) for row, (step, _) in enumerate(self._pending)]
        self._pending.clear()
        self.records += records
        return records

    def _merge(self, step: int, by_rank: torch.Tensor) -> dict[str, Any]:
        world_size = by_rank.shape[0]
        columns = {key: by_rank[:, index] for index, key in enumerate(_KEYS)}
        # Summed in rank order in float64: the same figure on every rank and machine.
        means = {key: sum(values.tolist()) / world_size for key, values in columns.items()}
        record: dict[str, Any] = {"step": step, "loss": means["loss"]}
        record["iteration_s"] = float(columns["iteration_s"].max())
        self._elapsed_s += record["iteration_s"]
        record["elapsed_s"] = self._elapsed_s
        record |= {key: means[key] for key in (*_TIMES, *_COUNTS)}
        record |= {key: means[key] for key in _OWN if means[key]}
        reference_bytes = 2 * (world_size - 1) / world_size * record["original_bytes"]
        record["ratio"] = record["bytes_sent"] / reference_bytes if reference_bytes else 1.0
        return record

    def summarize(self) -> dict[str, Any]:
        """Flat figures over all steps: medians of times after the warm-up, means of bytes, the loss at the end."""
        warm = self.records[N_WARM_UP_STEPS:] or self.records
        columns = {key: np.array([record[key] for record in warm]) for key in warm[0] if key not in _OWN}
        low, high = np.quantile(columns["iteration_s"], [0.1, 0.9], method="nearest").tolist()
        return {
            "n_steps": len(self.records),
            "iteration_s": float(np.median(columns["iteration_s"])),
            "iteration_s_p10": low,
            "iteration_s_p90": high,
            "compute_s": float(np.median(columns["iteration_s"] - columns["exposed_s"])),
            "codec_s": float(np.median(columns["encode_s"] + columns["decode_s"] + columns["importance_s"])),
            "exposed_s": float(np.median(columns["exposed_s"])),
            "cpu_s": float(columns["cpu_s"].mean()),
            "wire_bytes": float(columns["bytes_sent"].mean()),
            "wire_bytes_origin": "computed for a ring" if self._is_computed else "counted",
            "ratio": float(columns["ratio"].mean()),
            "n_fallbacks": sum(record["n_fallbacks"] for record in self.records),
            "loss": self.records[-1]["loss"],
            "loss_last_10": fmean(record["loss"] for record in self.records[-10:]),
        }
