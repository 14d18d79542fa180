"""Steps of SlimGC where buckets stay on their device: small tensors summed by the backend, large ones through kernels."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire.codecs import Codec
from gradwire.codecs.quantised import Quantised
from gradwire.core.bucket import Bucket
from gradwire.core.device_times import DeviceTimes
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite, ResidentBucket
from gradwire.errors import Unsupported
from gradwire.exchange.groups import Cut
from gradwire.schemes.on_device import StepsOnDevice, refuse_unused_parameters
from gradwire.schemes.slimgc.exchange import CutSelection, first_draw
from gradwire.schemes.slimgc.exchange_on_device import DevicePieces
from gradwire.schemes.slimgc.measuring_on_device import MeasuringOnDevice
from gradwire.schemes.slimgc.options import Stepping, Transport
from gradwire.wire.preamble import Preamble


def check_codec(codec: Codec, transport: Transport, stepping: Stepping) -> Quantised:
    """The codec, if these options work on a device. Raises: Unsupported (an option that needs the host)."""
    leave = "leave that or placement out"
    if stepping.backup or stepping.update == "owner":
        name = "backup=True" if stepping.backup else 'update="owner"'
        raise Unsupported(f"slimgc with {name} works on host memory: {leave}")
    if transport.topology != "server":
        raise Unsupported(f'slimgc with topology="{transport.topology}" works on host memory: {leave}')
    if transport.pull == "raw":
        raise Unsupported(f'slimgc with pull="raw" works on host memory: {leave}')
    if not isinstance(codec, Quantised):
        raise Unsupported(
            f"slimgc works on devices with one-bit, two-bit and qsgd, not with {codec.name}: take one of these, or leave "
            "placement out"
        )
    return codec


class SlimGCOnDevice(StepsOnDevice):
    """Steps of one attachment.

    Args:
        group_elements: values to a message, at most.
        plan_of: what becomes of a bucket's tensors; asked on the lane, with the site's stream current.
        measuring: what finds the threshold, or None: it is given.
    Raises: Unsupported (DDP looks for unused parameters; a codec without kernels).
    """

    def __init__(
        self,
        session: Session,
        site: DeviceSite,
        codec: Quantised,
        group_elements: int,
        error_feedback: bool,
        plan_of: Callable[[Bucket], CutSelection],
        measuring: MeasuringOnDevice | None,
    ) -> None:
        refuse_unused_parameters(session)
        super().__init__(session, site)
        self._pieces = DevicePieces(site, codec, session.communicator, group_elements)
        self._group_elements, self._error_feedback = group_elements, error_feedback
        self._plan_of, self._measuring = plan_of, measuring
        # Where a step's exchanges note how long they take.
        self._times = self._pieces.times = None if measuring is None else measuring.place(site)

    def reduce(
        self, bucket: Bucket, resident: ResidentBucket, preamble: Preamble, is_plain: bool, facts: tuple[Any, ...]
    ) -> None:
        """As every scheme's; behind the last bucket come the probes of a step that measures."""
        super().reduce(bucket, resident, preamble, is_plain, facts)
        if self._measuring is None or not bucket.is_last or self._session.communicator.world_size == 1:
            return
        with resident.at_work():
            kept = self._site.flags.clone()  # what probes find is thrown away with them
            self._measuring.end_buckets(bucket.step, functools.partial(self._probe, bucket.step))
            self._site.flags.copy_(kept)

    def _enqueue(self, bucket: Bucket, *facts: Any) -> None:
        plan, flat = self._plan_of(bucket), bucket.buffer
        self._flush(bucket, plan)
        if not plan.compressed:
            self._sum(flat, bucket)
            return
        self._compress(bucket, plan)
        if plan.n_raw:
            # With room for the flag that host memory sends behind: the backend cuts both alike, and adds in one order.
            raw = self._site.scratch("others", plan.n_raw + 1, flat.dtype)
            raw[-1:].zero_()
            for run in plan.raw_runs:
                run.in_fused(raw).copy_(run.in_bucket(flat))
            self._sum(raw, bucket)
            for run in plan.raw_runs:
                run.in_bucket(flat).copy_(run.in_fused(raw))

    def _sum(self, values: Tensor, bucket: Bucket) -> None:
        with contextlib.nullcontext() if self._times is None else self._times.timing("communicate"):
            self._site.mean(values, bucket.record)
        self._site.note_finite(values)

    def _compress(self, bucket: Bucket, plan: CutSelection) -> None:
        """The tensors that pay, where they lie in the bucket."""
        feedback, flat = self._session.feedback, bucket.buffer
        part = Bucket(
            flat, plan.slots, plan.offsets,
            index=bucket.index, step=bucket.step, record=bucket.record, resident=bucket.resident,
        )  # fmt: skip
        residual, unsent = feedback.pair(part) if self._error_feedback else (None, None)
        draw = first_draw(self._session.communicator, bucket.record)
        n_bytes = self._pieces.mean_of_pieces(flat, plan.cut, draw, residual, unsent, self._session.loss_scale())
        bucket.record.count_exchanged(n_bytes)
        if unsent is not None:
            feedback.stage_bucket(part, unsent)

    def _flush(self, bucket: Bucket, plan: CutSelection) -> None:
        """What was left out of tensors that travel raw now goes out with their gradients."""
        for span in plan.raw:
            kept = self._session.feedback.of(span.slot)
            if kept is not None and span.slot is not None:
                gradient = span.in_bucket(bucket.buffer)
                gradient.add_(kept.values.to(gradient.device).view(-1), alpha=self._session.loss_scale())
                self._session.feedback.stage(span.slot, None)

    def _probe(self, step: int, values: Tensor, is_compressed: bool, times: DeviceTimes) -> None:
        """Send one tensor by itself; what comes of it is thrown away."""
        communicator, recorder, n = self._session.communicator, self._session.recorder, values.numel()
        record = recorder.open_bucket(step, -1, 0)
        if is_compressed:
            left_out = self._site.scratch("probe left out", n, torch.float32)
            cut, draw = Cut([(0, n)], communicator.world_size, self._group_elements), first_draw(communicator, record)
            self._pieces.times = times
            record.count_exchanged(self._pieces.mean_of_pieces(values, cut, draw, None, left_out))
            self._pieces.times = self._times
        else:
            with times.timing("communicate"):
                self._site.mean(values, record)
        recorder.close_bucket(record)

    def _raise_error(self, code: int) -> None:
        self._pieces.raise_error(code)
