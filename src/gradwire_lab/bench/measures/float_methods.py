"""Ranks that this process plays: quantisers at equal bits on files and in training (AQGB's Fig. 2), schemes at many ranks."""

import math
from typing import Any

import numpy as np
import torch

from gradwire import codecs
from gradwire.codecs.quantised import Quantised
from gradwire.codecs.truncated_float import TruncatedFloat
from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec
from gradwire_lab import workloads
from gradwire_lab.bench.measures import Call, cell_by_cell
from gradwire_lab.bench.measures.gradients import load
from gradwire_lab.results.records import Record
from gradwire_lab.training import simulated
from gradwire_lab.workloads.base import step_generator

CONTROL = "control"  # plain, with gradients as far off as one rounding of float32
_ROUNDING = 2.0**-24


@cell_by_cell
def measure_ranks(_: Call, workload: str, scheme: str, seed: int, ranks: int, steps: int, global_batch: int) -> Record:
    """Losses by the number of ranks, which this process plays: real codecs at every hop, one global batch, no network."""
    task = workloads.by_name(workload, batch_size=global_batch // ranks)
    spec, disturb = ("plain", _ROUNDING) if scheme == CONTROL else (scheme, 0.0)
    record = simulated.train(task, spec, ranks, steps, seed, disturb)
    return {**record, "losses": None, "loss": record["losses"][-1]}


class Method:
    """One way to quantise a worker's gradient: a codec as NAME:option=value,...; "none" is 32 bits.

    `+ef` behind it: with error feedback; A|B: each value through A or B, with equal chance (the paper's "2-8bit": QSGD with 2
    bits or 8). Raises: InvalidArgument (no such codec or option).
    """

    def __init__(self, spec: str) -> None:
        self.has_error_feedback = spec.endswith("+ef")
        parts = spec.removesuffix("+ef").split("|")
        if len(parts) > 2:
            raise InvalidArgument(f"{spec!r}: two codecs at most, as A|B")
        parsed = [] if parts == ["none"] else map(parse_spec, parts)
        self._codecs = [codecs.by_name(name, **options) for name, options in parsed]

    def quantise(self, gradient: torch.Tensor, step: int, worker: int) -> tuple[torch.Tensor, float]:
        """What the receivers of `gradient` (n,) float32 have, and the bits a value that it took; of A|B the mean of both."""
        results, n_bits = [], 0.0
        for codec in self._codecs:
            message = torch.empty(codec.max_encoded_bytes(gradient.numel(), gradient.dtype), dtype=torch.uint8)
            drawn: Any = {"step": step << 16 | worker} if isinstance(codec, Quantised | TruncatedFloat) else {}
            n_bytes = int(codec.encode(gradient, message, **drawn))
            results.append(torch.empty_like(gradient))
            codec.decode(message[:n_bytes], results[-1])
            n_bits += 8 * n_bytes / max(1, gradient.numel()) / len(self._codecs)
        if not results:
            return gradient.clone(), 32.0
        is_first = torch.rand(gradient.numel(), generator=step_generator("which codec", step, worker)) < 0.5
        return torch.where(is_first, results[0], results[-1]), n_bits


@cell_by_cell
def measure_errors(call: Call, gradients: str, method: str) -> Record:
    """How far what is received lies from the gradient of a file, in float64. relative_error: |received - gradient| /
    |gradient|, Euclidean; shrinkage: 1 - <received, gradient> / |gradient|^2, 0 for unbiased ones; zeros_share: of the
    values that were not 0 and are received as 0."""
    gradient = torch.from_numpy(np.ascontiguousarray(load(call, gradients).gradient))
    received, n_bits = Method(method).quantise(gradient, 0, 0)
    exact, found = gradient.double(), received.double()
    square = float(exact @ exact)
    return {
        "bits_a_value": n_bits,
        "relative_error": math.sqrt(float((found - exact) @ (found - exact)) / square),
        "shrinkage": 1 - float(found @ exact) / square,
        "zeros_share": float(((found == 0) & (exact != 0)).sum()) / max(1, int((exact != 0).sum())),
    }


@cell_by_cell
def measure_training(_: Call, workload: str, method: str, seed: int, steps: int, workers: int = 4) -> Record:
    """Where training ends with workers that this process plays, as AQGB's sum. Every worker's gradient is quantised
    once, on its whole; the optimizer gets the mean of the copies, in worker order. `end_loss` is the mean over the last
    tenth of the steps and over the workers, `loss` the last step's."""
    quantiser, n_bits = Method(method), 0.0

    def make(named: dict[str, torch.Tensor], _: list[torch.optim.Optimizer]) -> simulated.MeanOf:
        residuals = torch.zeros(workers, sum(one.numel() for one in named.values()))

        def mean_of(step: int, gradients: list[torch.Tensor]) -> torch.Tensor:
            nonlocal n_bits
            total = torch.zeros_like(residuals[0])
            for worker, (gradient, residual) in enumerate(zip(gradients, residuals, strict=True)):
                if quantiser.has_error_feedback:
                    gradient += residual
                received, n_bits = quantiser.quantise(gradient, step, worker)
                if quantiser.has_error_feedback:
                    torch.sub(gradient, received, out=residual)
                total += received
            return total.div_(workers)

        return mean_of

    losses, evaluated = simulated.play(workloads.by_name(workload), workers, steps, seed, make)
    end_loss = float(np.mean(losses[-max(1, steps // 10) :]))
    return {"loss": losses[-1], "bits_a_value": n_bits, **evaluated, "end_loss": end_loss}
