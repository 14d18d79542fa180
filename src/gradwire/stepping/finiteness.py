"""What ranks share of a step that they take later: whether all gradients were finite, and the norm it is clipped by."""

from __future__ import annotations

import torch

from gradwire.core.bucket import Bucket
from gradwire.wire.communicator import Communicator
from gradwire.wire.futures import completed


class FiniteFlag:
    """Under AMP every rank must skip the same steps: one rank's Inf is put into all ranks' `.grad`.

    Used where there is a GradScaler. The flag travels on connections of its own, so that it waits for no gradient.
    """

    def __init__(self, communicator: Communicator) -> None:
        """Collective."""
        self._communicator = communicator.subgroup()
        self._is_finite = True

    def begin_step(self) -> None:
        self._is_finite = True

    def see(self, gradient: torch.Tensor) -> None:
        if not bool(torch.isfinite(gradient).all()):
            self._is_finite = False

    def share(self, buffer: torch.Tensor) -> torch.futures.Future:
        """Tell all ranks; done when Inf is in `buffer`, the step's last one, if any rank has seen some."""
        return self._communicator.submit(self._share, buffer)

    def _share(self, buffer: torch.Tensor) -> None:
        flag = torch.tensor([float(not self._is_finite)])
        self._communicator.all_reduce(flag)
        if flag.item() > 0 and buffer.numel():
            buffer[0] = torch.inf

    def close(self) -> None:
        self._communicator.close()


def own_gradient(bucket: Bucket, flag: FiniteFlag | None) -> torch.futures.Future:
    """What DDP goes on with: this rank's own gradient, at once; of the last bucket, after all ranks have told with a flag."""
    return completed(bucket.buffer) if flag is None or not bucket.is_last else flag.share(bucket.buffer)


def clip_factor(gradients: list[torch.Tensor], max_norm: float) -> torch.Tensor:
    """What to multiply `gradients` by, so that their norm is at most `max_norm`; computed as clip_grad_norm_ does."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
