"""What both schemes share: blocks go out last come first served, and are summed when all ranks have ended them.

Messages, copies and sums are native/exchange/broadcast.hpp's; here is when what is sent, and what it is noted as.
"""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch

from gradwire import _native
from gradwire.codecs.embedded_float import DEFAULT_PARTITION, EmbeddedFloat
from gradwire.codecs.tensors import bytes_of, dtype_code
from gradwire.core.checkpoint import not_the_state
from gradwire.core.session import Session
from gradwire.errors import GradwireError, InvalidArgument
from gradwire.schemes.aqgb.block_feedback import BlockFeedback
from gradwire.schemes.aqgb.figures import Figures
from gradwire.schemes.aqgb.pacing import Clock, Pacing
from gradwire.schemes.aqgb.receiver import Heard, Receiver
from gradwire.schemes.aqgb.round import Round
from gradwire.schemes.deferred import DeferredScheme, OpenBlock
from gradwire.stepping.blocks import Block, Division
from gradwire.telemetry.recorder import BucketRecord
from gradwire.telemetry.stopwatch import now_s
from gradwire.wire.communicator import Communicator
from gradwire.wire.preamble import FORMAT_VERSION, Preamble, compare_preambles

_TOPOLOGIES = ("fan-out", "ring")
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
        if topology not in _TOPOLOGIES:
            raise InvalidArgument(f"topology is one of {', '.join(_TOPOLOGIES)}, not {topology!r}")
        self._partition = EmbeddedFloat(partition=partition).partition
        self.topology = topology
        self.error_feedback = self.state_is_per_world = error_feedback
        self._clock = clock
        self._broadcast: _native.Broadcast | None = None
        self._receiver: Receiver | None = None
        self._changed = threading.Condition()
        self._failure: GradwireError | None = None

    @property
    def configuration(self) -> dict[str, Any]:
        return super().configuration | {
            "partition": self._partition,
            "topology": self.topology,
            "error_feedback": self.error_feedback,
        }

    def bind(self, session: Session) -> None:
        super().bind(session)
        self._unsent = BlockFeedback(session.feedback)
        communicator = session.communicator
        world_size = self._world_size = communicator.world_size
        sizes = [slot.block.n_elements for slot in self._slots]
        self.pacing = self._make_pacing(communicator.rank, world_size, sizes)
        self.figures = Figures([slot.block.name for slot in self._slots], sizes, self._clock)
        self._dtypes = [dtype_code(slot.gradient.dtype) for slot in self._slots]
        self._round: Round | None = None
        self._spare = session.recorder.open_apart()
        self._failure = None
        if world_size > 1:
            # Before ranks connect: one with another scheme compares first what it is, and has to meet the like. It counts
            # as little as the connections' own making.
            mine = Preamble(FORMAT_VERSION, 0, self.name, self.configuration_hash, 0, 0, 0)
            never_closed = session.recorder.open_bucket(0, -1, 0)
            communicator.submit(compare_preambles, communicator, mine, never_closed).wait()
            self._broadcast = communicator.submit(self._connect, communicator).wait()
            self._receiver = Receiver(self._broadcast, communicator.rank, self._take, self.fail)

    def _connect(self, communicator: Communicator) -> _native.Broadcast:
        names = (slot.block.name for slot in self._slots)
        sizes = (slot.block.n_elements for slot in self._slots)
        return _native.Broadcast(
            communicator.mesh, communicator.next_stream(), self.topology == "ring",
            list(zip(names, sizes, self._dtypes, strict=True)), self._partition, self.configuration_hash,
            self.blocks_hash,
        )  # fmt: skip

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._receiver is not None:
                self._receiver.close()
            self._receiver = self._broadcast = None
            self.session.feedback.clear()

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
        broadcast, receiver = self._broadcast, self._receiver
        if broadcast is None or receiver is None:
            return
        with self._changed:  # the round before is over, but where its step was dropped
            self._changed.wait_for(lambda: self._round is None or self._round.is_complete or self._failure)
            self._raise_failure()
            self.pacing.begin_step()
            broadcast.begin(step & 0xFFFFFFFF)
            recorder, n_blocks = self.session.recorder, len(self._slots)
            records: list[BucketRecord | None] = [recorder.open_bucket(step, -1, 0) for _ in range(n_blocks)]
            current = self._round = Round(step, n_blocks, self._world_size, records)
        receiver.begin(step)
        self.session.communicator.submit(self._run_round, current).add_done_callback(self._hear_of_lane)

    def _start_block(self, slot: OpenBlock) -> torch.futures.Future:
        done: torch.futures.Future = torch.futures.Future()
        if self._broadcast is None:
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
        broadcast = self._broadcast
        assert broadcast is not None
        for _ in range(current.n_blocks):
            slot, n_unsent, is_last = self._next_to_send(current)
            index = slot.block.index
            n_bits = self._first_bits(index, n_unsent)
            if self._more_bits_ever(n_bits) == 0:
                current.ending.append(index)
            if is_last:
                self._end_where_nothing_follows(current, broadcast.max_body_bytes(index, n_bits), (index, n_bits))
            self._send_bits(broadcast, current, index, n_bits)
        for index in list(self.pacing.order):
            if not current.ended[index]:
                n_bits = self._more_bits(index, current.sent_bits[index], 0)
                current.ending.append(index)
                if n_bits:
                    self._send_bits(broadcast, current, index, n_bits)
        if current.ending:
            self._send(broadcast, current, None, 0)
        with self._changed:
            self._changed.wait_for(lambda: current.is_complete or self._failure)
            self._raise_failure()
        self.session.communicator.mesh.wait_until_all_sent()

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
            sent_bits = last[1] if index == last[0] else current.sent_bits[index]
            if current.ended[index] or index in current.ending:
                continue
            if self._more_bits(index, sent_bits, extra_bytes):
                return
            current.ending.append(index)

    def _send_bits(self, broadcast: _native.Broadcast, current: Round, index: int, n_bits: int) -> None:
        record, gradient = current.records[index], self._slots[index].gradient
        assert record is not None
        with record.timing("encode"):
            n_bytes = broadcast.encode(index, bytes_of(gradient), self._dtypes[index], n_bits)
        # Noted first: sent, it may end the step before this thread goes on.
        self.figures.note_sent(index, n_bits, current.sent_bits[index] == 0)
        current.sent_bits[index] += n_bits
        self._send(broadcast, current, index, n_bytes)
        self.pacing.sent(n_bytes)

    def _send(self, broadcast: _native.Broadcast, current: Round, index: int | None, body_bytes: int) -> None:
        """What was encoded of a block, or a head alone; noted before what it says can end the step."""
        record = self._record_of(current, index)
        for _ in range(broadcast.n_copies):
            record.count_sent(broadcast.head_bytes + body_bytes)
        newly, current.ending = current.ending, []
        for block in newly:
            current.ended[block] = True
        broadcast.send(newly, self.pacing.own_ceiling_bits, self.pacing.told_remaining_s())
        for block in newly:
            self._end_block(current, block)

    def _record_of(self, current: Round, index: int | None) -> BucketRecord:
        """Where traffic of a block is noted; what belongs to none, or comes when its block is over, goes to one left."""
        record = None if index is None else current.records[index]
        return record or next((one for one in current.records if one is not None), self._spare)

    # ---- the receiver

    def _take(self, heard: Heard) -> None:
        current = self._round
        assert current is not None
        self.pacing.hear(heard.origin, heard.received_bytes, heard.receiving_us, heard.remaining_s, heard.ceiling_bits)
        record = self._record_of(current, heard.block)
        if heard.forwarded_bytes:
            record.count_sent(heard.forwarded_bytes)
        if heard.block is not None:
            self.figures.note_received(heard.duration_ns)
            record.add("communicate", heard.arrived_ns - heard.duration_ns, heard.arrived_ns)
            record.add("decode", heard.arrived_ns, heard.decoded_ns)
            record.count_received(heard.body_bytes)
        for index in heard.newly_ended:
            self._end_block(current, index)

    def _end_block(self, current: Round, index: int) -> None:
        """One rank more has ended a block; after the last one it is summed."""
        slot, broadcast = self._slots[index], self._broadcast
        assert broadcast is not None
        with self._changed:
            current.n_open[index] -= 1
            record = current.records[index]
            if record is None or current.n_open[index] or index not in current.awaited:
                return
            current.records[index] = None
        with record.timing("decode"):
            unsent = self._unsent.room(slot) if self.error_feedback else None
            left_out = None if unsent is None else bytes_of(unsent)
            broadcast.mean(index, bytes_of(slot.gradient), self._dtypes[index], left_out)
            if unsent is not None:
                self._unsent.stage(slot, unsent)
        self.session.recorder.close_bucket(record)
        with self._changed:
            current.n_summed += 1
            self._changed.notify_all()
            done = current.awaited.pop(index, None)  # None: it was told of a failure
        if done is not None:
            done.set_result(None)

    # ---- failure

    def fail(self, error: Exception) -> None:
        """Whoever waits for a block gets the error."""
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
                raise not_the_state(f"scheme {self.name}", "it lacks residuals")
            self.session.feedback.load_by_name(state["residuals"], self.session.slots)
