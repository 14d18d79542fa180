"""`Netlab`: one network namespace a rank, shaped links between them, and what can happen to a network in mid-run."""

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradwire import _native, checks
from gradwire.errors import GradwireError, InvalidArgument, Unsupported, needs_extra
from gradwire_lab.ranks.netlab.rate import MAX_RATE_BPS, format_rate, parse_link, parse_rate
from gradwire_lab.ranks.netlab.stale import LAB_VARIABLE, lab_identity
from gradwire_lab.ranks.network import Network, find_free_port
from gradwire_lab.ranks.supervisor import LaunchResult, RankSet

_logger = logging.getLogger("gradwire_lab.ranks.netlab")

MAX_RANKS = 250  # the kernel passes at most 253 descriptors at once: the ranks', the switch's, the user namespace's
# Jumbo frames, as on most clusters: headers are 0.8 % of a full frame (4.6 % at 1,500), and the shared cores, which do
# for ranks, links and switch at once, handle a sixth of the packets.
MTU = 9000
DISTANT_MTU = 1500  # of lines with delay or loss: what packets between sites have
# Per direction. TCP with several senders into one link fills any queue: one that is short makes it wait out time-outs
# of 200 ms and more, one that is long only adds delay.
QUEUE_MS = 50.0
_SWITCH_VARIABLE, _SWITCH_PORT = "GRADWIRE_SWITCH", 4790
_ANSWER_S = 20.0  # construction takes 0.1 s, a request under 1 ms; a loaded machine may take a hundred times that


@dataclass(frozen=True)
class LinkCounters:
    """What one rank's link has carried, as the kernel counts: whole frames with headers; what is dropped is not in bytes."""

    sent_bytes: int
    sent_packets: int
    sent_drops: int
    received_bytes: int
    received_packets: int
    received_drops: int

    def __sub__(self, before: "LinkCounters") -> "LinkCounters":
        return LinkCounters(*(getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__))


class Netlab:
    """A lab of `ranks` namespaces, each with a link of its own to one switch; or of one namespace and link a node.

    Without the right to make namespaces it makes them in an unprivileged user namespace; where the kernel refuses that
    too, the lab falls back to unshaped loopback, logs why, has `shaped` False, and tells its ranks (GRADWIRE_NETWORK).

    Args:
        ranks: 1 to 250.
        rate: of every link, as `parse_link` takes it, or a sequence with one for each rank (node). Links with delay, jitter,
            loss, sites or another rate back are relayed in user space, about 1 Gb/s of them.
        mtu: of the links in bytes, 1280 to 65535; 9000, and 1500 of links with a distance, if not given.
        queue_ms: what each direction's queue holds at its rate, in milliseconds.
        require_shaping: raise Unsupported instead of falling back to loopback.
        switch: put one more host beside the ranks, whose link carries what all of theirs carry together, and start the
            emulation of an aggregating switch there (`gradwire switch`); ranks find it in GRADWIRE_SWITCH.
        ranks_per_node: so many ranks, which follow each other, share one link; inside a node nothing is shaped.
        on_loopback: make no namespaces, on whatever system: the ranks are this machine's processes.
    Raises: InvalidArgument; Unsupported (pyroute2 is missing; not Linux).
    Cost: 0.5 s, nearly all of it the start of one Python process.
    """

    def __init__(
        self,
        ranks: int,
        rate: str | float | Sequence[str | float | None] | None = "1gbit",
        *,
        mtu: int | None = None,
        queue_ms: float = QUEUE_MS,
        require_shaping: bool = False,
        switch: bool = False,
        ranks_per_node: int = 1,
        on_loopback: bool = False,
    ) -> None:
        checks.count("ranks", ranks, 1, MAX_RANKS)
        if ranks_per_node < 1 or ranks % ranks_per_node:
            raise InvalidArgument(f"{ranks} ranks do not make whole nodes of {ranks_per_node}")
        n_nodes = ranks // ranks_per_node
        self._n_ranks, self._ranks_per_node = ranks, ranks_per_node
        rates = [rate] * n_nodes if rate is None or isinstance(rate, str | int | float) else list(rate)
        if len(rates) != n_nodes:
            links = "ranks" if ranks_per_node == 1 else "nodes"
            raise InvalidArgument(f"{len(rates)} rates for {n_nodes} {links}; give one for all or one for each")
        lines = [parse_link(one, number, n_nodes) for number, one in enumerate(rates)]
        self._is_distant = any(line.is_distant for line in lines)
        if mtu is None:
            mtu = DISTANT_MTU if self._is_distant else MTU
        checks.count("mtu in bytes", mtu, 1280, 65535)
        if not 1 <= queue_ms <= 10_000:
            raise InvalidArgument(f"queue_ms is {queue_ms}; it must be from 1 to 10000 milliseconds")
        if self._is_distant and switch:
            raise InvalidArgument("an aggregating switch stands in one rack: leave delay, loss and sites out")
        self._rates_bps = [line.rate_bps for line in lines]
        self._settings: dict[str, Any] = {"mtu": mtu, "queue_ms": queue_ms}
        if self._is_distant:
            self._settings |= {"lines": [asdict(line) for line in lines], "native": _native.__file__}
        else:
            of_switch = [switch_rate_bps(self._rates_bps)] if switch else []
            self._settings["rates_bps"] = [*self._rates_bps, *of_switch]
        words = sorted({str(one).partition("/")[2] for one in rates} - {""})
        self._way = words[0] if len(words) == 1 else "several" if words else ""
        self._has_switch = switch
        self._switch: RankSet | None = None
        self._switch_address = ""
        self.switch_lines: list[str] = []  # what it says: where it listens, and at the end its counters
        self._require_shaping, self._on_loopback = require_shaping, on_loopback
        self._fabric: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._lock = threading.Lock()  # one request at a time: an experiment may change links from another thread
        self._namespaces: list[int] = []
        self._enter: list[list[int]] = []
        self._ranks: RankSet | None = None
        self._owner = os.getpid()
        self.shaped = False
        self.why_unshaped: str | None = "the lab is not open; use it in a with statement"

    def __enter__(self) -> "Netlab":
        try:
            if not self._on_loopback and self._channel is None:
                self._open()
            return self
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        if sys.platform != "linux":
            raise Unsupported("netlab is built on Linux network namespaces; use rate 'none' (loopback) on this system")
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            script = str(Path(__file__).with_name("fabric.py"))
            self._fabric = subprocess.Popen(
                [sys.executable, script, str(theirs.fileno()), str(os.getpid()), json.dumps(self._settings)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, LAB_VARIABLE: lab_identity()},
                start_new_session=True,  # Ctrl-C goes to the owner, which closes the lab in order
            )
        self._channel.settimeout(_ANSWER_S)
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._channel, 1 << 16, self._n_nodes + 3)
        except OSError as error:
            raise GradwireError(f"the lab's network process did not answer within {_ANSWER_S:.0f} s") from error
        answer = json.loads(packet or '{"unavailable": "the network process ended; its message is above"}')
        self._namespaces = descriptors
        if "missing" in answer:
            raise needs_extra(f"netlab needs pyroute2 ({answer['missing']})", "bench")
        if "unavailable" in answer:
            self.why_unshaped = answer["unavailable"]
            if self._require_shaping:
                raise Unsupported(f"no shaped network: {self.why_unshaped}")
            _logger.warning("no shaped network, ranks run on plain loopback and results say so: %s", self.why_unshaped)
            return
        user = [descriptors.pop()] if answer["user_namespace"] else []
        self._enter = [[*user, namespace] for namespace in descriptors[1:]]
        self._namespaces = [*descriptors, *user]
        self.shaped, self.why_unshaped = True, None

    def close(self) -> None:
        """End the ranks and take the network down; the second time does nothing."""
        if os.getpid() != self._owner:  # a forked child's copy of this object: the lab is its parent's
            return
        with contextlib.ExitStack() as last:
            last.callback(self._close_fabric)
            for processes in filter(None, (self._ranks, self._switch)):
                processes.end()
            self._ranks = self._switch = None

    def _close_fabric(self) -> None:
        if self.shaped:
            try:
                self._ask("close")
            except GradwireError as error:  # the namespaces go with their last process all the same
                _logger.warning("while closing the lab: %s", error)
        self.shaped, self.why_unshaped = False, "the lab is closed"
        while self._namespaces:
            os.close(self._namespaces.pop())
        if self._channel is not None:
            self._channel.close()
        if self._fabric is not None:
            try:
                self._fabric.wait(_ANSWER_S)
            except subprocess.TimeoutExpired:
                self._fabric.kill()
                self._fabric.wait()
        self._channel = self._fabric = None

    def _ask(self, operation: str, **arguments: Any) -> Any:
        if not self.shaped or self._channel is None:
            raise Unsupported(f"{operation} needs a shaped network: {self.why_unshaped}")
        try:
            with self._lock:
                self._channel.send(json.dumps({"operation": operation, **arguments}).encode())
                answer = json.loads(self._channel.recv(1 << 20) or '{"error": "it has ended"}')
        except OSError as error:
            raise GradwireError(f"the lab's network process does not answer to {operation}: {error}") from error
        if "error" in answer:
            raise GradwireError(f"the lab's network process could not {operation}: {answer['error']}")
        return answer["answer"]

    @property
    def _n_nodes(self) -> int:
        return len(self._rates_bps)

    def _check(self, number: int, n: int | None = None) -> None:
        """Raises: InvalidArgument (of so many ranks, or of the nodes, there is none of that number)."""
        what = "rank" if n is not None or self._ranks_per_node == 1 else "node"
        n = self._n_nodes if n is None else n
        if not 0 <= number < n:
            raise InvalidArgument(f"there is no {what} {number}; this lab has {what}s 0 to {n - 1}")

    @property
    def rates_bps(self) -> tuple[int | None, ...]:
        """Each rank's (node's) rate as it is set now; None is no limit."""
        return tuple(self._rates_bps)

    @property
    def network(self) -> Network:
        """What the ranks and their results are told."""
        kind, rates = ("netlab", self.rates_bps) if self.shaped else ("loopback", ())
        return Network(kind, rates, self._n_ranks, self._ranks_per_node, self._way if self.shaped else "")

    @property
    def namespace_paths(self) -> list[str]:
        """A path a rank (node) for `nsenter --net=PATH`, to look inside an open lab; empty without a shaped network."""
        return [f"/proc/{os.getpid()}/fd/{namespaces[-1]}" for namespaces in self._enter] if self.shaped else []

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        grace_s: float = 10.0,
        on_line: Callable[[int, str], None] | None = None,
    ) -> RankSet:
        """Start `command` once a rank, with torchrun's variables and `env`, which wins; one run at a time.

        Args: see `RankSet`. Raises: InvalidArgument (no command, or the lab's last run has not ended).
        """
        if not command:
            raise InvalidArgument("no command to run in the ranks; give one after --")
        if self._ranks is not None and self._ranks.running:
            raise InvalidArgument("the lab's last run has not ended: wait() for it before the next start")
        self._ranks = RankSet(grace_s, on_line)
        lab = {} if self._on_loopback else {LAB_VARIABLE: lab_identity()}
        # A namespace has all its ports to itself; on loopback one must be sought.
        address, port, interface = (
            ("10.77.0.1", 29500, "eth0") if self.shaped else ("127.0.0.1", find_free_port(), "lo")
        )
        if self.shaped and "TORCH_CPP_LOG_LEVEL" not in os.environ:
            lab["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # addresses without names make c10d warn once a rank and connection
        if self._has_switch:
            lab[_SWITCH_VARIABLE] = self._start_switch(lab)
        local = self._ranks_per_node if self._ranks_per_node > 1 else self._n_ranks
        of_all = {"WORLD_SIZE": self._n_ranks, "LOCAL_WORLD_SIZE": local, "MASTER_ADDR": address, "MASTER_PORT": port}
        lab |= {"GLOO_SOCKET_IFNAME": interface, **self.network.to_variables()}
        for rank in range(self._n_ranks):
            own = {"RANK": rank, "LOCAL_RANK": rank % local, "GROUP_RANK": rank // local}
            torchruns = {name: str(value) for name, value in {**of_all, **own}.items()}
            # As with torchrun, ranks on one machine share its cores.
            variables = {"OMP_NUM_THREADS": "1", **os.environ, **torchruns, **lab, **(env or {})}
            self._ranks.start(command, variables, self._enter[rank // self._ranks_per_node] if self.shaped else ())
        return self._ranks

    def _start_switch(self, variables: Mapping[str, str]) -> str:
        """The address of the lab's switch, started unless it is there. It may come after the ranks: they ask again."""
        if self._switch is None:
            number = self._n_nodes + 1  # the host after the last node's
            host, port = "127.0.0.1", _SWITCH_PORT if self.shaped else find_free_port()
            if self.shaped:
                host = f"10.77.{number >> 8}.{number & 255}"
            self._switch = RankSet(on_line=lambda _, line: self.switch_lines.append(line))
            self._switch_address = f"{host}:{port}"
            command = [sys.executable, "-m", "gradwire", "switch", "--address", host, "--port", str(port)]
            self._switch.start(command, {**os.environ, **variables}, self._enter[-1] if self.shaped else ())
        return self._switch_address

    def signal_switch(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the switch: it dies, or with SIGSTOP falls silent. Raises: InvalidArgument (there is none)."""
        if self._switch is None:
            raise InvalidArgument("no switch runs: open the lab with switch=True, and start the ranks first")
        self._switch.send_signal(0, number)

    def wait(self, timeout_s: float | None = None) -> LaunchResult:
        """Wait for the ranks that `start` started; see `RankSet.wait`."""
        return self._running().wait(timeout_s)

    def run(self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> LaunchResult:
        """`start` and `wait`; `options` are start's, and `timeout_s`."""
        timeout_s = options.pop("timeout_s", None)
        return self.start(command, env, **options).wait(timeout_s)

    def _running(self) -> RankSet:
        if self._ranks is None:
            raise InvalidArgument("no rank was started in this lab: call start(command) first")
        return self._ranks

    def set_rate(self, rank: int, rate: str | float | None) -> None:
        """Change one rank's (node's) link, both directions; packets in its queues stay. Raises: Unsupported (loopback)."""
        self._check(rank)
        rate_bps = parse_rate(rate)
        self._ask("set_rate", rank=rank, rate_bps=rate_bps)
        self._rates_bps[rank] = rate_bps
        _logger.info("rank %d's link is now at %s", rank, format_rate(rate_bps))

    def set_line(self, rank: int, **changes: str) -> None:
        """Change delay, jitter or loss of a rank's (node's) line. Raises: InvalidArgument, Unsupported (it has no distance)."""
        self._check(rank)
        if self.shaped and not self._is_distant:
            raise Unsupported("this lab's links have no distance: open it with one, such as 100mbit/delay=1ms")
        link = parse_link("/".join(["none", *(f"{name}={text}" for name, text in changes.items())]))
        given = {name: value for name, value in asdict(link).items() if name.removesuffix("_s") in changes}
        self._ask("set_line", rank=rank, **given)

    def link_down(self, rank: int) -> None:
        """Pull the rank's (node's) cable: it keeps its address and loses its carrier. Raises: Unsupported (loopback)."""
        self._check(rank)
        self._ask("set_link", rank=rank, up=False)

    def link_up(self, rank: int) -> None:
        """Put the cable back; TCP connections that have not given up go on. Raises: Unsupported (loopback)."""
        self._check(rank)
        self._ask("set_link", rank=rank, up=True)

    def counters(self) -> list[LinkCounters]:
        """Each rank's (node's) counters since the lab was opened. Raises: Unsupported (loopback carries all ranks)."""
        return [LinkCounters(*row) for row in self._ask("counters")][: self._n_nodes]

    def switch_counters(self) -> LinkCounters:
        """The link counters of the aggregating switch. Raises: Unsupported (loopback), InvalidArgument (there is none)."""
        if not self._has_switch:
            raise InvalidArgument("this lab has no switch: open it with switch=True")
        return LinkCounters(*self._ask("counters")[self._n_nodes])

    def kill_rank(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to all processes of a rank."""
        self._check(rank, self._n_ranks)
        self._running().send_signal(rank, number)

    def stop_rank(self, rank: int) -> None:
        """Freeze a rank (SIGSTOP); its connections stay open and go silent."""
        self.kill_rank(rank, signal.SIGSTOP)

    def continue_rank(self, rank: int) -> None:
        """Let a stopped rank go on."""
        self.kill_rank(rank, signal.SIGCONT)


def switch_rate_bps(rates_bps: Sequence[int | None]) -> int | None:
    """The rate of the switch's link: what all ranks' links carry together, so that it is never the narrowest."""
    total = sum(MAX_RATE_BPS + 1 if rate is None else rate for rate in rates_bps)
    return total if total <= MAX_RATE_BPS else None


# ---- what happens at set times after the start of the ranks: `SECONDS:EVENT`, for the command line

_CHANGES = ("rate", "delay", "jitter", "loss")  # to a value
_ACTIONS = {"down": "link_down", "up": "link_up", "kill": "kill_rank", "stop": "stop_rank", "continue": "continue_rank"}
_FORM = "write SECONDS:ACTION:RANK, such as 10:rate:2=100mbit, 10:delay:2=40ms, 10:down:2, and up, kill, stop, continue"


@dataclass(frozen=True, order=True)
class Event:
    """`action` on `rank`, `at_s` seconds after the ranks were started."""

    at_s: float
    action: str
    rank: int
    rate: str | None = None

    def apply(self, lab: Netlab) -> None:
        if self.rate is None:
            getattr(lab, _ACTIONS[self.action])(self.rank)
        elif self.action == "rate":
            lab.set_rate(self.rank, self.rate)
        else:
            lab.set_line(self.rank, **{self.action: self.rate})

    def __str__(self) -> str:
        return f"{self.at_s:g} s: {self.action} rank {self.rank}" + ("" if self.rate is None else f" {self.rate}")


def parse_event(text: str, n_ranks: int) -> Event:
    """Read "10:rate:2=100mbit" or "10:down:2". Raises: InvalidArgument."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?):([a-z]+):(\d+)(?:=(.+))?", text)
    if match is None or match[2] not in (_ACTIONS if match[4] is None else _CHANGES):
        raise InvalidArgument(f"{text!r} is no event: {_FORM}")
    if int(match[3]) >= n_ranks:
        raise InvalidArgument(f"event {text!r}: there is no rank {match[3]}; there are ranks 0 to {n_ranks - 1}")
    if match[4] is not None:
        parse_link(match[4] if match[2] == "rate" else f"none/{match[2]}={match[4]}")
    return Event(float(match[1]), match[2], int(match[3]), match[4])


@contextlib.contextmanager
def scheduled(lab: Netlab, events: Iterable[Event]) -> Iterator[list[str]]:
    """Within, `events` are applied to the lab at their times; gives the list of those that went wrong, and why."""
    over, troubles, start = threading.Event(), list[str](), time.monotonic()

    def apply() -> None:
        for event in sorted(events, key=lambda event: event.at_s):
            if over.wait(max(0.0, start + event.at_s - time.monotonic())):
                return
            try:
                event.apply(lab)
            except GradwireError as error:
                troubles.append(f"{event}: {error}")

    thread = threading.Thread(target=apply, name="gradwire-netlab-schedule", daemon=True)
    thread.start()
    try:
        yield troubles
    finally:
        over.set()
        thread.join()
