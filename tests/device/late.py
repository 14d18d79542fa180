"""The late device (late_device.cpp) as torch sees it, and a process group for it that refuses what NCCL refuses.

It is compiled against the torch that is installed.
"""

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import sys
import types
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import emulated
import torch
import torch.distributed as dist

SOURCE = Path(__file__).with_name("late_device.cpp")
_MADE_FROM = (SOURCE, SOURCE.with_name("late_streams.hpp"))
_FLAGS = ["-std=c++20", "-O1", "-g0", "-w"]
_COMPILE = """
import sys
from torch.utils import cpp_extension
name, source, folder, *flags = sys.argv[1:]
cpp_extension.load(name, [source], extra_cflags=flags, build_directory=folder)
"""


def build() -> Path:
    """The compiled device; made where it is not there yet, in about 30 s."""
    made_from = [path.read_text() for path in _MADE_FROM]
    return emulated.kept("late", (made_from, torch.__version__, _FLAGS), _compile)


def _compile(library: Path) -> None:
    # Ninja, where it is installed beside the interpreter of an environment that nobody has activated. In a process of
    # its own, because torch loads what it compiles, and this one should stay without a device.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    command = [sys.executable, "-c", _COMPILE, library.stem, str(SOURCE), str(library.parent), *_FLAGS]
    subprocess.run(command, env={**os.environ, "PATH": path}, check=True, stdout=subprocess.DEVNULL)


def load(library: Path) -> Any:
    """Make `torch.device("late")` known to this process, once; the extension's own functions."""
    if "torch.late" in sys.modules:
        return sys.modules["torch.late"].device_module  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location(library.stem, library)
    assert spec is not None
    assert spec.loader is not None
    late = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(late)
    torch.utils.rename_privateuse1_backend("late")
    module = types.ModuleType("torch.late")
    vars(module).update(
        device_module=late,
        is_available=lambda: True,
        is_initialized=lambda: True,
        current_device=late.current_device,
        set_device=late.set_device,
        device_count=lambda: 2,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    sys.modules["torch.late"] = module
    torch._register_device_module("late", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend("like_nccl", LikeNccl, devices=["late", "cpu"])
    return late


class LikeNccl(dist.ProcessGroup):
    """Collectives in the order of their calls, each on its device's stream; host memory is not served. Its values
    travel by Gloo. DDP's CPU tensors go to Gloo as well, as with the backend "cpu:gloo,cuda:nccl"."""

    made: ClassVar[list["LikeNccl"]] = []

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        LikeNccl.made.append(self)
        self.n_started = 0  # collectives on a device
        # A device's collectives are in order among themselves, so each has a group; and the CPU's one.
        self._gloo = {
            name: dist.ProcessGroupGloo(dist.PrefixStore(f"like_nccl {name}", store), rank, size, timeout)
            for name in ("cpu", "late:0", "late:1")
        }
        self._streams = [torch.Stream(device=torch.device("late", index)) for index in range(2)]

    def getBackendName(self) -> str:  # noqa: N802  # torch's own name
        return "like_nccl"

    def _start(self, tensors: list[torch.Tensor], result: Any, run: Any) -> Any:
        if all(tensor.device.type == "cpu" for tensor in tensors):
            run(self._gloo["cpu"], tensors)
            future: Any = torch.futures.Future()
            future.set_result(result)
            return _Work(future, None)
        self.n_started += 1
        device = tensors[0].device
        for tensor in tensors:
            if tensor.device != device or not tensor.is_contiguous():
                raise RuntimeError(f"like_nccl: takes contiguous tensors of one device, not {tensor.device}")
        stream = self._streams[device.index]
        stream.wait_stream(torch.accelerator.current_stream(device))
        for tensor in tensors:
            tensor.record_stream(stream)
        views = [host_view(tensor) for tensor in tensors]
        sys.modules["torch.late"].device_module.enqueue(  # type: ignore[attr-defined]
            device.index, stream.stream_id, lambda: run(self._gloo[str(device)], views)
        )
        future = torch.futures.Future(devices=[device])
        with stream:
            future.set_result(result)
        return _Work(future, stream)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        op = opts.reduceOp if hasattr(opts, "reduceOp") else dist.ReduceOp.SUM
        return self._start(list(tensors), list(tensors), lambda gloo, views: gloo.allreduce(views, op).wait())

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        root = opts.rootRank if hasattr(opts, "rootRank") else 0
        return self._start(list(tensors), list(tensors), lambda gloo, views: gloo.broadcast(views[0], root).wait())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._start(
            [inputs[0], *outputs[0]], [outputs[0]], lambda gloo, views: gloo.allgather([views[1:]], [views[0]]).wait()
        )

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        return self._start([output, tensor], [output], lambda gloo, views: gloo._allgather_base(*views).wait())

    def alltoall_base(self, output: Any, tensor: Any, sizes: Any = (), own_sizes: Any = (), opts: Any = None) -> Any:
        if sizes or own_sizes or output.numel() != tensor.numel() or tensor.numel() % self.size():
            raise RuntimeError("like_nccl: rows of one size")
        rows = [output.view(-1), tensor.view(-1)]
        return self._start(rows, [output], lambda gloo, views: gloo.alltoall_base(*views, [], []).wait())

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._start([*outputs, *inputs], list(outputs), lambda gloo, views: _swap(gloo, self.rank(), views))

    def shutdown(self) -> None:
        """Nothing is under way."""

    def abort(self) -> None:
        """What is under way ends, with values that nobody may use."""
        for group in self._gloo.values():
            # Gloo closes nothing by its own abort; a receive that times out closes its group's connections.
            with contextlib.suppress(Exception):
                work = group.recv([torch.empty(1, dtype=torch.uint8)], (self.rank() + 1) % self.size(), 1 << 20)
                work.wait(timedelta(milliseconds=1))

    def barrier(self, opts: Any = None) -> Any:
        return self._start([], [], lambda gloo, views: gloo.barrier().wait())


def _swap(gloo: Any, rank: int, views: list[torch.Tensor]) -> None:
    """Each rank's `views`: what comes from each, then what goes to each. Ends that differ are refused on all ranks."""
    received, sent = views[: len(views) // 2], views[len(views) // 2 :]
    lengths = torch.tensor([[view.numel() for view in tensors] for tensors in (received, sent)])
    by_rank = torch.empty((len(sent), 2, len(sent)), dtype=torch.int64)
    gloo._allgather_base(by_rank.view(-1), lengths.view(-1)).wait()
    if not torch.equal(by_rank[:, 0].t(), by_rank[:, 1]):
        raise RuntimeError("like_nccl: a message is not as long as its receiver has it; NCCL would hang")
    here = torch.empty(int(lengths[0].sum()), dtype=sent[rank].dtype)
    gloo.alltoall_base(here, torch.cat(sent), lengths[0].tolist(), lengths[1].tolist()).wait()
    for view, part in zip(received, here.split(lengths[0].tolist()), strict=True):
        view.copy_(part)


class _Work(dist._Work):
    def __init__(self, future: Any, stream: torch.Stream | None) -> None:
        super().__init__()
        self._future, self._stream = future, stream

    def wait(self, timeout: Any = None) -> bool:  # as NCCL's: the current stream waits, the host does not
        if self._stream is not None:
            torch.accelerator.current_stream(self._stream.device).wait_stream(self._stream)
        return True

    def get_future(self) -> Any:
        return self._future

    def is_completed(self) -> bool:
        return self._stream is None or self._stream.query()


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """The device's memory as a CPU tensor: for what runs in a stream's turn."""
    n_bytes = tensor.numel() * tensor.element_size()
    if n_bytes == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    raw = (ctypes.c_uint8 * n_bytes).from_address(tensor.data_ptr())
    return torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape)
