"""One end of the group for a scheme: its collectives, counted and checked, over tensors that lie where the bucket lies.

`Wire` works in host memory through Gloo and the native engine, `DeviceWire` (`device_wire.py`) on a device through NCCL and
kernels. Both carry what ranks must agree on (scheme, options, layout, step) and follow one rule for what is not finite:
if a message of any rank held Inf or NaN, all ranks get NaN for it, and the step counts for no state. In host memory that is
known at once, on a device when the step is over: `begin_step`, `end_step` and `outcome` are for both.
"""

import contextlib
import copy
import functools
import math
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gradwire import _native
from gradwire.errors import CorruptMessage, RankMismatch
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator, ring_bytes
from gradwire.wire.preamble import Facts, Preamble, compare_preambles

_HEAD_WORDS = 3  # int32: checksum of the facts, 1 if the gradient is not finite, CRC32C of the rest
_FEW = 1 / 64  # of what travels beside: so much more may be sent for a hop less
_INFINITY = 0x7F80_0000  # float32: patterns from here on are not finite

# A yes or no: a bool in host memory, a bool tensor of one element on a device, whose host does not know it yet.
Flag = Any


class StepOutcome(NamedTuple):
    """A step that is over, the same on all ranks."""

    is_finite: bool  # no message held Inf or NaN
    error: int = 0  # the error word of messages that were not whole; 0 for none. In host memory they raise at once.


AnyWire = TypeVar("AnyWire", bound="Wire")


class Wire:
    """One rank's end of the group, in host memory; `for_bucket` gives the end of one bucket in one step. Used on the lane."""

    device = torch.device("cpu")  # where the tensors lie
    on_device: ClassVar[bool] = False  # whether that is a device, where work is enqueued and the host waits for nothing
    record: BucketRecord  # where bytes and times of the bucket are noted
    facts: Facts  # what ranks must share, for streams whose frames compare it
    _preamble: Preamble

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self._outcome = SimpleNamespace(is_over=False, is_finite=True)  # shared by the ends of all buckets of a step
        self._is_bucket_finite = True
        self._error: Tensor | None = None

    def for_bucket(self: AnyWire, preamble: Preamble, record: BucketRecord) -> AnyWire:
        """The end of one bucket in one step; it shares the memory and the outcome of the step with all others."""
        end = copy.copy(self)
        end.record, end._preamble, end.facts = record, preamble, preamble.facts
        return end

    @property
    def checksum(self) -> int:
        """31 bits over the facts, for collectives."""
        return zlib.crc32(repr(tuple(self.facts)).encode()) & 0x7FFFFFFF

    # ---- a step

    def begin_step(self) -> None:
        """Forget what was noted of another step."""
        self._outcome.is_over, self._outcome.is_finite = False, True

    def end_step(self) -> None:
        """All messages of the step are sent."""
        self._outcome.is_over = True

    def outcome(self) -> StepOutcome | None:
        """The outcome of the step that ended last, once; None: none has ended since. On a device, waits for its end."""
        if not self._outcome.is_over:
            return None
        self._outcome.is_over = False
        return StepOutcome(self._outcome.is_finite)

    def at_work(self) -> AbstractContextManager[None]:
        """`with wire.at_work():` enqueues what is inside on the stream that all of it runs on."""
        return contextlib.nullcontext()

    def lend(self, values: Iterable[Tensor]) -> None:
        """Have the calling thread use `values`, which work on this wire makes."""

    # ---- values

    def timing(self, kind: str) -> AbstractContextManager[None]:
        """`with wire.timing("encode"):` counts the time inside."""
        return self.record.timing(kind)

    def scratch(self, name: str, n_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """(n_elements,) of work space that lives until the next call with this name."""
        return self.communicator.scratch(name, n_elements * dtype.itemsize).view(dtype)

    def place(self, values: Tensor) -> Tensor:
        """The host's `values` where the bucket lies."""
        return values

    def divide(self, values: Tensor, divisor: float) -> Tensor:
        """Divide `values` in place, rounding once."""
        return values.div_(divisor)

    def read(self, *values: Tensor) -> list[int]:
        """Integers on the host, one tensor after the other; the lane waits for them."""
        return [number for one in values for number in one.tolist()]

    def all_finite(self, values: Tensor) -> Flag:
        """True if all `values` are finite: one pass without a copy."""
        # NaN is the least and the largest of values among which it is. Sixty times as fast as the norm of most.
        return not values.numel() or all(math.isfinite(float(extreme)) for extreme in values.aminmax())

    def used(self, gradient: Tensor, spans: Sequence[tuple[int, int]]) -> list[bool]:
        """For each span, whether this rank has a gradient of it. On a device, which would have to be asked, all count."""
        return [holds_nonzero(gradient[start:end]) for start, end in spans]

    # ---- what is not finite

    def note(self, is_finite: Flag) -> None:
        """The step counts only if this is so; it must be the same on all ranks."""
        # Also on threads of the backend's: True is never written, which would undo what another one has found.
        if not is_finite:
            self._outcome.is_finite = False

    def note_message(self, is_finite: Flag) -> None:
        """As `note`; if not, the bucket becomes NaN when it is concluded."""
        self.note(is_finite)
        self._is_bucket_finite &= bool(is_finite)

    def conclude(self, values: Tensor) -> None:
        """Make `values`, the bucket's mean, NaN altogether if a message was not finite."""
        if not self._is_bucket_finite:
            values.fill_(math.nan)

    # ---- what is not whole

    @property
    def error(self) -> Tensor:
        """(1,) int32: the error word of this bucket's messages, for codecs that read them."""
        if self._error is None:
            self._error = torch.zeros(1, dtype=torch.int32, device="cpu")
        return self._error

    def check(self, rank: int) -> None:
        """The message of `rank` has been read; CorruptMessage if it was not whole. On a device that comes a step later."""
        if self._error is not None and bool(self._error):
            raise CorruptMessage(
                f"rank {rank} sent a message for bucket {self.facts.bucket} of step {self.facts.step} that cannot be read, "
                "such as an index outside of the bucket; restart from the last checkpoint"
            )

    # ---- collectives

    def sum(self, values: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
        """Reduce `values` over all ranks, in place. Nothing is checked: what travels with it must tell."""
        with self.timing("communicate"):
            self.communicator.all_reduce(values, op)
        self.record.count_exchanged(self._ring_bytes(values))
        return values

    def start_sum(self, values: Tensor, op: Any = ReduceOp.SUM) -> Callable[[], None]:
        """As `sum`, beside what comes next until the result is called."""
        started = self.communicator.start_all_reduce(values, op)

        def wait() -> None:
            with self.timing("communicate"):
                self.communicator.finish(started)
            self.record.count_exchanged(self._ring_bytes(values))

        return wait

    def start_sum_of_few(self, values: Tensor, n_bytes_beside: int) -> Callable[[], None]:
        """As `start_sum` of `values` (n,) that travel beside so many bytes. Where they are few, each rank sends its own
        to all others, which add them in the order of ranks: one hop, where the backend's all-reduce has 2 (N - 1), each
        with a word back. A long line would be waited for that often."""
        n_bytes = (self.world_size - 1) * values.numel() * values.element_size()
        return self._start_gather_sum(values) if n_bytes <= _FEW * n_bytes_beside else self.start_sum(values)

    def _start_gather_sum(self, values: Tensor) -> Callable[[], None]:
        mesh, stream = self.communicator.open_exchange()
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        mesh.open(stream, self.facts, values.nbytes, peers)
        mesh.send(peers, stream, [values.view(torch.uint8)])

        def wait() -> None:
            rows = {self.rank: values}
            with self.timing("communicate"):
                while len(rows) < self.world_size:
                    sender, message, _ = mesh.receive_any(stream, [rank for rank in peers if rank not in rows])
                    if message.numel() != values.nbytes:
                        raise CorruptMessage(f"rank {sender} sent {message.numel()} bytes, expected {values.nbytes}")
                    rows[sender] = message.view(values.dtype)
                mesh.wait_until_all_sent()  # nobody sends what is left once this rank waits elsewhere
            values.copy_(functools.reduce(torch.add, (rows[rank] for rank in range(self.world_size))))
            mesh.close(stream)
            self.record.count_exchanged(len(peers) * values.nbytes)

        return wait

    def or_words(self, words: Tensor) -> None:
        """Replace `words` (n,) int32 by their bitwise OR over the ranks, shard by shard: for backends that know no OR."""
        n_words, shard = words.numel(), -(-words.numel() // self.world_size)
        rows = self.scratch("rows", self.world_size * shard, torch.int32)
        rows[:n_words].copy_(words)
        rows[n_words:].zero_()
        with self.timing("communicate"):
            theirs = self._all_to_all(rows.view(self.world_size, shard))
            own = theirs[self.rank].clone()
            for other in range(self.world_size):
                own.bitwise_or_(theirs[other])
            words.copy_(self._all_gather(own).view(-1)[:n_words])
        self.record.count_exchanged(self._ring_bytes(rows))

    def mean(self, values: Tensor, wire_dtype: torch.dtype | None = None) -> None:
        """The mean as DDP takes it, in place; what is not finite travels. Values wider than `wire_dtype` are rounded to it."""
        # DDP multiplies by 1/N before it sums, which keeps float16 sums in range; the same product gives its bits.
        values.mul_(1.0 / self.world_size)
        if wire_dtype is None or wire_dtype.itemsize >= values.element_size():
            self.sum(values)
        else:
            values.copy_(self.sum(self.scratch("rounded", values.numel(), wire_dtype).copy_(values)))

    def gather(self, payload: Tensor, is_finite: Flag) -> Tensor:
        """Every rank's `payload` (n,) int32: (world, n), by rank. `is_finite`: of what this rank's was made of.
        RankMismatch, and CorruptMessage of a payload that is not what its rank sent; on a device either comes a step
        later."""
        message = self._seal(payload[None], is_finite)[0]
        with self.timing("communicate"):
            messages = self._all_gather(message)
        return self._open(messages)

    def to_owners(self, rows: Tensor, is_finite: Flag) -> Tensor:
        """As `gather`, where row i of every rank's `rows` (world, n) int32 goes to rank i alone: (world, n), by sender."""
        messages = self._seal(rows, is_finite)
        with self.timing("communicate"):
            received = self._all_to_all(messages)
        return self._open(received)

    def _seal(self, rows: Tensor, is_finite: Flag) -> Tensor:
        """(k, head + n) int32: each row as a message."""
        messages = torch.empty(len(rows), _HEAD_WORDS + rows.shape[1], dtype=torch.int32, device="cpu")
        messages[:, _HEAD_WORDS:] = rows
        for message in messages:
            head = [self.checksum, int(not is_finite), _crc_of(message[_HEAD_WORDS:])]
            message[:_HEAD_WORDS] = torch.tensor(head, dtype=torch.int32, device="cpu")
        return messages

    def _open(self, messages: Tensor) -> Tensor:
        """(world, n): what the ranks' messages hold."""
        self.record.count_exchanged((self.world_size - 1) * 4 * messages.shape[1])
        if bool((messages[:, 0] != messages[0, 0]).any()):
            self.name_mismatch()
        for rank, received in enumerate(messages):
            if int(received[2]) != _crc_of(received[_HEAD_WORDS:]):
                raise CorruptMessage(
                    f"the message of rank {rank} for bucket {self.facts.bucket} of step {self.facts.step} was altered on "
                    "its way (checksum); restart from the last checkpoint"
                )
        self.note_message(not bool(messages[:, 1].any()))
        return messages[:, _HEAD_WORDS:]

    def largest(
        self, is_used: Sequence[bool], n_scales: int, write_scales: Callable[[Tensor], None]
    ) -> tuple[list[bool], Tensor]:
        """Find the flags that any rank has set, and the largest of every scale over the ranks. `write_scales` fills
        (n_scales,) float32, not negative; not finite if this rank's gradient is not."""
        # Floats that are not negative are ordered as their bits are, so one maximum of integers carries everything.
        checksum = self.checksum
        head = array("i", [checksum, -checksum, *is_used])  # the two maxima cancel if all are alike
        words = self.scratch("agreement", len(head) + n_scales, torch.int32)
        words[: len(head)].copy_(torch.frombuffer(head, dtype=torch.int32))
        scales = words[len(head) :].view(torch.float32)
        with self.timing("encode"):
            write_scales(scales)
        self.sum(words, ReduceOp.MAX)
        if int(words[0]) != -int(words[1]):
            self.name_mismatch()
        self.note(not n_scales or int(words[len(head) :].max()) < _INFINITY)
        return [flag != 0 for flag in words[2 : len(head)].tolist()], scales

    def name_mismatch(self) -> NoReturn:
        """The full exchange, which every rank comes to."""
        compare_preambles(self.communicator, self._preamble, self.record)
        raise RankMismatch(
            f"ranks sent different checksums for bucket {self.facts.bucket} of step {self.facts.step}, but agree on "
            "scheme, options, model and step: a message was altered on its way; restart from the last checkpoint"
        )

    def _all_to_all(self, rows: Tensor) -> Tensor:
        """Row i of every rank's `rows` (world, n) goes to rank i: (world, n), by sender. Uncounted."""
        return self.communicator.all_to_all(rows)

    def _all_gather(self, values: Tensor) -> Tensor:
        """Every rank's `values` (n,): (world, n), by rank. Uncounted."""
        return self.communicator.all_gather(values)

    def _ring_bytes(self, values: Tensor) -> int:
        return ring_bytes(values.numel() * values.element_size(), self.world_size)


def holds_nonzero(gradient: Tensor) -> bool:
    """True if a parameter with this gradient was used."""
    if not gradient.numel():
        return False
    # A used parameter shows at its first values, and spares the sweep. The norm allocates nothing, as any() would.
    flat, norm = gradient.view(-1), torch.linalg.vector_norm
    return float(norm(flat[:64], math.inf)) != 0 or float(norm(flat, math.inf)) != 0


def _crc_of(payload: Tensor) -> int:
    """CRC32C of (n,) int32, as an int32 holds it."""
    crc = _native.crc32c(payload.view(torch.uint8))
    return crc - (1 << 32) if crc >> 31 else crc
