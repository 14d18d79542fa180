"""`gradwire netlab check`: measure what Gloo's all_reduce gets through links, how long they are, and what they lose.

As a program, in each rank: SECONDS REPEATS RATE_BPS.
"""

import contextlib
import datetime
import json
import math
import socket
import statistics
import sys
import time
from dataclasses import asdict, dataclass

from gradwire.errors import InvalidArgument
from gradwire_lab.ranks.launch import start_ranks
from gradwire_lab.ranks.netlab.rate import LabLink, parse_link

_N_DATAGRAMS, _PORT = 2000, 29_700


@dataclass(frozen=True)
class RateCheck:
    """One rate, set and measured. Rates in bits per second."""

    ranks: int
    set_bps: int
    payload_bps: float  # median of what all_reduce sent and received per rank: tensor bytes, without any header
    lowest_bps: float
    highest_bps: float
    wire_overhead: float  # frames on rank 0's link, both directions, against the payload: headers and acknowledgements
    drops: int  # frames, over all links
    round_trip_s: float  # median of small datagrams from rank 0 to rank 1 and back
    loss: float  # one way, from the share of those that came back

    @property
    def deviation(self) -> float:
        """Measured against set: -0.02 is 2 % too slow."""
        return self.payload_bps / self.set_bps - 1

    def has_way_of(self, link: LabLink, tolerance: float) -> bool:
        """Whether round trip and loss are the link's: to so many parts, or to 1 ms, and to what chance leaves."""
        chance = 4 * math.sqrt((link.loss + 1 / _N_DATAGRAMS) / _N_DATAGRAMS)
        meant_s = 2 * (link.delay_s + link.site_delay_s * (self.ranks == 2))
        slack_s = tolerance * meant_s + 2 * link.jitter_s
        is_as_far = meant_s - slack_s <= self.round_trip_s <= meant_s + slack_s + 1e-3
        return is_as_far and abs(self.loss - link.loss) <= chance

    def to_record(self) -> dict[str, float]:
        return {**asdict(self), "deviation": self.deviation}


def measure_rate(ranks: int, rate: str | float, seconds: float = 1.0, repeats: int = 5) -> RateCheck:
    """Time `repeats` all-reduces that should take `seconds` each at `rate`. Raises: InvalidArgument, Unsupported, PeerLost."""
    set_bps = parse_link(rate, 0, ranks).rate_bps
    if set_bps is None:
        raise InvalidArgument("a link without a limit has no rate to check: give 100mbit, 1gbit, ...")
    if ranks < 2:
        raise InvalidArgument(f"ranks is {ranks}; an all-reduce needs two or more")
    lines: list[str] = []
    probe = [sys.executable, "-m", __name__, str(seconds), str(repeats), str(set_bps)]
    with start_ranks(probe, ranks, rate, require_shaping=True, on_line=lambda rank, line: lines.append(line)) as launch:
        launch.wait(60 + 10 * seconds * (repeats + 1)).raise_if_failed()
        counters = launch.counters()
    found = json.loads(lines[-1])
    rates, way = found["rates_bps"], (found["round_trip_s"], found["loss"])
    # The probe's warm-up sends a quarter of the tensor; every rank sends and receives 2 (N - 1) / N of each.
    payload = 2 * 2 * (ranks - 1) / ranks * found["payload_bytes"] * (repeats + 0.25)
    overhead = (counters[0].sent_bytes + counters[0].received_bytes) / payload - 1
    drops = sum(link.sent_drops + link.received_drops for link in counters)
    return RateCheck(ranks, set_bps, statistics.median(rates), min(rates), max(rates), overhead, drops, *way)


def probe(seconds: float, repeats: int, rate_bps: int) -> None:
    """In a rank: time all-reduces of a tensor that should take `seconds` at the rate; rank 0 prints one JSON line."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60 + 20 * seconds))
    world_size = dist.get_world_size()
    crossing = 2 * (world_size - 1) / world_size  # of the tensor, sent and received by each rank of a ring
    n_elements = max(1 << 16, int(rate_bps / 8 * seconds / crossing / 4))
    round_trip_s, loss = _echoes(dist.get_rank())
    dist.barrier()
    tensor = torch.ones(n_elements)
    dist.all_reduce(tensor[: max(1 << 16, n_elements // 4)])  # connections, windows, memory
    rates = []
    for _ in range(repeats):
        tensor.fill_(1)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        rates.append(4 * n_elements * crossing * 8 / (time.perf_counter() - start))
        assert tensor[0] == tensor[-1] == world_size
    found = {"payload_bytes": 4 * n_elements, "rates_bps": rates, "round_trip_s": round_trip_s, "loss": loss}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def _echoes(rank: int) -> tuple[float, float]:
    """The median time of a datagram from rank 0 to rank 1 and back, and the loss of one way; of other ranks, nothing."""
    if rank > 1:
        return 0.0, 0.0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind(("", _PORT + rank))
        if rank == 1:
            own.settimeout(5.0)
            with contextlib.suppress(TimeoutError):
                while True:
                    packet, sender = own.recvfrom(64)
                    own.sendto(packet, sender)
                    own.settimeout(2.0)
            return 0.0, 0.0
        sent: dict[int, float] = {}
        took: dict[int, float] = {}
        time.sleep(0.2)  # rank 1 has bound its socket
        own.settimeout(0.001)
        for number in range(_N_DATAGRAMS):
            sent[number] = time.perf_counter()
            own.sendto(number.to_bytes(4, "little"), ("10.77.0.2", _PORT + 1))
            with contextlib.suppress(TimeoutError):
                _take(own, sent, took)
        own.settimeout(1.0)
        with contextlib.suppress(TimeoutError):
            while True:
                _take(own, sent, took)
    return statistics.median(took.values() or [math.inf]), 1 - math.sqrt(len(took) / _N_DATAGRAMS)


def _take(own: socket.socket, sent: dict[int, float], took: dict[int, float]) -> None:
    number = int.from_bytes(own.recv(64), "little")
    took[number] = time.perf_counter() - sent[number]


if __name__ == "__main__":
    probe(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
