"""What the cost model is fed with: this machine, this link, these codecs, agreed on by all ranks; and what it then says."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire import codecs
from gradwire.control.cost_model import CodecCost, LinkCost, SharedCores, StepCost, predict_s
from gradwire.errors import GradwireError
from gradwire.registry import parse_spec
from gradwire.schemes.auto.fidelity import FidelityRow
from gradwire.wire.communicator import Communicator, ring_bytes
from gradwire.wire.link_probe import PROBE_ELEMENTS, probe_link, processor_s

# Measured on 2 cores of an AMD EPYC: a message of frames costs a quarter of a millisecond of processor time, both ends
# together, and a hop of frames a third more than the backend's.
_MESSAGE_S, _FRAME_HOP = 0.25e-3, 1.33
_SAMPLE = 1 << 16  # values
_DENSITY_SAMPLE = 1 << 13
_SPARSE = 0.8
# A cast is what a codec without a name does.
_CAST_S = 0.5e-9
_FORWARD_SHARE = 1 / 3  # of what a step computes, before the first gradient
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20  # DDP's own


@dataclass(frozen=True)
class CostProfile:
    """Everything that predictions rest on, but for what a step computes. The same on all ranks.

    Attributes:
        codecs: spec -> seconds a value to encode and to decode, bits a value.
        buckets: values of each of DDP's buckets, the first ready first.
        density: which share of a gradient's values is not zero.
    """

    machine: SharedCores
    link: LinkCost
    codecs: Mapping[str, CodecCost]
    shapes: Mapping[str, str]
    buckets: tuple[int, ...]
    density: float = 1.0

    def family_of(self, spec: str) -> str:
        """Schemes whose predictions err alike. Of sparse gradients what is shortened by zeros errs by itself."""
        shape, codec = self.shapes.get(spec, spec), self.codecs.get(spec, CodecCost())
        return f"{shape} of few" if codec.zero_bits is not None and self.density < _SPARSE else shape

    @property
    def costs(self) -> dict[str, CodecCost]:
        """`codecs` with the bits that they need for gradients as dense as these."""
        return {spec: codec.at(self.density) for spec, codec in self.codecs.items()}

    def step(self, compute_s: float) -> StepCost:
        """A step that computes so long; buckets are ready as the backward pass comes to them."""
        total, done, buckets = max(1, sum(self.buckets)), 0, []
        for n_values in self.buckets:
            done += n_values
            buckets.append((n_values, compute_s * (_FORWARD_SHARE + (1 - _FORWARD_SHARE) * done / total)))
        return StepCost(compute_s, tuple(buckets))

    def predict_us(self, computing_us: int) -> dict[str, int]:
        """Microseconds a step under every scheme, where one computes `computing_us`."""
        step = self.step(computing_us / 1e6)
        return {
            spec: int(1e6 * predict_s(self.shapes[spec], codec, step, self.link, self.machine))
            for spec, codec in self.costs.items()
        }

    def best_at(self, rate_bps: float, computing_us: int, allowed: Sequence[str]) -> tuple[int, str, int]:
        """(microseconds a step under plain, the best of `allowed`, its microseconds) on a link of that rate.

        The best is plain where nothing wins 3 %.
        """
        there = replace(self, link=replace(self.link, rate=rate_bps / 8)).predict_us(computing_us)
        best = min(allowed, key=lambda spec: (there[spec], spec))
        if there[best] * 1.03 >= there["plain"]:
            best = "plain"
        return there["plain"], best, there[best]

    def with_transfer(self, transfer_us: int) -> CostProfile:
        """The same, with the link as `probe_transfer_us` found it on the slowest rank."""
        n = self.machine.n_ranks
        hops_s = 2 * (n - 1) * self.link.backend_hop_s
        n_bytes = ring_bytes(4 * PROBE_ELEMENTS, n)
        return replace(self, link=replace(self.link, rate=n_bytes / max(transfer_us / 1e6 - hops_s, 1e-6)))

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "machine": asdict(self.machine),
            "link": asdict(self.link),
            "codecs": {spec: asdict(codec) for spec, codec in self.codecs.items()},
            "shapes": dict(self.shapes),
            "buckets": list(self.buckets),
            "density": self.density,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> CostProfile:
        """What `as_dict` gave. Raises: KeyError, TypeError (not that)."""
        return cls(
            SharedCores(**saved["machine"]),
            LinkCost(**saved["link"]),
            {spec: CodecCost(**codec) for spec, codec in saved["codecs"].items()},
            dict(saved["shapes"]),
            tuple(saved["buckets"]),
            float(saved.get("density", 1.0)),
        )


def measure_profile(
    communicator: Communicator, rows: Sequence[FidelityRow], parameters: Sequence[torch.Tensor]
) -> CostProfile:
    """Measure link and codecs, as all ranks at once: collective, under a second. Raises: PeerLost."""
    agreed: CostProfile = communicator.submit(_measure, communicator, rows, parameters).wait()
    return agreed


def _measure(
    communicator: Communicator, rows: Sequence[FidelityRow], parameters: Sequence[torch.Tensor]
) -> CostProfile:
    speeds = [codec_speed(row.codec) for row in rows]
    hop_s, byte_s = probe_link(communicator)
    slowest = torch.tensor([hop_s, byte_s, *(s for pair in speeds for s in pair)], dtype=torch.float64)
    if communicator.world_size > 1:
        communicator.all_reduce(slowest, dist.ReduceOp.MAX)
    hop_s, byte_s, *flat = slowest.tolist()
    link = LinkCost(1 / max(byte_s, 1e-12), hop_s, _FRAME_HOP * hop_s, _MESSAGE_S, hop_s * communicator.world_size)
    return CostProfile(
        machine_of(communicator),
        link,
        {
            row.spec: CodecCost(flat[2 * i], flat[2 * i + 1], row.bits, zero_bits=row.zero_bits)
            for i, row in enumerate(rows)
        },
        {row.spec: row.shape for row in rows},
        bucket_sizes(parameters),
    )


def codec_speed(spec: str) -> tuple[float, float]:
    """Processor seconds (to encode, to decode) a value, of numbers distributed as gradients are: most of them small."""
    if not spec:
        return _CAST_S, _CAST_S
    name, options = parse_spec(spec)
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(_SAMPLE, generator=generator) * torch.exp2(-8 * torch.rand(_SAMPLE, generator=generator))
    try:
        codec = codecs.by_name(name, **options)
        message = torch.empty(codec.max_encoded_bytes(_SAMPLE, torch.float32), dtype=torch.uint8)
        n_bytes = codec.encode(sample, message)
        out = torch.empty(_SAMPLE)
        encode_s = processor_s(lambda: codec.encode(sample, message))
        decode_s = processor_s(lambda: codec.decode(message[:n_bytes], out))
    except GradwireError:  # one that cannot be tried by itself: a trial will tell
        return _CAST_S, _CAST_S
    return encode_s / _SAMPLE, decode_s / _SAMPLE


def machine_of(communicator: Communicator) -> SharedCores:
    """How many ranks share how many cores, where it is worst; on the lane, every rank."""
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    mine = torch.tensor([_host_number(), n_cores], dtype=torch.int64)
    if communicator.world_size == 1:
        return SharedCores(1, 1, n_cores)
    hosts = communicator.all_gather(mine).tolist()
    names = [host for host, _ in hosts]
    fewest = min(range(len(hosts)), key=lambda i: (hosts[i][1] / names.count(names[i]), hosts[i]))
    return SharedCores(communicator.world_size, names.count(names[fewest]), hosts[fewest][1])


def density_of(gradients: Iterable[torch.Tensor | None]) -> float:
    """Which share of the values is not zero, by a sample spread over all of them; 1 where there is none to look at."""
    dense = [g.detach().view(-1) for g in gradients if g is not None and not g.is_sparse and g.is_contiguous()]
    stride = max(1, sum(values.numel() for values in dense) // _DENSITY_SAMPLE)
    samples = [values[::stride] for values in dense if values.numel()]
    n_values = sum(sample.numel() for sample in samples)
    return sum(int(torch.count_nonzero(sample)) for sample in samples) / n_values if n_values else 1.0


def _host_number() -> int:
    """The same for processes that share a kernel, whatever their host names and namespaces."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        text = os.uname().nodename
    return int.from_bytes(text.encode()[:7], "little")


def bucket_sizes(parameters: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Values in DDP's buckets, as it cuts them: from the last parameter on, the first bucket small."""
    sizes, n_values, cap = [], 0, _FIRST_BUCKET_BYTES
    for parameter in reversed(list(parameters)):
        n_values += parameter.numel()
        if 4 * n_values >= cap:
            sizes.append(n_values)
            n_values, cap = 0, _BUCKET_BYTES
    if n_values or not sizes:
        sizes.append(n_values)
    return tuple(sizes)
