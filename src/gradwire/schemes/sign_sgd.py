"""The scheme `sign-sgd`: one bit an element, majority vote over the ranks (Bernstein et al., ICML 2018).

When not to use this: with the learning rate of another scheme. The result is +1, -1 or 0 for every element, so the
learning rate alone says how far a parameter moves (1e-4 is a start for what trains at 0.1), and weak gradients count
like strong ones (`one-bit` sends as little, with error feedback). Each rank receives a bit of every other: past 32
ranks that is more than a plain all-reduce.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from gradwire import _native
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.schemes.optimistic import Optimistic

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_RANKS = 255  # votes are counted in bytes
_TIES = ("zero", "positive")


class SignSgd(Optimistic):
    """The sign that most ranks have. Zeros count as positive; -0.0 is a zero. Without error feedback, as published.

    With a GradScaler the result is multiplied by its scale, which `unscale_` takes off again.

    Args:
        ties: what is written where as many ranks are below zero as not: "zero" or "positive".
    """

    name = "sign-sgd"

    def __init__(self, ties: str = "zero") -> None:
        super().__init__(error_feedback=False)
        if ties not in _TIES:
            raise InvalidArgument(f"ties is one of {', '.join(_TIES)}, not {ties!r}")
        self.ties = ties

    @property
    def configuration(self) -> dict[str, Any]:
        return {"ties": self.ties}

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (more ranks than votes can be counted of)."""
        if session.communicator.world_size > _MAX_RANKS:
            raise Unsupported(f"sign-sgd takes up to {_MAX_RANKS} ranks; use acp-sgd, whose sums do not grow with them")
        super().bind(session)

    def _send(self, bucket: Bucket) -> bool:
        raw, dtype = bucket.buffer.view(torch.uint8), _DTYPES.index(bucket.buffer.dtype)
        started = time.perf_counter_ns()
        words = torch.empty((bucket.n_elements + 31) // 32, dtype=torch.int32)
        is_finite = _native.pack_signs(raw, dtype, words.view(torch.uint32))
        bucket.record.add("encode", started, time.perf_counter_ns())
        votes = self._gather(bucket, words, is_finite)
        if votes is None:
            return False
        started = time.perf_counter_ns()
        _native.write_majority(
            votes.contiguous().view(-1).view(torch.uint32),
            self.session.communicator.world_size,
            dtype,
            _bits_of(self.session.loss_scale(), bucket.buffer.dtype),
            self.ties == "positive",
            raw,
        )
        bucket.record.add("decode", started, time.perf_counter_ns())
        return True


def _bits_of(value: float, dtype: torch.dtype) -> int:
    return int.from_bytes(bytes(torch.tensor([value], dtype=dtype).view(torch.uint8).tolist()), "little")
