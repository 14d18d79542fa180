"""Bytes that the kernel has sent on this rank's interface: the check on what gradwire counts itself."""

from __future__ import annotations

import os
from pathlib import Path

_NET_DEV = Path("/proc/net/dev")


def sent_bytes() -> int | None:
    """Bytes that this rank's interface (GLOO_SOCKET_IFNAME) has sent since it came up, headers included.

    None where the kernel cannot tell: no such variable, not Linux, or loopback, which carries every rank's traffic. In
    a lab each rank has a network namespace, hence an interface and a /proc/net/dev, of its own.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interface in ("", "lo"):
        return None
    try:
        for line in _NET_DEV.read_text(encoding="ascii").splitlines():
            name, _, columns = line.partition(":")
            if name.strip() == interface:
                return int(columns.split()[8])  # 8 columns received, then bytes sent
    except OSError:
        pass
    return None
