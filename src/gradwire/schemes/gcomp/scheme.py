"""GComp: near-lossless ring all-reduce (Li et al., SoCC 2024). Reads like the paper's sections 4 to 6.

A step, per bucket: how many bits of every value matter, from the live optimizer (section 5.1), then a ring (6.2) whose
messages hold Huffman-coded exponents (4.2) and what is left of the mantissas (6.1). Every few steps the exponents sent are
counted; the counts of all ranks, summed in the gap before the next step, give the next Huffman table (4.4).
"""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.checks import choice as check_choice
from gradwire.codecs.gcomp import GCompCodec
from gradwire.core.bucket import Bucket
from gradwire.core.feedback import Part
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.exchange.parts import CHUNK_ELEMENTS
from gradwire.exchange.ring import Importance, Ring
from gradwire.schemes.compressed import Compressed
from gradwire.schemes.gcomp.importance import Promise, QuantisationMetric
from gradwire.schemes.gcomp.table import TableRefresh
from gradwire.schemes.gcomp.watch import OptimizerWatch
from gradwire.wire.wire import Wire

_log = logging.getLogger(__name__)

# Mantissa bits of every value where nothing is known of the optimizer: about what the rule keeps beside Adam.
_CAREFUL_BITS = 16


class GComp(Compressed):
    """GComp with all its parts.

    Bits that matter less than `tolerance` to the sum that the optimizer is about to make are rounded away; the rest arrives
    as it was. All ranks get the same bits. NaN and Inf travel as they are, so a GradScaler sees them. Every rank derives
    from its own optimizer how many bits of a value were sent; RankMismatch where optimizers have diverged or their
    hyper-parameters differ.

    What is promised is one step's sum. A momentum of mu adds a gradient 1 / (1 - mu) times, each time within the promise:
    gradients that are small and steady may move a parameter a third less or more than they would (`horizon="life"` does not let
    them). The rule takes the learning rate as it is in the backward pass: set it before.

    When not to use this: where the network is faster than the codec (about 3 GB/s of float32 a core).

    Args:
        importance: which mantissa bits travel: "paper" (per value, from the optimizer), "uniform" (`bits`) or "none" (all).
        tolerance: with "paper", how far a message may move a parameter, in its last places (`Promise`). Each doubling sends a
            bit a value less.
        horizon: of the tolerance, "step" or "life": what one step adds, or all that a gradient adds by a momentum.
        bits, rounding, format, least_bits: see `GCompCodec`.
        refresh_every: steps between two Huffman tables (50 as published); 0 keeps the built-in one. None: by need, when
            the table in use takes 3 % more bits than the entropy of the exponents.
        topology: "ring", as in the paper, or "direct".
        chunk_elements: values encoded, sent and decoded at a time.
    Raises: InvalidArgument.
    """

    name = "gcomp"
    options_of = GCompCodec
    collective: Ring

    def __init__(
        self,
        importance: str = "paper",
        bits: int | None = None,
        refresh_every: int | None = None,
        topology: str = "ring",
        chunk_elements: int = CHUNK_ELEMENTS,
        tolerance: float = 1.0,
        horizon: str = "step",
        **of_codec: Any,
    ) -> None:
        check_choice("importance", importance, ("paper", "uniform", "none"))
        self.codec = GCompCodec(importance, bits, **of_codec)
        self.promise = Promise(tolerance, horizon, self.codec.rounding, self.codec.format)
        if importance != "paper" and (tolerance, horizon) != (1, "step"):
            raise InvalidArgument(f'tolerance and horizon mean nothing with importance="{importance}": leave them out')
        super().__init__(collective=Ring(self.codec, topology, chunk_elements))
        self._bits, self._format, self._refresh_every = bits, self.codec.format, refresh_every
        self._tables = TableRefresh(self.codec, refresh_every)
        self._metric: QuantisationMetric | None = None
        self._watches: list[OptimizerWatch] = []
        self._has_odd_states = False

    @property
    def configuration(self) -> dict[str, Any]:
        of_codec = {"importance": self.codec.importance, "bits": self._bits, "rounding": self.codec.rounding}
        of_promise = {"tolerance": float(self.promise.tolerance), "horizon": self.promise.horizon}
        of_promise["least_bits"] = self.codec.least_bits
        own = {"refresh_every": self._refresh_every, "format": self._format}
        return {**self.frame_configuration, **of_codec, **(of_promise if self.reads_optimizer else {}), **own}

    def bind(self, session: Session) -> None:
        """Raises: InvalidArgument (no optimizer), Unsupported (one whose steps are differentiated)."""
        if self.reads_optimizer:
            self._metric = QuantisationMetric.beside(session, self.promise)
            self._watches = [OptimizerWatch(optimizer, self.object_to) for optimizer in self._metric.optimizers]
            self.codec.bits = self._bits
            self._has_odd_states = any(map(_rounds_by_address, self._metric.optimizers.param_groups))
            if not self._metric.is_known:
                self.codec.bits = min(_CAREFUL_BITS, self._bits or _CAREFUL_BITS)
                _log.warning(
                    "gcomp knows no rule for %s, and probing found none: %d mantissa bits of every value are sent. "
                    "gradwire.register_update tells it one",
                    self._metric.optimizers, self.codec.bits,
                )  # fmt: skip
        # A scheme that is bound again keeps its Huffman tables, but not a refresh that the last session left half done.
        self._tables = TableRefresh(self.codec, self._refresh_every, session.wire)
        super().bind(session)

    @property
    def may_object(self) -> bool:
        return bool(self._watches)

    @property
    def reads_optimizer(self) -> bool:
        return self.codec.importance == "paper"

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        """Raises: Unsupported (the optimizer that importance is read from is not the one that makes the steps)."""
        if self.reads_optimizer and bucket.resident is not None and self._is_joining():
            raise Unsupported(
                'ddp.join() with importance="paper" sends levels of format 1, for which devices have no kernels: leave '
                'placement out, or use importance="uniform" or "none"'
            )
        for watch in self._watches:
            watch.before_reduction(bucket.parameters)
        return super().reduce(bucket)

    def step(self, part: Part, wire: Wire) -> None:
        """Send what matters of each value round the ring. On a device the lane waits, for lengths and for a new table."""
        bucket = part.bucket
        self._tables.begin_bucket(bucket.step, wire.communicator, wire.record)
        # A rank that ran out of input (ddp.join) makes no steps: what it would derive is not what the others do.
        sends_levels = self.reads_optimizer and (self._is_joining() or (self._has_odd_states and not wire.on_device))
        self.codec.format = 1 if sends_levels else self._format
        importance = self._importance_of(part, wire)
        counts = self._tables.counts_for(bucket.step, bucket.buffer.dtype)
        mean_room = 0 if self._metric is None else self._metric.promise.mean_room(wire.world_size)
        self.collective.mean(part, wire, importance, counts, mean_room)
        for watch in self._watches:
            watch.after_reduction(bucket, part.loss_scale)

    def _is_joining(self) -> bool:
        module = self.session.module
        return isinstance(module, DistributedDataParallel) and module._join_config.enable

    def _importance_of(self, part: Part, wire: Wire) -> Importance | Tensor | None:
        """The importance of each value of the bucket; None if all are alike."""
        bucket, loss_scale, dtype = part.bucket, part.loss_scale, part.values.dtype
        if self._metric is None:
            return None
        self._metric.promise = replace(self.promise, format=self.codec.format)
        if not bucket.slots:
            raise Unsupported(
                'importance="paper" needs the parameters behind a gradient, and this bucket has none; '
                'use importance="uniform" or "none" for plain tensors'
            )
        if dtype == torch.float16:  # the exchange divides it by the number of ranks first
            loss_scale /= wire.world_size
        with wire.record.timing("importance"):
            if not wire.on_device:
                return self._metric.of_bucket(bucket.slots, bucket.offsets, loss_scale, dtype, bucket.staged)
            out = wire.scratch("importance", bucket.n_elements, torch.uint8)
            self._metric.write_on_device(bucket.slots, bucket.offsets, out, loss_scale, dtype)
            return out

    def end_step(self, step: int) -> None:
        super().end_step(step)
        self._tables.end_step(step, self.session.communicator)

    def close(self) -> None:
        self._metric = None  # which holds the optimizer
        while self._watches:
            self._watches.pop().close()
        super().close()

    def stats(self) -> dict[str, Any]:
        return self._tables.stats()

    def state_dict(self) -> dict[str, Any]:
        return self._tables.state_dict(self.session.communicator)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tables.load_state_dict(state)


def _rounds_by_address(group: dict[str, Any]) -> bool:
    """Whether states of this group may differ between ranks, under DDP alone too: on CPUs torch's fused steps of 16-bit
    parameters round the same values in another way where they lie at another address."""
    return bool(group.get("fused")) and any(p.dtype.itemsize < 4 and p.device.type == "cpu" for p in group["params"])
