"""Quantisers at equal bits in training, with workers that this process plays: AQGB's Fig. 2."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gradwire import codecs
from gradwire.codecs.quantised import Quantised
from gradwire.codecs.truncated_float import TruncatedFloat
from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec
from gradwire_lab import workloads
from gradwire_lab.bench.measures import Call, Measured
from gradwire_lab.results.records import Record
from gradwire_lab.workloads.base import step_generator


def measure_training(call: Call) -> Measured:
    """Where training with each `method` and `seed` ends: `workload`, `workers`, `steps`."""
    given = str(call.get("workload")), int(call.get("workers", 4)), int(call.get("steps"))
    return [(cell, train(given[0], str(cell["method"]), *given[1:], int(cell["seed"]))[1]) for cell in call.cells]


class Method:
    """One way to quantise a worker's gradient.

    Args: spec: a codec as NAME:option=value,...; "none" is 32 bits; `+ef` behind it: with error feedback; A|B: each value
        through A or B, with equal chance (the paper's "2-8bit": QSGD with 2 bits or 8).
    Raises: InvalidArgument (no such codec or option).
    """

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.has_error_feedback = spec.endswith("+ef")
        parts = spec.removesuffix("+ef").split("|")
        if len(parts) > 2:
            raise InvalidArgument(f"{spec!r}: two codecs at most, as A|B")
        parsed = [] if parts == ["none"] else map(parse_spec, parts)
        self._codecs = [codecs.by_name(name, **options) for name, options in parsed]

    def quantise(self, gradient: torch.Tensor, step: int, worker: int) -> tuple[torch.Tensor, float]:
        """What the receivers of `gradient` (n,) float32 have, and the bits a value that it took.

        Every step and worker draws numbers of its own; "A|B" costs the mean of A and B.
        """
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
        if len(results) == 1:
            return results[0], n_bits
        generator = step_generator("which codec", step, worker)
        is_first = torch.rand(gradient.numel(), generator=generator) < 0.5
        return torch.where(is_first, results[0], results[1]), n_bits


def train(workload: str, spec: str, n_workers: int, n_steps: int, seed: int) -> tuple[list[float], Record]:
    """Train with `n_workers` workers played by this process, as AQGB's sum: every worker's gradient is quantised once, on
    its whole, and the mean of the quantised copies, in worker order, is what the optimizer gets.

    Returns: each step's loss, the mean over the workers before it; and the record of the end: the mean loss over the last tenth
        of the steps, and what the workload's evaluation gives.
    """
    name, options = parse_spec(workload)
    task, method, n_bits, losses = workloads.by_name(name, **options), Method(spec), 0.0, []
    model = task.build_model(seed)
    optimizers = task.build_optimizers(model)
    parameters = [one for one in model.parameters() if one.requires_grad]
    sizes = [one.numel() for one in parameters]
    residuals = torch.zeros(n_workers, sum(sizes))
    batches = [task.batches(worker, n_workers, seed=seed) for worker in range(n_workers)]
    for step in range(n_steps):
        total, loss_sum = torch.zeros_like(residuals[0]), 0.0
        for worker, (batch, residual) in enumerate(zip(batches, residuals, strict=True)):
            model.zero_grad(set_to_none=True)
            loss = task.loss(model, next(batch))
            loss.backward()
            loss_sum += task.reported_loss(loss)
            parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
            gradient = torch.cat([part.reshape(-1) for part in parts])
            if method.has_error_feedback:
                gradient += residual
            received, n_bits = method.quantise(gradient, step, worker)
            if method.has_error_feedback:
                torch.sub(gradient, received, out=residual)
            total += received
        losses.append(loss_sum / n_workers)
        for parameter, part in zip(parameters, total.div_(n_workers).split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        for optimizer in optimizers:
            optimizer.step()
    end = {"workload": workload, "method": spec, "seed": seed, "workers": n_workers, "step": n_steps - 1}
    end |= {"loss": losses[-1], "bits_a_value": n_bits, **task.evaluate(model)}
    return losses, {**end, "end_loss": float(np.mean(losses[-max(1, n_steps // 10) :]))}
