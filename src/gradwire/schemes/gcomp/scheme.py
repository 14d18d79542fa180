"""GComp: near-lossless ring all-reduce (Li et al., SoCC 2024). Reads like the paper's sections 4 to 6.

A step, per bucket: the level of every value from the live optimizer (section 5.1), then a ring whose messages hold
Huffman-coded exponents and what is left of the mantissas (6.2). Every few steps the exponents sent are counted; the
counts of all ranks, summed in the gap before the next step, give the next Huffman table (4).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.codecs.gcomp import GCompCodec
from gradwire.control.checks import choice as check_choice
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.exchange.device_messages import DeviceMessages
from gradwire.exchange.engine import Importance
from gradwire.exchange.parts import CHUNK_ELEMENTS
from gradwire.schemes.gcomp.importance import QuantisationMetric
from gradwire.schemes.gcomp.table import TableRefresh
from gradwire.schemes.gcomp.watch import OptimizerWatch
from gradwire.schemes.on_device import CodecOnDevice, Placing, StepsOnDevice
from gradwire.schemes.through_codec import ThroughCodec


class GComp(Placing, ThroughCodec):
    """GComp with all its parts.

    Bits that the optimizer's addition would drop anyway are rounded away; the rest arrives as it was. All ranks get the
    same bits. NaN and Inf travel as they are, so a GradScaler sees them. Every rank derives from its own optimizer how
    many bits of a value were sent; RankMismatch where optimizers have diverged or their hyper-parameters differ.

    When not to use this: where the network is faster than the codec (about 3 GB/s of float32 a core), or where fixed
    precision is enough: under adaptive optimizers importance="uniform" with 10 bits sends far less.

    Args:
        importance: which mantissa bits travel: "paper" (per value, from the optimizer), "uniform" (the `bits` highest,
            rounded to nearest) or "none" (all: lossless but for subnormals of float32 and bfloat16, which become 0).
        bits: mantissa bits to keep with importance="uniform"; with "paper" no value keeps more (no cap if not given).
        refresh_every: steps between two Huffman tables (50 as published); 0 keeps the built-in one. None: by need, when
            the table in use takes 3 % more bits than the entropy of the exponents.
        topology: "ring", as in the paper, or "direct".
        chunk_elements: values encoded, sent and decoded at a time.
        rounding: what importance="paper" does with the bits it lets go of: "nearest", or "truncate" as published.
        format: of the messages: 2, or 1 as published: four levels, which travel (18 to 30 % more bytes).
    Raises: InvalidArgument.
    """

    name = "gcomp"

    def __init__(
        self,
        importance: str = "paper",
        bits: int | None = None,
        refresh_every: int | None = None,
        topology: str = "ring",
        chunk_elements: int = CHUNK_ELEMENTS,
        rounding: str = "nearest",
        format: int = 2,
    ) -> None:
        check_choice("importance", importance, ("paper", "uniform", "none"))
        codec = GCompCodec(importance, bits, rounding=rounding, format=format)
        options = {"importance": importance, "bits": bits, "refresh_every": refresh_every, "rounding": rounding}
        options["format"] = format
        super().__init__(codec, topology, chunk_elements, **options)
        self._codec = codec
        self._importance, self._format = importance, format
        self._refresh_every = refresh_every
        self._tables = TableRefresh(codec, refresh_every)
        self._metric: QuantisationMetric | None = None
        self._watch: OptimizerWatch | None = None

    def bind(self, session: Session) -> None:
        """Raises: InvalidArgument (no optimizer), Unsupported (an optimizer that the paper's table does not hold)."""
        if self._importance == "paper":
            if session.optimizer is None:
                raise InvalidArgument(
                    'importance="paper" reads the optimizer, and none was given: pass HookState(scheme, '
                    'optimizer=optimizer), or choose importance="uniform" or "none"'
                )
            self._metric = QuantisationMetric(session.optimizer, session.communicator.world_size)
            self._watch = OptimizerWatch(session.optimizer)
        # A scheme that is bound again keeps its Huffman tables, but not a refresh that the last session left half done.
        self._tables = TableRefresh(self._codec, self._refresh_every, session.site)
        super().bind(session)

    def _go_to(self, site: DeviceSite, session: Session) -> StepsOnDevice:
        messages = DeviceMessages(site, self._codec)
        return _OnDevice(
            session, site, messages, self.topology, self.chunk_elements, self._tables, self._metric, self._watch
        )

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        """Raises: Unsupported (the optimizer that importance is read from is not the one that makes the steps)."""
        if self._importance == "paper" and bucket.resident is not None and self._is_joining():
            raise Unsupported(
                'ddp.join() with importance="paper" sends levels of format 1, for which devices have no kernels: leave '
                'placement out, or use importance="uniform" or "none"'
            )
        if self._watch is not None:
            self._watch.before_reduction(bucket.parameters)
        return super().reduce(bucket)

    def _reduce_on_lane(self, bucket: Bucket) -> None:
        if self.session.communicator.world_size == 1:
            return
        self._tables.begin_bucket(bucket.step, self.session.communicator, bucket.record)
        codec = self._tables.counting_codec if self._tables.counts_in(bucket.step) else self._codec
        # A rank that ran out of input (ddp.join) makes no steps: what it would derive is not what the others do.
        self._codec.format = 1 if self._importance == "paper" and self._is_joining() else self._format
        loss_scale = self.session.loss_scale()
        self._reduce_with(codec, bucket, self._importance_of(bucket, loss_scale))
        if self._watch is not None:
            self._watch.after_reduction(bucket, loss_scale)

    def _is_joining(self) -> bool:
        module = self.session.module
        return isinstance(module, DistributedDataParallel) and module._join_config.enable

    def _importance_of(self, bucket: Bucket, loss_scale: float) -> Importance | None:
        """What says how large each value of the bucket may be before its low bits matter; None if all are alike."""
        if self._metric is None:
            return None
        if not bucket.slots:
            raise Unsupported(
                'importance="paper" needs the parameters behind a gradient, and this bucket has none; '
                'use importance="uniform" or "none" for plain tensors'
            )
        loss_scale = _scale_in_exchange(bucket, loss_scale, self.session.communicator.world_size)
        with bucket.record.timing("importance"):
            return self._metric.of_bucket(bucket.slots, bucket.offsets, loss_scale, bucket.buffer.dtype, bucket.staged)

    def end_step(self, step: int) -> None:
        super().end_step(step)
        self._tables.end_step(step, self.session.communicator)

    def close(self) -> None:
        self._metric = None  # which holds the optimizer
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        super().close()

    def stats(self) -> dict[str, Any]:
        return self._tables.stats()

    def state_dict(self) -> dict[str, Any]:
        return self._tables.state_dict(self.session.communicator)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tables.load_state_dict(state)


class _OnDevice(CodecOnDevice):
    """Steps on a device. The lane waits there, for lengths of messages and for a new table; the training thread does not."""

    def __init__(
        self,
        session: Session,
        site: DeviceSite,
        messages: DeviceMessages,
        topology: str,
        chunk_elements: int,
        tables: TableRefresh,
        metric: QuantisationMetric | None,
        watch: OptimizerWatch | None,
    ) -> None:
        super().__init__(session, site, messages, topology, chunk_elements)
        self._weighed, self._tables, self._metric, self._watch = messages, tables, metric, watch

    def _enqueue(self, bucket: Bucket, *facts: Any) -> None:
        self._tables.begin_bucket(bucket.step, self._session.communicator, bucket.record)
        loss_scale = self._session.loss_scale()
        self._weighed.weigh(self._importance_of(bucket, loss_scale), self._tables.counts_on_device(bucket.step))
        super()._enqueue(bucket)
        if self._watch is not None:
            self._watch.after_reduction(bucket, loss_scale)

    def _importance_of(self, bucket: Bucket, loss_scale: float) -> Tensor | None:
        if self._metric is None:
            return None
        loss_scale = _scale_in_exchange(bucket, loss_scale, self._session.communicator.world_size)
        out = self._site.scratch("importance", bucket.n_elements, torch.uint8)
        with bucket.record.timing("importance"):
            self._metric.write_on_device(bucket.slots, bucket.offsets, out, loss_scale, bucket.buffer.dtype)
        return out


def _scale_in_exchange(bucket: Bucket, loss_scale: float, n_ranks: int) -> float:
    """What the exchange's values are multiplied by: it divides float16 by the number of ranks first."""
    return loss_scale / n_ranks if bucket.buffer.dtype == torch.float16 else loss_scale
