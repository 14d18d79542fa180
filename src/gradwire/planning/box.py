"""One machine with several GPUs: what links them, and what a step would take with fewer bits between them.

Where all are joined by NVLink there is nothing to win. By PCIe, through host memory (NCCL's SHM) or between two sockets, the
bus decides: N ranks send 2 (N-1)/N of a gradient's bytes each, at what NCCL's tests call the bus bandwidth.
"""

import itertools
import math
import re
import shutil
import subprocess
from dataclasses import dataclass

from gradwire.core.optimizers import FAMILIES
from gradwire.errors import InvalidArgument
from gradwire.planning.plan import Plan
from gradwire.schemes.auto.costs import CodecCost, CostProfile, LinkCost, SharedCores, last_rate
from gradwire.schemes.auto.fidelity import TABLE, FidelityRow, row_of
from gradwire.schemes.auto.law import PLAIN

# As `nvidia-smi topo -m` names what joins two GPUs, the nearest first.
_LINKS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge",
    "NODE": "several host bridges of one socket",
    "SYS": "two sockets",
}
# GB/s of a lane, one way, after line coding, by PCIe generation.
_LANE_GB = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.97, 5: 3.94, 6: 7.56}

# Of GPUs that nobody has measured: a kernel moves memory at half of an A40's 700 GB/s and follows the last one after 5 us, and
# a hop of a collective takes 10 us.
_MEMORY_RATE, _LAUNCH_S, _HOP_S = 350e9, 5e-6, 10e-6
_LAUNCHES_PER_MESSAGE = 2
_SLOWEST, _FASTEST = 1e6, 1e12  # bytes/s
_BUCKET_VALUES, _MOST_BUCKETS = 25 * (1 << 20) // 4, 64
_KNOWN = ("bf16", "embedded-float")


@dataclass(frozen=True)
class GpuLinks:
    """What joins the GPUs of a machine."""

    # Of each pair (one, other): "NV4" (NVLink, by its number of lanes), or PIX, PXB, PHB, NODE, SYS.
    links: dict[tuple[int, int], str]
    pcie: tuple[tuple[int, int], ...] = ()  # (generation, lanes) of each GPU's slot; empty where it is not known

    @classmethod
    def from_text(cls, matrix: str, pcie: str = "") -> "GpuLinks":
        """Read `nvidia-smi topo -m`, and of each GPU a line "GENERATION, LANES". Raises: InvalidArgument (no such matrix)."""
        plain = re.sub(r"\x1b\[[0-9;]*m", "", matrix)
        rows = [line.split() for line in plain.splitlines() if re.match(r"\s*GPU\d+\s", line)]
        rows = [row for row in rows if not row[1].startswith("GPU")]  # the head of the table
        if not rows:
            raise InvalidArgument("this is not what `nvidia-smi topo -m` prints: it has no line of a GPU")
        links = {}
        for one, other in itertools.combinations(range(len(rows)), 2):
            link = links[one, other] = rows[one][1 + other] if len(rows[one]) > 1 + other else ""
            if link not in _LINKS and not re.fullmatch(r"NV\d+", link):
                pair = f"{rows[one][0]} and {rows[other][0]}"
                raise InvalidArgument(f"this is not what `nvidia-smi topo -m` prints: {pair} are joined by {link!r}")
        found = re.findall(r"^\s*(\d+)\s*,\s*(\d+)\s*$", pcie, re.MULTILINE)
        return cls(links, tuple((int(generation), int(lanes)) for generation, lanes in found))

    @property
    def has_nvlink(self) -> bool:
        """True if NVLink joins every pair."""
        return bool(self.links) and all(link.startswith("NV") for link in self.links.values())

    @property
    def farthest(self) -> str:
        """The link of the pair that is farthest apart, which a ring over all GPUs has to take."""
        names = [link for link in self.links.values() if link in _LINKS]
        return max(names, key=list(_LINKS).index, default="")

    @property
    def pcie_rate(self) -> float:
        """Bytes/s each way of the slowest slot, which no bus bandwidth exceeds where there is no NVLink; inf if not known."""
        rates = (1e9 * _LANE_GB.get(generation, math.inf) * lanes for generation, lanes in self.pcie)
        return min(rates, default=math.inf)

    def sentence(self) -> str:
        """What there is, in words."""
        if self.has_nvlink:
            return "NVLink joins all GPUs: leave gradwire out."
        farthest = _LINKS.get(self.farthest, "nothing known")
        joined = f"No NVLink between all GPUs; the farthest pair is joined by {farthest}"
        if not math.isinf(self.pcie_rate):
            joined += f", at {self.pcie_rate / 1e9:.3g} GB/s at most (PCIe)"
        return joined + "."


def read_topology() -> GpuLinks | None:
    """This machine's, as nvidia-smi says; None where it says nothing."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = ["--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader,nounits"]
    try:
        matrix, pcie = (
            subprocess.run([command, *arguments], capture_output=True, text=True, timeout=60, check=True).stdout
            for arguments in (["topo", "-m"], query)
        )
        return GpuLinks.from_text(matrix, pcie)
    except (OSError, subprocess.SubprocessError, InvalidArgument):
        return None


# ---- without a GPU to measure


def plan_box(
    ranks: int,
    parameters: float,
    compute_s: float,
    plain_s: float | None = None,
    bus_rate: float | None = None,
    gradient_bits: int = 32,
) -> Plan:
    """A plan by arithmetic, of a machine that was not measured here.

    Args:
        ranks: GPUs. parameters: values of a gradient.
        compute_s: seconds a step on one GPU.
        plain_s: seconds a step under DDP on all; the bus bandwidth follows. bus_rate: that, in bytes/s, and the step follows.
        gradient_bits: of what DDP sends: 32, or 16.
    Raises: InvalidArgument (neither or both, a step that is shorter than what it computes, fewer than two ranks).
    """
    if (plain_s is None) == (bus_rate is None):
        raise InvalidArgument(
            "a box is described by plain_s, a step under DDP on all GPUs, or by bus_rate: one of the two"
        )
    if int(ranks) < 2 or not parameters >= 1 or not compute_s > 0 or gradient_bits not in (16, 32):
        raise InvalidArgument(
            "a box has ranks from 2, parameters from 1, compute_s above 0, and gradient_bits 16 or 32"
        )
    rows = _rows(gradient_bits)
    profile = CostProfile(
        SharedCores(int(ranks), 1, 1, True),
        LinkCost(bus_rate or 1.0, _HOP_S, _HOP_S, _LAUNCHES_PER_MESSAGE * _LAUNCH_S, _HOP_S * int(ranks)),
        {row.spec: _cost_of(row, gradient_bits) for row in rows},
        {row.spec: row.shape for row in rows},
        _buckets(int(parameters)),
    )
    if plain_s is not None:
        profile = profile.at_rate(_bus_rate(profile, compute_s, plain_s))
    plan = Plan(profile, compute_s, plain_s or 0.0, {}, "close", False, is_here=False)
    return plan.elsewhere() if plain_s is None else plan


def _rows(gradient_bits: int) -> list[FidelityRow]:
    """Plain, and what works between devices, in fewer bits than DDP sends."""
    plainly = [row for row in TABLE[1:] if row.holds_under(FAMILIES) and not row.by_name_only]
    # Of these a cast, or a pass over the values, says what their kernels cost.
    known = [row for row in plainly if row.name in _KNOWN and row.bits < gradient_bits]
    return [TABLE[0], *(row.on_device() for row in known)]


def _buckets(n_values: int) -> tuple[int, ...]:
    """Of 25 MB, as DDP's are, or as many as say the same."""
    size = max(_BUCKET_VALUES, -(-n_values // _MOST_BUCKETS))
    full, rest = divmod(n_values, size)
    return (*(size for _ in range(full)), *([rest] if rest else []))


def _cost_of(row: FidelityRow, gradient_bits: int) -> CodecCost:
    """By memory traffic: a gradient read and a message written, a message read and a gradient read and written."""
    if row.spec == PLAIN:
        return CodecCost(bits=gradient_bits)
    values, message = gradient_bits / 8, row.bits / 8
    return CodecCost((values + message) / _MEMORY_RATE, (2 * values + message) / _MEMORY_RATE, row.bits)


def _bus_rate(profile: CostProfile, compute_s: float, plain_s: float) -> float:
    """Bytes/s at which a plain step takes `plain_s`. Raises: InvalidArgument (at none)."""

    def takes_s(rate: float) -> float:
        return profile.at_rate(rate).predict_s(compute_s)[PLAIN]

    low, high = _SLOWEST, _FASTEST
    if not takes_s(high) < plain_s < takes_s(low):
        raise InvalidArgument(
            f"a step that computes {compute_s:g} s takes longer on all GPUs than on one; plain_s={plain_s:g} says nothing of "
            "the bus"
        )
    return last_rate(lambda rate: takes_s(rate) > plain_s, low, high, 1.0001)


# ---- in words


def describe(spec: str) -> str:
    """A scheme in a word or two: "bf16", "8 bits"."""
    row = row_of(spec)
    return f"{row.bits:.0f} bits" if row.name in ("embedded-float", "truncated-float") else row.name


def advise(plan: Plan, topology: GpuLinks | None = None) -> str:
    """What to do in this box, in two sentences."""
    if topology is not None and topology.has_nvlink:
        return topology.sentence()
    plain = plan.plain
    # The most faithful of what is within 3 % of the fastest that is close to DDP's losses.
    close = [f for f in plan.forecasts() if f.level in ("exact", "close") and not f.by_name_only and f.spec != PLAIN]
    fastest_s = min((f.step_s for f in close), default=math.inf)
    joined = "" if topology is None else topology.sentence() + " "
    bus = f"The bus carries {plan.profile.link.rate / 1e9:.3g} GB/s"
    if fastest_s * 1.03 >= plain.step_s:
        return f"{joined}{bus}, and a step takes {plain.step_s:.3g} s: leave gradwire out, nothing wins 3 %."
    best = max((f for f in close if f.step_s <= 1.03 * fastest_s), key=lambda f: row_of(f.spec).bits)
    how = "measured" if best.is_measured else "predicted"
    return (
        f'{joined}{bus}: take {describe(best.spec)}, gradwire.attach(ddp, optimizer, "{row_of(best.spec).scheme}", '
        f'placement="device"): {best.step_s:.3g} s a step ({how}) instead of {plain.step_s:.3g}.'
    )
