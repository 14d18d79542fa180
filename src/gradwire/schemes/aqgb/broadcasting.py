"""The engine of both schemes: blocks go out last come first served, and are summed when all ranks have ended them."""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch

from gradwire.codecs.embedded_float import DEFAULT_PARTITION, EmbeddedFloat
from gradwire.core.session import Session
from gradwire.errors import GradwireError, InvalidArgument
from gradwire.schemes.aqgb.block_feedback import BlockFeedback
from gradwire.schemes.aqgb.block_values import BlockValues, Scratch
from gradwire.schemes.aqgb.figures import Figures
from gradwire.schemes.aqgb.heads import NO_BLOCK, Head, HeadFormat
from gradwire.schemes.aqgb.pacing import Clock, Pacing
from gradwire.schemes.aqgb.round import Round
from gradwire.schemes.aqgb.streams import TOPOLOGIES, Streams
from gradwire.schemes.deferred import DeferredScheme, OpenBlock
from gradwire.stepping.blocks import Block, Division
from gradwire.telemetry.recorder import BucketRecord
from gradwire.telemetry.stopwatch import Stopwatch, now_s
from gradwire.wire.preamble import FORMAT_VERSION, Preamble, compare_preambles

# Ahead of what the network has taken by our estimate: a newer block should not queue behind much, and the network never
# run dry while the lane wakes up (some ms among busy ranks).
_LEAD_S = 0.05


class BlockBroadcast(DeferredScheme):
    """Every rank broadcasts its quantised blocks, every rank adds all copies in rank order, its own quantised one too.

    A subclass says how many bits a block is sent with first, and how many are added to it later.

    Args:
        blocks: how many, or lists of module names, as in `find_blocks`.
        max_grad_norm: clips the mean; every forward pass then waits for all blocks.
        partition: values that share an exponent.
        topology: "fan-out" to all peers, or "ring": each passes on what comes from the left.
        error_feedback: keep what was never sent for the next step (off in the paper).
        clock: seconds, for the control law; must not run backwards.
    """

    def __init__(
        self, blocks: Division = 4, max_grad_norm: float | None = None, partition: int = DEFAULT_PARTITION,
        topology: str = "fan-out", error_feedback: bool = False, clock: Clock = now_s,
    ) -> None:  # fmt: skip
        super().__init__(blocks, max_grad_norm)
        if topology not in TOPOLOGIES:
            raise InvalidArgument(f"topology is one of {', '.join(TOPOLOGIES)}, not {topology!r}")
        self._codec = EmbeddedFloat(partition=partition)
        self.topology = topology
        self.error_feedback = error_feedback
        self._clock = clock
        self._streams: Streams | None = None
        self._changed = threading.Condition()
        self._failure: GradwireError | None = None

    @property
    def state_is_per_world(self) -> bool:  # type: ignore[override]
        return self.error_feedback

    @property
    def configuration(self) -> dict[str, Any]:
        return super().configuration | {
            "partition": self._codec.partition,
            "topology": self.topology,
            "error_feedback": self.error_feedback,
        }

    def bind(self, session: Session) -> None:
        super().bind(session)
        self._unsent = BlockFeedback(session.feedback)
        communicator = session.communicator
        n_blocks, world_size = len(self._slots), communicator.world_size
        self._world_size, self._rank = world_size, communicator.rank
        sizes = [slot.block.n_elements for slot in self._slots]
        self.pacing = self._make_pacing(communicator.rank, world_size, sizes)
        self.figures = Figures([slot.block.name for slot in self._slots], sizes, self._clock)
        self._values = [BlockValues(self._codec, slot, communicator.rank, world_size) for slot in self._slots]
        self._scratch = Scratch()
        self._round: Round | None = None
        self._spare = session.recorder.open_apart()
        self._received_bytes, self._receiving_us = [0] * world_size, [0] * world_size
        self._failure = None
        if world_size > 1:
            # Before ranks connect: one with another scheme compares first what it is, and has to meet the like. It counts
            # as little as the connections' own making.
            mine = Preamble(FORMAT_VERSION, 0, self.name, self.configuration_hash, 0, 0, 0)
            never_closed = session.recorder.open_bucket(0, -1, 0)
            communicator.submit(compare_preambles, communicator, mine, never_closed).wait()
            heads = HeadFormat(n_blocks, world_size, self.configuration_hash, self.blocks_hash)
            self._streams = Streams(communicator, self.topology, heads, self)

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._streams is not None:
                self._streams.close()
                self._streams = None
            self.session.feedback.clear()
            self._values = []

    @abstractmethod
    def _make_pacing(self, rank: int, world_size: int, block_elements: list[int]) -> Pacing:
        """The keeper of time, rates and deadlines."""

    @abstractmethod
    def _first_bits(self, block: int, unsent_elements: int) -> int:
        """How many bits of each value to send first."""

    @abstractmethod
    def _more_bits(self, block: int, sent_bits: int, extra_bytes: int) -> int:
        """How many more to send once every block has been sent, and `extra_bytes` of what is not handed over yet."""

    # ---- the training thread and DDP's hook

    def _begin_round(self, step: int) -> None:
        streams = self._streams
        if streams is None:
            return
        with self._changed:  # the round before is over, but where its step was dropped
            self._changed.wait_for(lambda: self._round is None or self._round.is_complete or self._failure)
            self._raise_failure()
            self.pacing.begin_step()
            for values in self._values:
                values.reset()
            recorder, n_blocks = self.session.recorder, len(self._slots)
            records: list[BucketRecord | None] = [recorder.open_bucket(step, -1, 0) for _ in range(n_blocks)]
            current = self._round = Round(step, n_blocks, self._world_size, records)
        streams.begin_round(step)
        self.session.communicator.submit(self._run_round, current).add_done_callback(self._hear_of_lane)

    def _start_block(self, slot: OpenBlock) -> torch.futures.Future:
        done: torch.futures.Future = torch.futures.Future()
        if self._streams is None:
            done.set_result(None)
            return done
        index = slot.block.index
        if self.error_feedback:
            self._unsent.add_to(slot, self.session.loss_scale())
        self.pacing.note_gradient(index)
        with self._changed:
            if self._failure is not None:
                done.set_exception(self._failure)
                return done
            current = self._round
            assert current is not None
            slot.done = current.awaited[index] = done
            current.n_appeared += 1
            current.unsent.append(slot)
            self._changed.notify_all()
        return done

    def begin_forward(self) -> None:
        with self._failing_everywhere():
            self.pacing.begin_forward()
        self.figures.begin_forward()

    def before_forward(self, block: Block) -> None:
        with self._failing_everywhere():
            arrived_s, waited_before_ns = self.pacing.now(), self._waited.total_ns
            super().before_forward(block)
            self.pacing.note_forward(block.index, arrived_s, (self._waited.total_ns - waited_before_ns) / 1e9)

    @contextlib.contextmanager
    def _failing_everywhere(self) -> Iterator[None]:
        """What goes wrong on this training thread is told to the other ranks, which would wait for it."""
        try:
            yield
        except GradwireError as error:
            self.fail(error)
            raise

    def _note_wait(self, slot: OpenBlock) -> None:
        self.figures.note_wait(self._waited.end_ns - self._waited.start_ns)

    def end_backward(self, step: int) -> int:
        self.figures.end_backward()
        return super().end_backward(step)

    def _settle(self, slot: OpenBlock) -> None:
        super()._settle(slot)
        if self.error_feedback:
            self._unsent.commit(slot)

    # ---- the lane: what to send, and how much of it

    def _run_round(self, current: Round) -> None:
        streams = self._streams
        assert streams is not None
        for _ in range(current.n_blocks):
            slot, n_unsent, is_last = self._next_to_send(current)
            index = slot.block.index
            n_bits = self._first_bits(index, n_unsent)
            if self._more_bits_ever(n_bits) == 0:
                current.ending.add(index)
            if is_last:
                extra_bytes = self._values[index].max_message_bytes(0, n_bits)
                self._end_where_nothing_follows(current, extra_bytes, (index, n_bits))
            self._send_bits(streams, current, index, n_bits)
        for index in list(self.pacing.order):
            if not current.ended[self._rank][index]:
                n_bits = self._more_bits(index, self._values[index].sent_bits, 0)
                current.ending.add(index)
                if n_bits:
                    self._send_bits(streams, current, index, n_bits)
        if current.ending:
            self._send(streams, current, NO_BLOCK, 0, 0, None, False)
        with self._changed:
            self._changed.wait_for(lambda: current.is_complete or self._failure)
            self._raise_failure()
        streams.finish()

    def _next_to_send(self, current: Round) -> tuple[OpenBlock, int, bool]:
        """The block that came last, how many values wait with it, and whether it is the last of all."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: current.unsent or self._failure)
                self._raise_failure()
                ahead_s = self.pacing.ahead_s()
                if ahead_s <= _LEAD_S or current.has_all:  # when everything has appeared, what is left goes at once
                    break
                self._changed.wait(ahead_s - _LEAD_S)  # a newer block may come meanwhile, and goes first
            n_unsent = sum(slot.block.n_elements for slot in current.unsent)
            slot = current.unsent.pop()
            return slot, n_unsent, not current.unsent and current.has_all

    def _more_bits_ever(self, sent_bits: int) -> int:
        """How many bits could follow in the second stage at most; 0 where there is none."""
        return 0

    def _end_where_nothing_follows(self, current: Round, extra_bytes: int, last: tuple[int, int]) -> None:
        """With the last message of the first stage, say already which blocks get no second: a message less."""
        for index in self.pacing.order:
            sent_bits = last[1] if index == last[0] else self._values[index].sent_bits
            if current.ended[self._rank][index] or index in current.ending:
                continue
            if self._more_bits(index, sent_bits, extra_bytes):
                return
            current.ending.add(index)

    def _send_bits(self, streams: Streams, current: Round, index: int, n_bits: int) -> None:
        values, record = self._values[index], current.records[index]
        assert record is not None
        first_bit = values.sent_bits
        with record.timing("encode"):
            message, is_plain = values.encode(n_bits)
        self.figures.note_sent(index, n_bits, first_bit == 0)  # sent, it may end the step before this thread goes on
        self._send(streams, current, index, first_bit, n_bits, message, is_plain)
        self.pacing.sent(message.numel())

    def _send(
        self, streams: Streams, current: Round, index: int, first_bit: int, n_bits: int, message: torch.Tensor | None,
        is_plain: bool,
    ) -> None:  # fmt: skip
        with self._changed:
            newly, current.ending = current.ending, set()
            for block in newly:
                current.ended[self._rank][block] = True
            head = Head(
                self._rank, index, first_bit, n_bits, is_plain, 0 if message is None else message.numel(),
                current.sequence, self.pacing.own_ceiling_bits, list(current.ended[self._rank]),
                self.pacing.told_remaining_s(), list(self._received_bytes), list(self._receiving_us),
            )  # fmt: skip
            current.sequence += 1
            record = self._record_of(current, index)
        n_bytes = streams.send(head, current.step, message)
        for _ in range(streams.n_copies):
            record.count_sent(n_bytes)
        for block in newly:
            self._finish_block(current, block)

    def _record_of(self, current: Round, index: int) -> BucketRecord:
        """Where traffic of a block is noted; what belongs to none, or comes when its block is over, goes to one left."""
        record = None if index == NO_BLOCK else current.records[index]
        return record or next((one for one in current.records if one is not None), self._spare)

    # ---- the receiver

    @property
    def max_body_bytes(self) -> int:
        """See Listener."""
        return max((values.largest_message_bytes for values in self._values), default=0)

    def check(self, head: Head) -> None:
        """See Listener."""
        self._values[head.block].check_announced(
            head.origin, head.first_bit, head.n_bits, head.is_plain, head.body_bytes
        )

    def take(self, head: Head, body: torch.Tensor | None, duration_ns: int) -> None:
        """See Listener."""
        origin, current = head.origin, self._round
        assert current is not None
        received = head.received_bytes[self._rank], head.receiving_us[self._rank]
        self.pacing.hear(origin, *received, head.remaining_s, head.ceiling_bits)
        if body is not None:
            with Stopwatch() as decoding:
                self.figures.note_received(duration_ns)
                record = self._record_of(current, head.block)
                if head.is_plain:
                    self._values[head.block].add_plain(origin, body)
                else:
                    self._values[head.block].add_planes(origin, body, head.first_bit, head.n_bits)
            record.add("communicate", decoding.start_ns - duration_ns, decoding.start_ns)
            record.add("decode", decoding.start_ns, decoding.end_ns)
            record.count_received(body.numel())
        with self._changed:
            if body is not None:
                self._received_bytes[origin] += body.numel()
                self._receiving_us[origin] += duration_ns // 1_000
            ended_before = list(current.ended[origin])
            current.ended[origin] = list(head.ended)
        for index in (i for i, is_ended in enumerate(head.ended) if is_ended and not ended_before[i]):
            self._finish_block(current, index)

    def has_ended(self, origin: int, step: int) -> bool:
        """See Listener."""
        current = self._round
        return current is None or current.step != step or all(current.ended[origin])

    def forwarded(self, block: int, n_bytes: int) -> None:
        """See Listener."""
        assert self._round is not None
        self._record_of(self._round, block).count_sent(n_bytes)

    def _finish_block(self, current: Round, index: int) -> None:
        """Sum a block that every rank has ended, once."""
        slot = self._slots[index]
        with self._changed:
            record = current.records[index]
            if record is None or index not in current.awaited or not all(ended[index] for ended in current.ended):
                return
            current.records[index] = None
        with record.timing("decode"), self._scratch.lock:
            sums, own = self._scratch.for_block(slot.gradient)
            self._values[index].write_own(own)
            self._values[index].sum_in_rank_order(sums, own)
            if self.error_feedback:
                self._unsent.stage(slot, own)
            torch.mul(sums, 1.0 / self._world_size, out=slot.gradient)
        self.session.recorder.close_bucket(record)
        with self._changed:
            current.n_summed += 1
            self._changed.notify_all()
            done = current.awaited.pop(index, None)  # None: it was told of a failure
        if done is not None:
            done.set_result(None)

    # ---- failure

    def fail(self, error: Exception) -> None:
        """See Listener: whoever waits for a block gets the error."""
        failure = self.session.communicator.fail(error)
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
            waiting = [] if self._round is None else self._round.give_up()
        for done in waiting:
            done.set_exception(failure)

    def _hear_of_lane(self, finished: torch.futures.Future) -> None:
        try:
            finished.wait()
        except Exception as error:
            self.fail(error)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ---- between steps

    def stats(self) -> dict[str, Any]:
        """Bits per value and block, b, rounds whose bits cores bound (`rounds_held`), and how well communication hides
        (this rank's ROW, T_wait, OSF, utilisation)."""
        if not hasattr(self, "figures"):
            return {}
        held = int(self.pacing.figures()["rounds_held"])
        return {"rate_bps": self.pacing.rate_bps, "rounds_held": held, **self.figures.as_dict()}

    def step_figures(self) -> dict[str, float]:
        """Bits sent of each value in the last step, all of them and in the first stage, and what bounds them."""
        return self.figures.last_bits() | self.pacing.figures()

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": self.session.feedback.state_by_name(self.session.slots)} if self.error_feedback else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument."""
        if self.error_feedback:
            if not isinstance(state.get("residuals"), dict):
                raise InvalidArgument(
                    f"this is not the state of scheme {self.name}: it lacks residuals; "
                    "pass what attachment.state_dict() returned"
                )
            self.session.feedback.load_by_name(state["residuals"], self.session.slots)
