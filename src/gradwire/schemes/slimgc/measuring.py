"""The communication threshold table in a live run: measured while the training warms up, agreed, and watched after that.

Warm-up (algorithm 1 of the paper): even steps send every gradient compressed, odd steps raw. Inside a fused bucket sizes
cannot be told apart, so after each of these steps every size also travels once by itself, in that step's mode: in host
memory between two steps; on a device behind the step's last bucket, where the training's kernels wait for it and no thread
does, and times are read when the next step begins. Ranks take the slowest rank's times, so that one table holds for all
(algorithm 2 broadcasts one rank's threshold; the slowest rank is the one that a step waits for).

Watching, which the paper leaves out: every `drift_every` steps the ranks compare how long their steps communicate, by
the rank that waits least for others, with what it was when the table was made. A change beyond `drift_factor`, either
way, or a request by any rank, has all sizes measured again.
"""

import itertools
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradwire.checks import choice as check_choice
from gradwire.core.checkpoint import not_the_state
from gradwire.errors import InvalidArgument
from gradwire.schemes.slimgc.threshold import METHODS, SizeTimes, ThresholdTable, has_drifted, log_spaced
from gradwire.telemetry.recorder import BucketRecord
from gradwire.telemetry.stopwatch import Stopwatch
from gradwire.wire.communicator import Communicator
from gradwire.wire.device_wire import DeviceTimes, DeviceWire
from gradwire.wire.wire import Wire

# DDP's first step has one bucket for the whole model and every buffer is new: nothing in it is typical.
COLD_STEPS = 2
# Sizes that get a row: enough for a line over five decades, and a probe of each takes milliseconds.
_MAX_SIZES = 12
# Larger tensors follow the fitted line: at 100 Mb/s 8 MiB take a second already.
_MAX_PROBE_BYTES = 8 << 20
# Small transfers are repeated, for their time is mostly latency, which jitters. Large ones average by themselves, but
# the first may find its memory untouched or a core taken, and one such time would decide for all large tensors.
_SMALL_BYTES, _SMALL_REPEATS, _LARGE_REPEATS = 256 << 10, 3, 2

# Reads what an exchange took, when it is over: (seconds, of them in the codec). On a device the host waits for it.
Later = Callable[[], tuple[float, float]]
# (values (n,) of the gradient's dtype, mode: 0 raw, else which codec, from 1): sends one tensor by itself; what comes of it is
# thrown away.
Send = Callable[[torch.Tensor, int], Later]
# Seconds of one size: raw, then compressed and in the codec of each; None where it was not measured in that mode.
_Times = tuple[float | None, ...]


class HostClock:
    """Times one attachment in host memory, where what was sent has arrived when the lane goes on."""

    def __init__(self) -> None:
        self._records: list[BucketRecord] = []

    def begin_bucket(self, record: BucketRecord) -> None:
        if self._records and self._records[0].step != record.step:
            self._records.clear()  # of a step that was given up half-way
        self._records.append(record)

    def take_communicate_s(self) -> float:
        """Seconds that the buckets of the last step communicated; forgets them."""
        records, self._records = self._records, []
        return sum(record.busy_ns["communicate"] for record in records) / 1e9

    def time(self, wire: Wire, send: Callable[[], None]) -> Later:
        """Have all ranks `send` by this end of the wire at the same time: waiting for a slow one is not communication."""
        wire.communicator.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"))
        watch = Stopwatch()
        with watch:
            send()
        busy_ns = wire.record.busy_ns
        taken = watch.total_ns / 1e9, (busy_ns["encode"] + busy_ns["decode"]) / 1e9
        return lambda: taken


class DeviceClock:
    """As `HostClock` on a device, all that its stream does from now on until `close`."""

    def __init__(self, wire: DeviceWire) -> None:
        self._wire, self._of_step = wire, DeviceTimes(wire.device)
        wire.note_times(self._of_step)

    def take_communicate_s(self) -> float:
        return self._of_step.take().get("communicate", 0.0)

    def time(self, wire: Wire, send: Callable[[], None]) -> Later:
        """As `HostClock`'s; nobody waits before the times are read."""
        self._wire.group.sum(self._wire.scratch("start", 1).zero_())
        times = DeviceTimes(self._wire.device)
        self._wire.note_times(times)
        send()
        self._wire.note_times(self._of_step)

        def read() -> tuple[float, float]:
            taken = times.take()
            codec_s = taken.get("encode", 0.0) + taken.get("decode", 0.0)
            return codec_s + taken["communicate"], codec_s

        return read

    def close(self) -> None:
        self._wire.note_times(None)


class Measuring:
    """Everything that decides the threshold of a run. Used on the lane only, but for `is_requested` and `stats`.

    Args:
        warmup_steps: steps to measure in; even, at least 4.
        method: "fit" or "measured" (`gradwire.schemes.slimgc.threshold`).
        drift_every: steps between two looks at the network; 0: never.
        drift_factor: how much slower or faster a step's communication must become to measure again.
        n_codecs: of more than one, all steps of the warm-up travel raw, and modes take turns in what is sent after them.
    Raises: InvalidArgument.

    Attributes:
        tables: one of each codec; empty as long as none was measured.
        is_due: all sizes are to be measured again.
        is_requested: have that be so from the next look at the network on; if any rank asks, all measure.
    """

    def __init__(
        self,
        n_codecs: int,
        warmup_steps: int = 10,
        method: str = "fit",
        drift_every: int = 50,
        drift_factor: float = 1.5,
    ) -> None:
        if warmup_steps < COLD_STEPS + 1 + n_codecs:
            raise InvalidArgument(
                f"warmup_steps is at least {COLD_STEPS + 1 + n_codecs}: the first {COLD_STEPS} are not typical, and one "
                f"raw step and one of each codec must follow; got {warmup_steps}"
            )
        if drift_every < 0:
            raise InvalidArgument(f"drift_every is 0 (never) or a number of steps, got {drift_every}")
        if not drift_factor > 1:
            raise InvalidArgument(f"the drift factor is above 1, not {drift_factor!r}")
        self.warmup_steps, self.method = warmup_steps, check_choice("method", method, METHODS)
        self.drift_every, self.drift_factor, self.n_codecs = drift_every, drift_factor, n_codecs
        self.tables: list[ThresholdTable] = []
        self.n_measured = 0
        self.is_due = self.is_requested = False
        self._first_step: int | None = None
        self._sizes: set[int] = set()  # values of each tensor of the model
        self._sample = torch.empty(0, dtype=torch.float32, device="cpu")
        self._times: dict[int, list[_Times]] = {}
        self._communicate_s: deque[float] = deque(maxlen=max(1, drift_every))
        self._reference_s: float | None = None
        self._ended: int | None = None  # the step that was probed last, until its times are taken
        self._under_way: list[tuple[int, int, list[Later]]] = []  # its probes: (values, mode, times)

    # ---- what a step asks

    def warmup_mode(self, step: int) -> int | None:
        """1: `step` sends everything compressed, as the first and every other step of the warm-up; 0: everything raw.
        With several codecs, of which all these steps are raw, the mode of what is sent after them. None: it is after
        the warm-up, which begins with the first step that is asked about."""
        if self._first_step is None:
            self._first_step = step
        n_before = step - self._first_step
        is_over = self.tables or n_before >= self.warmup_steps
        return None if is_over else (n_before + 1) % (1 + self.n_codecs)

    def may_probe(self, step: int, is_ahead: bool) -> bool:
        """Return whether tensors may be sent by themselves after `step`; also asked on the training thread after its
        buckets. `is_ahead`: the training does not wait for the aggregation. Then a look at the network does not make it
        wait either, and what a look measures counts to the step in which it ends."""
        if self._first_step is None:
            return False
        # The warm-up by its steps, not by the table: that may be made while this is asked.
        if step < self._first_step + self.warmup_steps:
            return step >= self._first_step + COLD_STEPS
        return not is_ahead and self.drift_every > 0 and (step + 1) % self.drift_every == 0

    def see(self, tensors: list[torch.Tensor]) -> None:
        """Note the sizes of a bucket's tensors, and keep the largest as what is sent in probes."""
        for tensor in tensors:
            if not tensor.numel():
                continue
            self._sizes.add(tensor.numel())
            n = min(tensor.numel(), _MAX_PROBE_BYTES // tensor.element_size())
            if n > self._sample.numel():
                self._sample = torch.nan_to_num(tensor[:n].clone(), nan=0.0, posinf=0.0, neginf=0.0)

    # ---- after a step, on the lane of every rank

    def probe(self, step: int, device: torch.device, send: Send) -> None:
        """Send every size that gets a row by itself, in the modes that are to be measured after `step`."""
        self._ended, mode = step, self.warmup_mode(step)
        self._sample = self._sample.to(device)  # where it is, unless it was loaded
        if mode is None:
            modes = [*range(1, 1 + self.n_codecs), 0] if self.is_due else []
        else:
            modes = [mode] if self.may_probe(step, is_ahead=False) else []
        largest, element_bytes = self._sample.numel(), self._sample.element_size()
        sizes = log_spaced({min(n, largest) for n in self._sizes}, _MAX_SIZES) if modes else []
        for mode, n in itertools.product(modes, sizes):
            repeats = _SMALL_REPEATS if n * element_bytes < _SMALL_BYTES else _LARGE_REPEATS
            self._under_way.append((n, mode, [send(self._sample[:n], mode) for _ in range(repeats)]))

    def conclude(self, communicate_s: float, communicator: Communicator) -> int | None:
        """Take the times of what was sent after the step that ended last, agree, or look at the network, as that step has it.
        `communicate_s`: how long the buckets of that step communicated. Returns: the threshold, if there is a new table."""
        step, under_way, self._ended, self._under_way = self._ended, self._under_way, None, []
        for n, mode, reads in under_way:
            timed = sorted(read() for read in reads)
            total_s, codec_s = timed[(len(timed) - 1) // 2]  # of three the middle one, of two the quicker
            codec_s = min(total_s, codec_s)
            times: list[float | None] = [None] * (1 + 2 * self.n_codecs)
            times[max(0, 2 * mode - 1) : 2 * mode + 1] = [total_s - codec_s, codec_s] if mode else [total_s]
            self._times.setdefault(n * self._sample.element_size(), []).append(tuple(times))
        if step is None:  # none has ended since, or it was given up half-way
            return None
        if self.warmup_mode(step) is not None:
            return self._agree(communicator) if self.warmup_mode(step + 1) is None else None
        if self.is_due:
            self.is_due = False
            return self._agree(communicator)
        if self.tables:
            self._communicate_s.append(communicate_s)
            if self.drift_every and not (step + 1) % self.drift_every:
                self.is_due = self._is_outdated(communicator)
        return None

    def _is_outdated(self, communicator: Communicator) -> bool:
        """Return whether the network has changed or any rank wants to know, the same on all of them."""
        facts = torch.tensor(
            [statistics.median(self._communicate_s), -float(self.is_requested)], dtype=torch.float64, device="cpu"
        )
        communicator.all_reduce(facts, dist.ReduceOp.MIN)
        current_s, is_requested = float(facts[0]), bool(facts[1] < 0)
        self._communicate_s.clear()
        if self._reference_s is None:
            self._reference_s = current_s
        is_outdated = is_requested or has_drifted(self._reference_s, current_s, self.drift_factor)
        if is_outdated:  # the next look begins anew: what is compressed may change now
            self.is_requested, self._reference_s = False, None
        return is_outdated

    def _agree(self, communicator: Communicator) -> int | None:
        """Make the tables that all ranks share, the slowest rank's; the first one's threshold."""
        sizes = sorted(self._times)
        if not sizes:
            return None
        measured = [[_typical(times) for times in zip(*self._times[size], strict=True)] for size in sizes]
        rows = torch.tensor(measured, dtype=torch.float64, device="cpu")
        communicator.all_reduce(rows, dist.ReduceOp.MAX)
        self._times.clear()
        self.tables = [
            ThresholdTable(
                SizeTimes(size, row[0], row[2 * codec + 1], row[2 * codec + 2])
                for size, row in zip(sizes, rows.tolist(), strict=True)
            )
            for codec in range(self.n_codecs)
        ]
        self.n_measured += 1
        return self.tables[0].threshold_bytes(self.method)

    # ---- between steps

    def stats(self) -> dict[str, Any]:
        """The first codec's table, and how often tables were made."""
        table = self.tables[0].as_rows() if self.tables else []
        return {"threshold_table": table, "threshold_measured": self.n_measured}

    def state_dict(self) -> dict[str, Any]:
        return {
            "table": self.tables[0].as_rows() if self.tables else None,
            "other_tables": [table.as_rows() for table in self.tables[1:]],
            "n_measured": self.n_measured,
            "first_step": self._first_step,
            "sizes": sorted(self._sizes),
            "sample": self._sample.to("cpu", copy=True),
            "times": {size: [list(times) for times in rows] for size, rows in self._times.items()},
            "communicate_s": list(self._communicate_s),
            "reference_s": self._reference_s,
            "is_requested": self.is_requested,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument; what a state that does not read makes it raise."""
        tables = [] if state["table"] is None else [state["table"], *state["other_tables"]]
        if len(tables) not in (0, self.n_codecs):
            raise not_the_state("scheme slimgc", f"it has {len(tables)} threshold tables for {self.n_codecs} codecs")
        self.tables = [ThresholdTable.from_rows(rows) for rows in tables]
        self._times = {
            int(size): [tuple(None if s is None else float(s) for s in row) for row in rows]
            for size, rows in state["times"].items()
        }
        self._sample, self._sizes = state["sample"].clone(), {int(size) for size in state["sizes"]}
        self.n_measured, self.is_requested = int(state["n_measured"]), bool(state["is_requested"])
        self._first_step, self._reference_s = state["first_step"], state["reference_s"]
        self._communicate_s = deque(map(float, state["communicate_s"]), self._communicate_s.maxlen)


def _typical(times: Sequence[float | None]) -> float:
    """The median: a core that was taken once must not decide. What a clock does not resolve has taken some time, too."""
    values = [value for value in times if value is not None]
    return max(statistics.median(values), 1e-9) if values else 0.0
