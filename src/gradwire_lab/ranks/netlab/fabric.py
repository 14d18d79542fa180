"""The lab's own process: makes the namespaces, links and token buckets, changes them on request, ends with its owner.

Run as a script by `Netlab`, never imported by it. A user namespace can only be entered by a process of one thread, and one
that has loaded torch has many. Namespaces are held by descriptors alone: when this process, its owner and the ranks are gone,
the kernel takes them down. And this process outlives an owner that is killed, until it has killed the ranks left behind.

It speaks over a sequenced-packet socket, a JSON object a packet; the answer to the construction carries the descriptors.
"""

import contextlib
import ctypes
import fcntl
import importlib.util
import json
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
TBF_HANDLE = 0x10000  # 1:0
UNSHAPED_BPS = 34_000_000_000  # "none": the most that tbf holds in 32 bits of B/s; one qdisc, so counters go on

_libc = ctypes.CDLL(None, use_errno=True)


class UnavailableError(Exception):
    """This machine or user cannot have a lab; the owner falls back or tells the user."""


def unshare(flags: int) -> None:
    if _libc.unshare(flags) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def become_able() -> int | None:
    """Get the right to make network namespaces, by a user namespace if need be: its descriptor. Raises: UnavailableError."""
    try:
        unshare(CLONE_NEWNET)
        return None
    except OSError:  # not root, or root in a container without CAP_SYS_ADMIN
        pass
    user_id, group_id = os.geteuid(), os.getegid()
    try:
        unshare(CLONE_NEWUSER)
        # The same ids inside as outside: a rank sees itself as the user who started it, and loses the namespace's
        # capabilities when it executes its command.
        maps = {"setgroups": "deny", "uid_map": f"{user_id} {user_id} 1", "gid_map": f"{group_id} {group_id} 1"}
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        unshare(CLONE_NEWNET)
    except OSError as error:
        raise UnavailableError(
            "no right to make network namespaces, and the kernel refuses a user namespace to make them in "
            f"({error.strerror}); run as root, or allow user namespaces (sysctl user.max_user_namespaces, "
            "kernel.apparmor_restrict_unprivileged_userns)"
        ) from error
    return os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC)


def set_sysctl(path: str, value: str) -> None:
    """Set one of this network namespace's options, where /proc/sys is writable and the kernel has it."""
    with contextlib.suppress(OSError), open(f"/proc/sys/net/{path}", "w") as file:
        file.write(value)


def enter_host() -> int:
    """Move this process into a new network namespace for a rank; returns its descriptor."""
    unshare(CLONE_NEWNET)
    # IPv6 only adds chatter to the counters; and Gloo takes an interface's first address, which must be ours.
    set_sysctl("ipv6/conf/all/disable_ipv6", "1")
    set_sysctl("ipv4/tcp_no_metrics_save", "1")  # a connection's luck must not set the next one's window
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def bring_up(route: Any, rank: int, **options: int) -> None:
    """Give the rank's `eth0` its address, and let it and loopback work."""
    from pyroute2 import NetlinkError

    card = route.link_lookup(ifname="eth0")[0]
    route.link("set", index=route.link_lookup(ifname="lo")[0], state="up")
    route.addr("add", index=card, address=f"10.77.{(rank + 1) >> 8}.{(rank + 1) & 255}", prefixlen=16)
    route.link("set", index=card, state="up", **options)
    # Connections begin as Linux has them by itself, whatever this host was set to.
    with contextlib.suppress(NetlinkError):  # a kernel without it
        route.route("change", dst="10.77.0.0/16", oif=card, scope="link", metrics={"cc_algo": "cubic"})


def bucket_parameters(rate_bps: int | None, queue_ms: float) -> dict[str, int]:
    """tbf's rate (B/s), burst and limit (B) for one direction of a link; measured with `gradwire netlab check`."""
    byte_rate = (rate_bps or UNSHAPED_BPS) // 8
    # Tokens that a full bucket turns away are lost, and a ring waits in turns: Gloo's all-reduce over 4 ranks reached
    # 0.94 of 100 Mb/s with 18 KB, 0.95 with 36, 0.99 with 72; and at 2 Gb/s 0.96 with 72 KB, 0.97 from 250 on. No rate
    # gets less than 72 KB, the largest segment that TCP hands over (64 KiB and its frames' headers): tbf splits what is
    # larger than the burst when it comes, but holds for ever what is queued already when the burst shrinks. The price:
    # after a pause so much passes unshaped.
    burst = max(byte_rate // 500, 72_000)
    # A queue shorter than two of TCP's largest segments drops them even when nothing is congested.
    limit = burst + max(int(byte_rate * queue_ms / 1000), 150_000)
    return {"rate": byte_rate, "burst": burst, "limit": min(limit, 2**31 - 1)}


class Fabric:
    """A switch namespace with a bridge, and a namespace a rank with `eth0` at 10.77.0.(rank + 1)/16 behind it.

    An aggregating switch, where there is one, is one more host like the ranks, after the last of them.
    """

    def __init__(self, rates_bps: list[int | None], mtu: int, queue_ms: float) -> None:
        from pyroute2 import IPRoute

        self._queue_ms = queue_ms
        self.user_namespace = become_able()
        self.namespaces = [os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)]  # the switch's, then one a rank
        self._switch = IPRoute()
        self._switch.link("add", ifname="br0", kind="bridge")
        bridge = self._switch.link_lookup(ifname="br0")[0]
        set_sysctl("ipv6/conf/all/disable_ipv6", "1")
        self._switch.link("set", index=bridge, state="up")
        self._links: list[tuple[Any, int, int]] = []  # (the rank's routes, its side of the link, the switch's side)
        for rank, rate_bps in enumerate(rates_bps):
            namespace, route = enter_host(), IPRoute()
            name = f"rank{rank}"
            peer = {"ifname": "eth0", "net_ns_fd": namespace, "mtu": mtu}
            self._switch.link("add", ifname=name, kind="veth", mtu=mtu, peer=peer)
            port = self._switch.link_lookup(ifname=name)[0]
            self._links.append((route, route.link_lookup(ifname="eth0")[0], port))
            self._shape(rank, rate_bps, "add")
            self._switch.link("set", index=port, master=bridge, state="up")
            bring_up(route, rank)
            self.namespaces.append(namespace)

    def _shape(self, rank: int, rate_bps: int | None, command: str) -> None:
        route, card, port = self._links[rank]
        for side, index in ((self._switch, port), (route, card)):
            side.tc(command, "tbf", index, TBF_HANDLE, **bucket_parameters(rate_bps, self._queue_ms))

    def set_rate(self, rank: int, rate_bps: int | None) -> None:
        """Change both directions in place: queued packets and counters stay."""
        self._shape(rank, rate_bps, "change")

    def set_link(self, rank: int, up: bool) -> None:
        """Take the switch's side down or up: the rank keeps its address and loses its carrier, like a pulled cable."""
        self._switch.link("set", index=self._links[rank][2], state="up" if up else "down")

    def counters(self) -> list[list[int]]:
        """Per rank: sent bytes, packets, drops; received bytes, packets, drops; as the token buckets counted."""

        def read(route: Any) -> dict[int, list[int]]:
            found = {}
            for message in route.get_qdiscs():
                attributes = message.get_attr("TCA_STATS2")
                basic, queue = attributes.get_attr("TCA_STATS_BASIC"), attributes.get_attr("TCA_STATS_QUEUE")
                found[message["index"]] = [basic["bytes"], basic["packets"], queue["drops"]]
            return found

        down = read(self._switch)
        return [[*read(route)[card], *down[port]] for route, card, port in self._links]

    def close(self) -> None:
        """Nothing: links go with their namespaces."""


# Fields of native/netlab/relay.hpp's Line, eight bytes each, as `LabLink` calls them.
_LINE = ("rate_bps", "down_bps", "loss", "down_loss", "delay_s", "jitter_s", "site", "site_delay_s", "queue_s", "is_up")
_N_COUNTERS, _LINE_BYTES = 6, 128
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000


class DistantFabric:
    """As `Fabric`, of long lines (fields of `_LINE`): `eth0` is a TUN device, and a child relays packets (native/netlab)."""

    def __init__(self, lines: list[dict[str, float | None]], mtu: int, queue_ms: float, native: str) -> None:
        from pyroute2 import IPRoute

        self._queue_s = queue_ms / 1000
        self.user_namespace = become_able()
        self.namespaces = [os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)]
        self._table = mmap.mmap(-1, _LINE_BYTES * len(lines))
        devices = []
        for rank, line in enumerate(lines):
            self.namespaces.append(enter_host())
            try:
                device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TUN | _IFF_NO_PI))
            except OSError as error:
                raise UnavailableError(
                    f"lines with delay or loss need TUN devices, which this machine refuses: {error}"
                ) from error
            devices.append(device)
            with IPRoute() as route:
                bring_up(route, rank, mtu=mtu, txqlen=10_000)
            self.set_line(rank, is_up=1.0, **line)
        ends, self._stop = os.pipe()
        self._relay = os.fork()
        if self._relay == 0:
            os.close(self._stop)
            _relay(native, devices, self._table, ends)
        os.close(ends)
        for device in devices:
            os.close(device)

    def set_line(self, rank: int, **fields: float | None) -> None:
        """Change what is given of a line; packets on their way stay. A rate of None is no limit."""
        for name, value in fields.items():
            struct.pack_into("d", self._table, _LINE_BYTES * rank + 8 * _LINE.index(name), value or 0.0)
        rates_bps = struct.unpack_from("2d", self._table, _LINE_BYTES * rank)
        slowest = min(filter(None, rates_bps), default=0.0)
        # A queue that does not hold two of TCP's largest segments drops them even when nothing is congested.
        queue_s = max(self._queue_s, 8 * 150_000 / slowest if slowest else 0)
        struct.pack_into("d", self._table, _LINE_BYTES * rank + 8 * _LINE.index("queue_s"), queue_s)

    def set_rate(self, rank: int, rate_bps: int | None) -> None:
        self.set_line(rank, rate_bps=rate_bps, down_bps=rate_bps)

    def set_link(self, rank: int, up: bool) -> None:
        """Let nothing pass, or all again: a line that is cut somewhere, which the rank's card does not see."""
        self.set_line(rank, is_up=float(up))

    def counters(self) -> list[list[int]]:
        """Per rank: sent bytes, packets, drops; received bytes, packets, drops; as the relay counted."""
        ranks = range(len(self._table) // _LINE_BYTES)
        return [
            list(struct.unpack_from(f"{_N_COUNTERS}q", self._table, _LINE_BYTES * r + 8 * len(_LINE))) for r in ranks
        ]

    def close(self) -> None:
        os.close(self._stop)
        os.waitpid(self._relay, 0)


def _relay(native: str, devices: list[int], table: mmap.mmap, stop: int) -> None:
    """In the child, until the parent is gone. Does not return."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        import numpy as np

        spec = importlib.util.spec_from_file_location("_native", native)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.relay_packets(devices, np.frombuffer(table, np.uint8), stop)
    except BaseException as error:
        print(f"gradwire: the relay of the test network ended: {error}", file=sys.stderr, flush=True)
    os._exit(0)


def kill_inside(descriptors: Sequence[int]) -> None:
    """Kill every process in the lab's namespaces, however far from the ranks it was started."""
    inodes = {os.fstat(namespace).st_ino for namespace in descriptors}
    give_up = time.monotonic() + 3
    while time.monotonic() < give_up:
        others = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}
        is_alone = True
        for pid in others:
            with contextlib.suppress(OSError):  # gone, a zombie, or another user's: not of this lab
                if os.stat(f"/proc/{pid}/ns/net").st_ino in inodes:
                    is_alone = False
                    os.kill(pid, signal.SIGKILL)
        if is_alone:
            return
        time.sleep(0.01)


def serve(fabric: Fabric | DistantFabric, channel: socket.socket, owner: int) -> None:
    """Answer requests until the owner says so, closes its end, or dies."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    # A child that the owner forked may hold its end of the socket open: its death is watched by itself as well.
    with contextlib.suppress(OSError):
        poll.register(os.pidfd_open(owner), select.POLLIN)
    while True:
        ready = dict(poll.poll())
        packet = channel.recv(1 << 16) if channel.fileno() in ready else b""
        request = json.loads(packet or '{"operation": "close"}')
        operation = request.pop("operation")
        if operation == "close":
            return
        try:
            answer = {"answer": getattr(fabric, operation)(**request)}
        except Exception as error:  # the owner decides what a refusal means
            answer = {"error": f"{type(error).__name__}: {error}"}
        channel.send(json.dumps(answer).encode())


def main() -> None:
    """`fabric.py CHANNEL_DESCRIPTOR OWNER_PID JSON`, with JSON: rates_bps or lines and native; mtu, queue_ms."""
    channel, settings = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[3])
    try:
        fabric = DistantFabric(**settings) if "lines" in settings else Fabric(**settings)
    except Exception as error:
        kind, reason = "missing" if isinstance(error, ImportError) else "unavailable", str(error)
        if not isinstance(error, ImportError | UnavailableError):
            # pyroute2's NetlinkError above all: the kernel has no veth, bridge or tbf.
            reason = f"the kernel refused a link, bridge or token bucket ({error}); it needs veth, bridge and sch_tbf"
        channel.send(json.dumps({kind: reason}).encode())
        return
    user = [] if fabric.user_namespace is None else [fabric.user_namespace]
    socket.send_fds(channel, [json.dumps({"user_namespace": bool(user)}).encode()], [*fabric.namespaces, *user])
    try:
        serve(fabric, channel, int(sys.argv[2]))
    finally:
        fabric.close()
        kill_inside(fabric.namespaces)
        with contextlib.suppress(OSError):  # the owner may be gone
            channel.send(b'{"answer": null}')


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules must not stand before installed ones of the same name
    main()
