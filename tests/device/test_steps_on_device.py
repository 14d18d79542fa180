"""Steps on the late device: what a checkpoint holds, what the host asks and gives, and what the backend is asked for."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from late import LikeNccl
from late_cases import CPU, Place, begin_with_kernels, counting_waits_of_hooks, train, training_at
from test_on_device import SCHEMES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.gpu import kernels
from gradwire.schemes.compressed import Compressed
from gradwire.wire.communicator import Communicator
from gradwire.wire.device_wire import DeviceWire
from ranks import on_ranks, patience

# ---- what a checkpoint holds


@on_ranks(2)
def test_states_are_the_cpus(rank: int, world_size: int, library: Path) -> None:
    late, device = begin_with_kernels(library)
    late.set_lateness_us(1_000)
    for name in ("one-bit", "top-k", "dgc", "dgc by bucket"):
        states = []
        for place in (Place(CPU), device):
            training = training_at(rank, place, SCHEMES[name]())
            for step in range(3):
                training.backward(step)
            states.append(training.attachment.state_dict()["state"])
            training.attachment.close()
        on_cpu, on_device = states
        assert set(on_cpu) == set(on_device) == {"residuals", *(["momenta"] if "dgc" in name else [])}
        for kind, tensors in on_cpu.items():
            assert set(tensors) == set(on_device[kind])
            assert any(bool(tensor.any()) for tensor in tensors.values())
            for slot, tensor in tensors.items():
                assert on_device[kind][slot].device == CPU
                assert torch.equal(on_device[kind][slot], tensor), f"{name}: other {kind} of {slot}"


# ---- what the host asks of the device

# Operators whose result the host has to have before it goes on.
READING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "_unique2"}


class Asked(TorchDispatchMode):
    """What the lane enqueues."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        name = function.__name__.split(".")[0]
        of_device = [one for one in arguments if isinstance(one, Tensor) and one.device != CPU]
        is_copied = bool(of_device) and isinstance(result, Tensor) and result.device == CPU
        self.names.append(f"{name} to the host" if is_copied else name if of_device else "")
        return result


@on_ranks(2)
def test_the_host_reads_nothing_within_a_step(rank: int, world_size: int, library: Path) -> None:
    _, place = begin_with_kernels(library)
    reduce, asked = Compressed._reduce_on_lane, Asked()

    def watched(*arguments: Any) -> Any:
        with asked:
            return reduce(*arguments)

    with mock.patch.object(Compressed, "_reduce_on_lane", watched):
        for name in SCHEMES:
            if any(part in name for part in ("one-bit", "sign-sgd", "top-k", "dgc")):
                train(rank, place, SCHEMES[name](), n_steps=2)
    read = [name for name in asked.names if name in READING or name.endswith("to the host")]
    assert {"masked_fill_", "copy_", "linalg_vector_norm"} <= set(asked.names), set(asked.names)
    assert not read, f"the host waits for {sorted(set(read))}"
    with asked:
        bool(torch.ones(1, device=place.device).any())
    assert asked.names[-1] in READING


# ---- what the host gives to the device


@on_ranks(1)
def test_what_the_device_has_not_read_is_kept(rank: int, world_size: int, library: Path) -> None:
    late, place = begin_with_kernels(library)
    site = DeviceWire(Communicator(), [place.device])
    late.set_lateness_us(0)
    late.set_stream_lateness_us(0, site.stream.stream_id, int(50_000 * patience()))
    with site.stream:
        first = site.place(torch.arange(3))
        assert len(kernels._uploads) == 1
        site.place(torch.arange(4))
        assert len(kernels._uploads) == 2, "memory was given up that the device has not read yet"
        site.stream.synchronize()
        site.place(torch.arange(5))
    assert len(kernels._uploads) == 1
    site.stream.synchronize()
    assert first.tolist() == [0, 1, 2]


# ---- what the backend is asked for


@on_ranks(2)
def test_one_or_two_collectives_a_bucket(rank: int, world_size: int, library: Path) -> None:
    late, place = begin_with_kernels(library)
    once, twice = ("plain", "sign-sgd", "top-k"), ("one-bit", "one-bit in small messages", "qsgd", "terngrad", "thc")
    twice += ("one-bit by group, two means", "qsgd, raw sums")
    for name, per_bucket in {**dict.fromkeys(once, 1), **dict.fromkeys(twice, 2)}.items():
        n_groups = len(LikeNccl.made)
        train(rank, place, SCHEMES[name](), n_steps=0)
        (own,) = LikeNccl.made[n_groups:]
        assert own.n_started == 0
        with counting_waits_of_hooks(late) as waits:
            train(rank, place, SCHEMES[name]())
        assert LikeNccl.made[-1].n_started == per_bucket * len(waits)
