"""What a bucket of 25 MB costs between devices: bytes, collectives, launches and memory traffic, with a bound for each.

Nothing is computed: tensors have no memory ("meta"), and the kernels, operators and collectives that are asked for are counted.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire import codecs
from gradwire.codecs import floats, quantised
from gradwire.codecs.floats import Floats
from gradwire.codecs.quantised import Quantised
from gradwire.core.bucket import Bucket
from gradwire.core.feedback import Part
from gradwire.exchange.owners import Owners
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS, QUANTISED_MIN_CHUNKS, count_chunks
from gradwire.exchange.ring import Ring
from gradwire.gpu import kernels
from gradwire.registry import parse_spec
from gradwire.wire.device_wire import DeviceWire

META = torch.device("meta")
N_VALUES = 25 * (1 << 20) // 4
BUCKET_BYTES = 4 * N_VALUES

# How often a kernel reads and writes its values, and reads and writes its message; not what is a few bytes a chunk.
TRAFFIC = {
    "gw_embedded_pack": (1, 0, 1, 1),  # a checksum reads what was written
    "gw_truncated_pack": (1, 0, 1, 1),
    "gw_embedded_unpack": (0, 1, 2, 0),  # a checksum reads it too
    "gw_truncated_unpack": (0, 1, 2, 0),
    "gw_quantised_measure": (1, 0, 0, 0),
    "gw_quantised_pack_levels": (1, 0, 1, 1),
    "gw_quantised_unpack_levels": (0, 1, 1, 0),
}
NO_WORK = ("view", "slice", "select", "empty", "detach", "alias", "unbind", "split")


class Count(NamedTuple):
    """One rank's costs of one bucket; `passes`: device memory read or written, in units of the bucket."""

    sent_mb: float
    collectives: int
    launches: int
    operators: int
    passes: float


class Counter(TorchDispatchMode):
    """The kernels and the group of a device that does nothing."""

    device = META

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size
        self.message = (0, 0)  # values and bytes of what is launched next
        self.reset()

    def reset(self) -> None:
        self.sent = self.collectives = self.launches = self.operators = self.traffic = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        if not any(part in function.__name__ for part in NO_WORK):
            self.operators += 1
            tensors = {id(one): one for one in (*arguments, result) if isinstance(one, Tensor)}.values()
            name = function.__name__.split(".")[0]
            in_place = name.endswith("_") and not name.startswith(("zero_", "copy_"))
            self.traffic += sum(one.numel() * one.element_size() for one in tensors)
            self.traffic += in_place * result.numel() * result.element_size()
        return result

    def launch(self, name: str, n_blocks: int, n_threads: int, shared_bytes: int, parameters: Any) -> None:
        self.launches += 1
        values_read, values_written, message_read, message_written = TRAFFIC[name]
        values_read += values_written * getattr(parameters, "adds", 0)
        n_values, n_bytes = self.message
        self.traffic += 4 * n_values * (values_read + values_written) + n_bytes * (message_read + message_written)

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        self._collect((self.world_size - 1) * sent[0].numel() * sent.element_size())

    def exchange(self, received: list[Tensor], sent: list[Tensor]) -> None:
        self._collect(sum(one.numel() for rank, one in enumerate(sent) if rank != self.rank))

    def all_gather(self, gathered: Tensor, values: Tensor) -> None:
        self._collect((self.world_size - 1) * values.numel() * values.element_size())

    def start_reduce(self, values: Tensor, op: Any = None) -> Any:
        self._collect(2 * (self.world_size - 1) * values.numel() * values.element_size() // self.world_size)
        return lambda: None

    def _collect(self, n_bytes: int) -> None:
        self.collectives += 1
        self.sent += n_bytes


@contextlib.contextmanager
def sizes_noted(counter: Counter) -> Iterator[None]:
    """Codecs tell the counter how long their messages are."""
    laid_out: dict[int, tuple[int, int]] = {}
    lay_out, write, read = Floats.lay_out, Floats.encode_messages, Floats.decode_messages
    quantise, dequantise = Quantised.encode, Quantised.decode

    def size_of(codec: Any, n: int, messages: Any, times: int = 1) -> tuple[int, int]:
        is_one = getattr(messages, "table", None) is None
        n, n_bytes = (n, codec.max_encoded_bytes(n, torch.float32)) if is_one else laid_out[id(messages)]
        return times * n, times * n_bytes

    def lay(codec: Any, messages: Any, device: torch.device) -> Any:
        made = lay_out(codec, messages, device)
        n_bytes = sum(codec.max_encoded_bytes(n, torch.float32) for _, _, n, _ in messages)
        laid_out[id(made)] = sum(n for _, _, n, _ in messages), n_bytes
        return made

    def noting(work: Any, size: Any) -> Any:
        def noted(codec: Any, *arguments: Any, **options: Any) -> Any:
            n = {"n": options["n_sources"]} if "n_sources" in options else {}
            counter.message = size(codec, *arguments, **n)
            return work(codec, *arguments, **options)

        return noted

    noted_write = noting(write, lambda codec, values, room, messages: size_of(codec, values.numel(), messages))
    noted_read = noting(read, lambda codec, room, out, messages, n=1: size_of(codec, out.numel(), messages, n))
    noted_encode = noting(quantise, lambda codec, values, *_: size_of(codec, values.numel(), None))
    noted_decode = noting(dequantise, lambda codec, _, out: size_of(codec, out.numel(), None))
    with (
        mock.patch.multiple(Floats, lay_out=lay, encode_messages=noted_write, decode_messages=noted_read),
        mock.patch.multiple(Quantised, encode=noted_encode, decode=noted_decode),
        mock.patch.object(floats, "upload", lambda values, device: torch.empty(values.shape, device=device)),
        mock.patch.object(floats, "zeros_between_launches", lambda device, n: torch.empty(n, device=device)),
        mock.patch.object(quantised, "zeros_between_launches", lambda device, n: torch.empty(n, device=device)),
    ):
        yield


def wire_of(counter: Counter) -> DeviceWire:
    wire = DeviceWire.__new__(DeviceWire)
    wire.rank, wire.world_size, wire.device = counter.rank, counter.world_size, META
    wire.group, wire.stream = counter, contextlib.nullcontext()  # type: ignore[assignment]
    wire.flags = torch.zeros(2, dtype=torch.int32, device=META)
    wire._memory, wire._step = {}, SimpleNamespace(times=None)  # type: ignore[assignment]
    wire.record = mock.Mock()
    return wire


def count(spec: str, world_size: int, rank: int, one_by_one: bool = False) -> Count:
    """`one_by_one`: each message in launches of its own, as codecs without rows have it."""
    counter = Counter(rank, world_size)
    wire = wire_of(counter)
    bucket = Bucket(torch.empty(N_VALUES, device=META), resident=mock.Mock(at_work=contextlib.nullcontext))
    name, options = parse_spec(spec)
    with kernels.using(counter), sizes_noted(counter):  # type: ignore[arg-type]
        if name in ("plain", "bf16"):
            with counter:
                wire.mean(bucket.buffer, torch.bfloat16 if name == "bf16" else None)
        else:
            topology = options.pop("topology", "direct")
            codec: Any = codecs.by_name(name, **options)
            way: Any = Owners(codec, "8-bit") if name == "qsgd" else Ring(codec, topology)
            way.bind(wire)
            if one_by_one:
                way._on_device._floats = None
            way.mean(Part(bucket, wire, None, None, 1.0), wire)  # lays out
            counter.reset()
            with counter:
                way.mean(Part(bucket, wire, None, None, 1.0), wire)
    passes = counter.traffic / BUCKET_BYTES
    return Count(counter.sent / 1e6, counter.collectives, counter.launches, counter.operators, passes)


FLOATS = ["embedded-float:bits=8", "embedded-float:bits=5", "embedded-float:bits=4", "truncated-float:bits=8"]


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("spec", FLOATS)
def test_floats_take_two_collectives_and_as_many_launches_at_any_number_of_ranks(spec: str, world_size: int) -> None:
    n_bits = int(spec[-1])
    for rank in range(world_size):
        found = count(spec, world_size, rank)
        share = 2 * (world_size - 1) / world_size
        assert found.collectives == 2
        # Exponents or scales of partitions, headers and checksums are 3 % at most.
        assert found.sent_mb * 1e6 == pytest.approx(share * N_VALUES * n_bits / 8, rel=0.03)
        assert found.launches <= 5
        assert found.operators <= 4
        assert found.passes <= 6.5
        assert found.launches <= count(spec, world_size, rank, one_by_one=True).launches / 8
    in_ring = count(f"{spec},topology=ring", world_size, 0)
    assert in_ring.collectives == world_size
    assert in_ring.launches <= 2 * world_size


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_the_others_too(world_size: int) -> None:
    share = 2 * (world_size - 1) / world_size
    plain, bf16, qsgd = (count(spec, world_size, 0) for spec in ("plain", "bf16", "qsgd"))
    assert plain == pytest.approx(Count(share * BUCKET_BYTES / 1e6, 1, 0, 1, 2))
    assert bf16 == pytest.approx(Count(share * BUCKET_BYTES / 2e6, 1, 0, 3, 5))
    assert qsgd.collectives == 2
    assert qsgd.sent_mb < bf16.sent_mb
    # Two to make a message, one to read it.
    n_chunks = count_chunks(-(-N_VALUES // world_size), QUANTISED_CHUNK_ELEMENTS, QUANTISED_MIN_CHUNKS)
    assert qsgd.launches == n_chunks * (2 * world_size + 2 * world_size - 1)
    assert qsgd.passes <= 12


if __name__ == "__main__":  # the table of docs/gpu.md
    for one in ("plain", "bf16", "qsgd", *FLOATS):
        for n in (2, 4, 8):
            print(one, n, count(one, n, n // 2))
            if one in FLOATS:
                print("apart, in a ring", count(one, n, n // 2, one_by_one=True), count(f"{one},topology=ring", n, 0))
