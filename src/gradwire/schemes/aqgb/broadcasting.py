"""One rank's blocks on their way: the last that came goes out first, and each is summed when all ranks have ended it.

Messages, copies and sums are native/exchange/broadcast.hpp's; here is when what is sent, and where it is counted.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gradwire import _native
from gradwire.codecs.tensors import bytes_of, dtype_code
from gradwire.core.bucket import slot_of
from gradwire.core.feedback import Feedback
from gradwire.core.session import Session
from gradwire.errors import GradwireError
from gradwire.schemes.aqgb.overlap import OverlapFigures
from gradwire.schemes.aqgb.pacing import Pacing
from gradwire.stepping.blocks import Block
from gradwire.stepping.interception import FrozenStep
from gradwire.telemetry.recorder import BucketRecord

# Ahead of what the network has taken by our estimate: a newer block should not queue behind much, and the network never
# run dry while the lane wakes up (some ms among busy ranks).
_LEAD_S = 0.05


@dataclass
class OpenBlock:
    """One block under way."""

    block: Block
    # (n,) this rank's gradient of the block, copied out of DDP's buckets; then the mean over the ranks
    gradient: torch.Tensor
    parts: dict[torch.Tensor, torch.Tensor]  # each parameter's part of `gradient`, in its shape
    n_missing: int  # how many of them are not there yet
    step: int = -1  # the reduction that `gradient` belongs to
    done: torch.futures.Future | None = None  # completed when `gradient` holds the mean; None if nothing is under way
    frozen: FrozenStep | None = None  # the user's call for this step; None as long as there was none
    loss_scale: float = 1.0  # that the gradient was multiplied by; it may have changed when the block has been sent

    def add_residual(self, feedback: Feedback, loss_scale: float) -> None:
        """gradient += residual x loss_scale."""
        self.loss_scale = loss_scale
        for parameter, part in self.parts.items():
            slot = slot_of(parameter)
            feedback.discard([slot])
            kept = feedback.of(slot)
            if kept is not None:
                part.view(-1).add_(kept, alpha=loss_scale)

    def stage_residual(self, feedback: Feedback, unsent: torch.Tensor) -> None:
        """Keep `unsent` (n,), in units of the scaled loss, once the block's step is taken; nothing if it is not finite."""
        unsent.div_(self.loss_scale)
        if bool(torch.isfinite(unsent).all()):
            sizes = [parameter.numel() for parameter in self.parts]
            for parameter, part in zip(self.parts, unsent.split(sizes), strict=True):
                feedback.stage(slot_of(parameter), part)


class Round:
    """One step under way: what waits to be sent, what was sent of it, and who waits for it."""

    def __init__(self, n_blocks: int, world_size: int, records: list[BucketRecord | None]) -> None:
        self.n_blocks, self.records = n_blocks, records
        self.n_appeared = self.n_summed = 0
        self.unsent: list[OpenBlock] = []  # in the order in which they appeared
        self.awaited: dict[int, torch.futures.Future] = {}  # of blocks that appeared and are not summed yet
        self.sent_bits = [0] * n_blocks  # of a value of each block
        self.n_open = [world_size] * n_blocks  # ranks that may still send of each block
        self.ended = [False] * n_blocks  # own blocks of which nothing follows
        self.ending: list[int] = []  # those of which the next head says so

    @property
    def is_complete(self) -> bool:
        return self.n_summed == self.n_blocks


class BlockExchange:
    """Sends this rank's blocks on the lane, and takes in what peers send on a thread of its own.

    Args:
        native: connected; closed when nobody holds it.
        blocks: what `native` was told of, in its order.
        feedback: None: what was never sent is lost.
        has_owners: what the native side sends by itself are answers, which take their time on the network too.
    """

    def __init__(
        self,
        session: Session,
        native: _native.Broadcast,
        blocks: Sequence[OpenBlock],
        pacing: Pacing,
        figures: OverlapFigures,
        feedback: Feedback | None,
        has_owners: bool,
    ) -> None:
        self._session, self._native, self._blocks, self._has_owners = session, native, blocks, has_owners
        self._pacing, self._figures, self._feedback = pacing, figures, feedback
        self._dtypes = [dtype_code(one.gradient.dtype) for one in blocks]
        self._round: Round | None = None
        self._spare = session.recorder.open_apart()
        self._changed = threading.Condition()
        self._failure: GradwireError | None = None
        self._steps: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._receiver = threading.Thread(target=self._receive, name="gradwire-receiver", daemon=True)
        self._receiver.start()

    # ---- the training thread and DDP's hook

    def begin(self, step: int) -> None:
        """The first gradient of `step` is about to appear."""
        with self._changed:  # the round before is over, but where its step was dropped
            self._wait_until(lambda: self._round is None or self._round.is_complete)
            self._pacing.begin_step()
            self._native.begin(step & 0xFFFFFFFF)
            communicator, recorder, n_blocks = self._session.communicator, self._session.recorder, len(self._blocks)
            records: list[BucketRecord | None] = [recorder.open_bucket(step, -1, 0) for _ in range(n_blocks)]
            current = self._round = Round(n_blocks, communicator.world_size, records)
        self._steps.put(step)
        communicator.submit(self._send_round, current).add_done_callback(self._hear_of_lane)

    def start(self, one: OpenBlock) -> torch.futures.Future:
        """Start replacing the block's gradient by its mean over the ranks; done when it is. Never blocks."""
        done: torch.futures.Future = torch.futures.Future()
        if self._feedback is not None:
            one.add_residual(self._feedback, self._session.loss_scale())
        self._pacing.note_gradient()
        with self._changed:
            if self._failure is not None:
                done.set_exception(self._failure)
                return done
            current = self._round
            assert current is not None
            one.done = current.awaited[one.block.index] = done
            current.n_appeared += 1
            current.unsent.append(one)
            self._changed.notify_all()
        return done

    def close(self) -> None:
        """End the receiving thread; between rounds, or after a failure."""
        self._steps.put(None)
        if self._receiver is not threading.current_thread():
            self._receiver.join()

    # ---- the lane: what to send, and how much of it

    def _send_round(self, current: Round) -> None:
        pacing = self._pacing
        for _ in range(current.n_blocks):
            one, n_unsent, is_last = self._next_to_send(current)
            index = one.block.index
            n_bits = pacing.first_bits(n_unsent)
            if n_bits >= pacing.ceiling_bits:
                current.ending.append(index)
            if is_last:
                self._end_where_nothing_follows(current, index, n_bits)
            self._send_bits(current, index, n_bits)
        for index in list(pacing.order):
            if not current.ended[index]:
                n_bits = pacing.more_bits(index, current.sent_bits[index])
                current.ending.append(index)
                if n_bits:
                    self._send_bits(current, index, n_bits)
        if current.ending:
            self._send(current, None)
        with self._changed:
            self._wait_until(lambda: current.is_complete)
        self._session.communicator.mesh.wait_until_all_sent()

    def _next_to_send(self, current: Round) -> tuple[OpenBlock, int, bool]:
        """The block that came last, how many values wait with it, and whether it is the last of all."""
        with self._changed:
            while True:
                self._wait_until(lambda: bool(current.unsent))
                ahead_s, has_all = self._pacing.ahead_s(), current.n_appeared == current.n_blocks
                if ahead_s <= _LEAD_S or has_all:  # when everything has appeared, what is left goes at once
                    break
                self._changed.wait(ahead_s - _LEAD_S)  # a newer block may come meanwhile, and goes first
            n_unsent = sum(self._pacing.sizes[one.block.index] for one in current.unsent)
            return current.unsent.pop(), n_unsent, not current.unsent and has_all

    def _end_where_nothing_follows(self, current: Round, last: int, last_bits: int) -> None:
        """Say with the last message of the first stage already which blocks get no second: a message less."""
        extra_bytes = self._native.max_body_bytes(last, last_bits, 0)
        for index in self._pacing.order:
            sent_bits = last_bits if index == last else current.sent_bits[index]
            if current.ended[index] or index in current.ending:
                continue
            if self._pacing.more_bits(index, sent_bits, extra_bytes):
                return
            current.ending.append(index)

    def _send_bits(self, current: Round, index: int, n_bits: int) -> None:
        record, gradient = current.records[index], self._blocks[index].gradient
        assert record is not None
        with record.timing("encode"):
            n_bytes = self._native.encode(index, bytes_of(gradient), self._dtypes[index], n_bits)
        # Noted first: sent, it may end the step before this thread goes on.
        self._figures.note_sent(index, n_bits, current.sent_bits[index] == 0)
        current.sent_bits[index] += n_bits
        self._send(current, index)
        self._pacing.sent(n_bytes)

    def _send(self, current: Round, index: int | None) -> None:
        """Send what was encoded of a block, or a head alone; it is noted before what it says can end the step."""
        record = self._record_of(current, index)
        for n_bytes in self._native.queued_bytes:
            record.count_sent(n_bytes)
        newly, current.ending = current.ending, []
        for block in newly:
            current.ended[block] = True
        answers, ended = self._native.send(
            newly, self._pacing.own_ceiling_bits, self._pacing.told_remaining_s(), self._figures.hidden_us
        )
        self._count_relayed(record, answers)
        for block in ended:
            self._end_block(current, block)

    def _count_relayed(self, record: BucketRecord, sizes: list[int]) -> None:
        """Count messages that the native side sent by itself, each to every receiver: passed on, or answers of an owner."""
        for n_bytes in sizes:
            for _ in range(self._native.n_copies):
                record.count_sent(n_bytes)
            if self._has_owners:
                self._pacing.sent(n_bytes)

    def _record_of(self, current: Round, index: int | None) -> BucketRecord:
        """The record that counts a block's traffic; one that is left, for what belongs to no block or comes after its end."""
        record = None if index is None else current.records[index]
        return record or next((one for one in current.records if one is not None), self._spare)

    # ---- the receiving thread

    def _receive(self) -> None:
        torch.get_num_threads()  # a new thread takes the process's count over when it first asks (communicator.py)
        try:
            while (step := self._steps.get()) is not None:  # from its first head to its last
                while (heard := self._native.receive(step & 0xFFFFFFFF, self._session.communicator.rank)) is not None:
                    self._take(heard)
        except Exception as error:
            self.fail(error)

    def _take(self, heard: "_native._Heard") -> None:
        """Take in a head of a peer and the body behind it, if there was one. What the origin has received of this rank,
        and in what time, are acknowledgements: b and u of the control law."""
        origin, block, body_bytes, relayed, received_bytes, receiving_us, remaining_s = heard[:7]
        ceiling_bits, ended, duration_ns, arrived_ns, decoded_ns, hidden_us = heard[7:]
        current = self._round
        assert current is not None
        self._pacing.hear(origin, received_bytes, receiving_us, remaining_s, ceiling_bits)
        self._figures.hear(origin, hidden_us)
        record = self._record_of(current, block)
        self._count_relayed(record, relayed)
        if block is not None:
            self._figures.note("receive", duration_ns)
            record.add("communicate", arrived_ns - duration_ns, arrived_ns)
            record.add("decode", arrived_ns, decoded_ns)
            record.count_received(body_bytes)
        for index in ended:
            self._end_block(current, index)

    def _end_block(self, current: Round, index: int) -> None:
        """One rank more has ended a block; after the last one it is summed."""
        one = self._blocks[index]
        with self._changed:
            current.n_open[index] -= 1
            record = current.records[index]
            if record is None or current.n_open[index] or index not in current.awaited:
                return
            current.records[index] = None
        with record.timing("decode"):
            flat, dtype, feedback = one.gradient, self._dtypes[index], self._feedback
            if feedback is None:
                self._native.mean(index, bytes_of(flat), dtype, None)
            else:
                unsent = feedback.room(index, flat.numel(), flat.dtype)
                self._native.mean(index, bytes_of(flat), dtype, bytes_of(unsent))
                one.stage_residual(feedback, unsent)
        self._session.recorder.close_bucket(record)
        with self._changed:
            current.n_summed += 1
            self._changed.notify_all()
            done = current.awaited.pop(index, None)  # None: it was told of a failure
        if done is not None:
            done.set_result(None)

    # ---- failure

    def fail(self, error: Exception) -> None:
        """Give the error to whoever waits for a block, here and on the other ranks."""
        failure = self._session.communicator.fail(error)
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
            waiting: list[torch.futures.Future] = []
            if self._round is not None:
                waiting, self._round.awaited = list(self._round.awaited.values()), {}
        for done in waiting:
            done.set_exception(failure)

    def _hear_of_lane(self, finished: torch.futures.Future) -> None:
        try:
            finished.wait()
        except Exception as error:
            self.fail(error)

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        """Hold `_changed` until then. Raises: what has failed meanwhile."""
        self._changed.wait_for(lambda: holds() or self._failure)
        if self._failure is not None:
            raise self._failure
