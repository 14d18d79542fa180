"""N rank processes as one: started, their output forwarded, their ends collected; shared by `launch` and `netlab`."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO

from gradwire.errors import InvalidArgument, PeerLost, Unsupported

# Runs before each rank's command, in the new process: enters the lab's namespaces, asks to be killed with its owner,
# and executes the command. A program of its own, for between fork and exec a process with threads (torch) may do
# nothing of this; -I -S keeps it at 20 ms.
_PRELUDE = """
import ctypes, os, signal, sys, warnings  # os.execvp wants warnings, when their file may be out of reach
owner, *namespaces = map(int, sys.argv[1].split(","))
libc = ctypes.CDLL(None, use_errno=True)
for namespace in namespaces:
    if libc.setns(namespace, 0):
        sys.exit(f"gradwire: cannot enter the rank's namespace: {os.strerror(ctypes.get_errno())}")
if owner:
    libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != owner:
        os._exit(137)
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background shell hands down "ignored": Ctrl-C would not arrive
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"gradwire: cannot run {sys.argv[2]}: {error.strerror}", file=sys.stderr)
    os._exit(127 if isinstance(error, FileNotFoundError) else 126)
"""

_TERM_TO_KILL_S = 5.0  # what a rank gets to end after SIGTERM; DDP and Gloo need well under one second
_INTERRUPT_TO_KILL_S = 1.0  # and after Ctrl-C, whose user waits
_COMMAND_TO_KILL_S = 30.0  # what a command with ranks gets: theirs, and its own clearing up


@dataclass(frozen=True)
class LaunchResult:
    """How the ranks ended. An exit code is a process's status, or minus the signal that killed it."""

    exit_codes: tuple[int, ...]
    first_failed: int | None  # the rank that failed first; the others may only have followed
    timed_out: bool = False
    ended_by_us: tuple[int, ...] = ()  # ranks that were still running when patience was over

    @property
    def status(self) -> int:
        """A shell's exit status: 0, 124 for a time-out, the first failed rank's, or 128 + its signal."""
        if self.timed_out:
            return 124
        if self.first_failed is None:
            return 0
        code = self.exit_codes[self.first_failed]
        return code if code > 0 else 128 - code

    def __str__(self) -> str:
        ended = f"rank{'s' * (len(self.ended_by_us) > 1)} {', '.join(map(str, self.ended_by_us))}"
        if self.timed_out:
            return f"time is up; {ended} had not finished and had to be ended"
        if self.first_failed is None:
            return f"all {len(self.exit_codes)} ranks ended well"
        failed = {rank: f"rank {rank} {_describe(code)}" for rank, code in enumerate(self.exit_codes) if code != 0}
        first = failed.pop(self.first_failed)
        others = [words for rank, words in failed.items() if rank not in self.ended_by_us]
        others += [f"{ended} had to be ended"] if self.ended_by_us else []
        return first + (f" (the first to fail; then {', '.join(others)})" if others else "")

    def raise_if_failed(self) -> None:
        """Raises: PeerLost, naming the ranks, unless every rank ended with status 0."""
        if self.timed_out or self.first_failed is not None:
            raise PeerLost(f"{self}; its own output, above, says why")


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


class RankSet:
    """The ranks of one run. Each is the leader of a session and process group of its own.

    Args:
        grace_s: what the others get, once a rank has failed, to notice by themselves and report, before SIGTERM.
        on_line: called with (rank, line) for every line on a rank's standard output, from the forwarding thread, in
            place of printing it. Standard error is always printed. What it raises is raised by `wait`.
    Raises: InvalidArgument, Unsupported (no Linux 5.3 or newer).
    """

    def __init__(self, grace_s: float = 10.0, on_line: Callable[[int, str], None] | None = None) -> None:
        if not grace_s >= 0:
            raise InvalidArgument(f"grace_s is {grace_s}; it must be 0 or more")
        if not hasattr(os, "pidfd_open"):
            raise Unsupported("starting ranks needs Linux 5.3 or newer; here, start them with torchrun")
        self._grace_s, self._on_line = grace_s, on_line
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended: dict[int, int] = {}
        self._first_failed: int | None = None
        self._result: LaunchResult | None = None
        self._lock = threading.Lock()
        self._forwarders: list[threading.Thread] = []  # one a pipe
        self._reader_error: Exception | None = None  # the first that `on_line` raised

    def start(self, command: Sequence[str], environment: Mapping[str, str], namespaces: Sequence[int] = ()) -> None:
        """Start the next rank; `namespaces` are descriptors for it to enter, in this order."""
        process = subprocess.Popen(
            _owned(command, namespaces),
            env=dict(environment),
            pass_fds=tuple(namespaces),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for pipe in (process.stdout, process.stderr):
            copied = (pipe, len(self._processes), pipe is process.stderr)
            thread = threading.Thread(target=self._forward, args=copied, name="gradwire-rank-output", daemon=True)
            thread.start()
            self._forwarders.append(thread)
        self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @property
    def running(self) -> bool:
        """Whether any rank has not been collected yet."""
        return len(self._ended) < len(self._processes)

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to the rank's whole process group; nothing if it has ended."""
        if not 0 <= rank < len(self._processes):
            raise InvalidArgument(f"there is no rank {rank}; there are ranks 0 to {len(self._processes) - 1}")
        if rank not in self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._processes[rank].pid, number)

    def wait(self, timeout_s: float | None = None) -> LaunchResult:
        """Wait for every rank. When one fails the others get `grace_s`, then SIGTERM, then SIGKILL. Ctrl-C is forwarded
        to the ranks, and raised again once they have ended; so is SystemExit, as SIGTERM."""
        if self._result is not None:
            return self._result
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        timed_out = False
        try:
            while self.running and self._first_failed is None and not timed_out:
                timed_out = not self._collect(deadline)
            if self._first_failed is not None:
                self._collect_all(time.monotonic() + self._grace_s)
            late = tuple(rank for rank in range(len(self._processes)) if rank not in self._ended)
            self.end()
        except (KeyboardInterrupt, SystemExit) as error:
            self.end(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            raise
        codes = tuple(self._ended[rank] for rank in range(len(self._processes)))
        if self._reader_error is not None:
            raise self._reader_error
        self._result = LaunchResult(codes, self._first_failed if not timed_out else None, timed_out, late)
        return self._result

    def end(self, number: int = signal.SIGTERM) -> None:
        """End every rank that still runs: `number`, then SIGKILL for those that do not heed it."""
        try:
            self._signal_all(number)
            patience_s = _INTERRUPT_TO_KILL_S if number == signal.SIGINT else _TERM_TO_KILL_S
            self._collect_all(time.monotonic() + patience_s)
        except KeyboardInterrupt:  # a second Ctrl-C: no more patience
            pass
        self._signal_all(signal.SIGKILL)
        self._collect_all(None)
        give_up_at = time.monotonic() + 1.0  # a stray process may hold a pipe open
        for thread in self._forwarders:
            thread.join(max(0.0, give_up_at - time.monotonic()))

    def _signal_all(self, number: int) -> None:
        for rank in range(len(self._processes)):
            self.send_signal(rank, number)
            self.send_signal(rank, signal.SIGCONT)  # a stopped rank takes nothing but SIGKILL

    def _collect_all(self, deadline: float | None) -> None:
        while self.running and self._collect(deadline):
            pass

    def _collect(self, deadline: float | None) -> bool:
        """Wait until at least one rank has ended, and collect it; False if the deadline came first."""
        waiting = {rank: process for rank, process in enumerate(self._processes) if rank not in self._ended}
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            for rank, process in waiting.items():
                descriptor = os.pidfd_open(process.pid)
                stack.callback(os.close, descriptor)
                selector.register(descriptor, selectors.EVENT_READ, rank)
            timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = sorted(key.data for key, _ in selector.select(timeout_s))
        for rank in ready:
            # The ended leader is still a zombie, so that the group's number cannot be anyone else's: whatever the rank
            # started and left behind goes with it.
            self.send_signal(rank, signal.SIGKILL)
            self._ended[rank] = waiting[rank].wait()
        failed = [rank for rank in ready if self._ended[rank] != 0]
        if failed and self._first_failed is None:
            # Two at once: a rank that a signal killed is the cause, one that ended by itself may have seen its peer go.
            self._first_failed = min(failed, key=lambda rank: (self._ended[rank] > 0, rank))
        return bool(ready)

    def _forward(self, pipe: IO[bytes], rank: int, is_error: bool) -> None:
        """In a thread: copy whole lines of a rank's output with the rank in front."""
        pending = b""
        with pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                pending += data
                # What is not lines at all is not gathered for ever.
                end = pending.rfind(b"\n") + 1 if len(pending) < 1 << 20 else len(pending)
                self._write(rank, is_error, pending[:end])
                pending = pending[end:]
        self._write(rank, is_error, pending)

    def _write(self, rank: int, is_error: bool, whole: bytes) -> None:
        lines = whole.decode(errors="replace").splitlines()
        with self._lock:
            if self._on_line is not None and not is_error:
                try:
                    for line in lines if self._reader_error is None else ():
                        self._on_line(rank, line)
                except Exception as error:  # the thread goes on: a rank must not hang on a full pipe
                    self._reader_error = error
            elif lines:
                # Our own reader may have gone (`... | head`); the ranks are not to hang on a full pipe for that.
                with contextlib.suppress(OSError, ValueError):
                    stream = sys.stderr if is_error else sys.stdout
                    stream.write("".join(f"[{rank}] {line}\n" for line in lines))
                    stream.flush()


def _owned(command: Sequence[str], namespaces: Sequence[int] = ()) -> list[str]:
    """`command`, to be started by this thread, behind the prelude: it dies with this process."""
    # The kernel sends "parent died" when the *thread* that started a process ends: only the main one lasts.
    owner = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    return [sys.executable, "-I", "-S", "-c", _PRELUDE, ",".join(map(str, [owner, *namespaces])), *command]


def run_to_end(command: Sequence[str], output: IO[bytes]) -> int:
    """Run a command that may have ranks of its own, with all it prints in `output`; returns its exit status. Ctrl-C and
    SystemExit (`end_on_signals`) reach it as SIGINT and SIGTERM, and are raised again once it has ended; a second
    Ctrl-C kills it. If this process is killed, so is the command."""
    process = subprocess.Popen(
        _owned(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait()
    except BaseException as error:
        process.send_signal(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
        with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            process.wait(_COMMAND_TO_KILL_S)
        raise
    finally:
        process.kill()  # nothing where it has been waited for
        process.wait()


@contextlib.contextmanager
def end_on_signals() -> Iterator[None]:
    """Within: SIGTERM and SIGHUP raise SystemExit(128 + signal), so that ranks and labs are ended. Main thread only."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
