"""The kernels of truncated and embedded floats, run on the host: the CPU codecs' bytes in every order of threads."""

from __future__ import annotations

import shutil
from pathlib import Path

import emulated
import pytest
import torch
from float_lies import error_of, is_refused, lies, message_of
from kernel_checks import CONTENTS, FLOAT_EDGES, FLOAT_SIZES, FLOATS, ORDERS, WIDE_FLOATS, run, values_of
from sanitizing import run_sanitized

from gradwire.codecs.embedded_float import EmbeddedFloat
from gradwire.codecs.truncated_float import TruncatedFloat
from gradwire.errors import CorruptMessage, IncompatibleVersion, InvalidArgument, Unsupported
from gradwire.gpu.compiler import SOURCES
from gradwire.gpu.kernels import using
from gradwire.gpu.launching import raise_error

SOME = ("truncated 3", "truncated 8", "truncated native 7 stochastic", "fp4-e2m1 4 stochastic", "embedded 7")


def kernels(order: int = 0) -> emulated.EmulatedKernels:
    return emulated.EmulatedKernels(emulated.build(), order)


@pytest.mark.parametrize("order", ORDERS)
def test_messages_and_values_are_the_cpus(order: int) -> None:
    sizes = FLOAT_SIZES if order == 0 else (33, 257)
    assert run(kernels(order), "floats", n=sizes, content=("gradient",)) == 3 * len(sizes) * len(FLOATS)
    wide = {"codec": WIDE_FLOATS, "content": ("gradient", "nan"), "dtype": (torch.float32,)}
    assert run(kernels(order), "floats", n=sizes, **wide) == 2 * len(sizes) * len(WIDE_FLOATS)


@pytest.mark.parametrize("order", ORDERS)
def test_the_edges_of_chunks_are_the_cpus(order: int) -> None:
    sizes = FLOAT_EDGES if order == 0 else (16_385,)
    n_cases = run(kernels(order), "floats", codec=SOME, n=sizes, content=("nan",), dtype=(torch.float32,))
    assert n_cases == len(sizes) * len(SOME)


def test_every_content_is_the_cpus() -> None:
    assert run(kernels(7), "floats", n=(70,)) == 3 * len(FLOATS) * len(CONTENTS)


@pytest.mark.parametrize("content", ["gradient", "nan"])
@pytest.mark.parametrize("name", SOME)
def test_every_changed_byte_is_reported_and_not_read(name: str, content: str) -> None:
    codec, used, n = FLOATS[name], kernels(), 90
    message = message_of(codec, values_of(content, n))
    for byte in range(int(message[24:26].view(torch.int16))):
        changed, out = message.clone(), torch.full((n,), 7.0)
        changed[byte] ^= 0x10
        code = error_of(used, codec, changed, out)
        with pytest.raises((CorruptMessage, IncompatibleVersion)):
            raise_error(code, name, used.device)
        assert bool(out.isnan().all()), f"values of a message with another byte {byte} were used"


@pytest.mark.parametrize("content", ["gradient", "nan"])
@pytest.mark.parametrize("name", SOME)
def test_a_lie_with_right_checksums_is_answered_as_on_the_cpu(name: str, content: str) -> None:
    codec, used, n = FLOATS[name], kernels(), 90
    message = message_of(codec, values_of(content, n))
    n_bytes = int(message[24:26].view(torch.int16))
    found = [is_refused(used, codec, lie, n_bytes, torch.empty(n)) for lie in lies(codec, message, n_bytes)]
    assert 40 < sum(found) < len(found)  # most change codes, which say anything


def test_what_kernels_do_not_do_is_refused() -> None:
    used, message = kernels(), torch.empty(200, dtype=torch.uint8)
    with using(used):
        with pytest.raises(InvalidArgument, match="divisor"):
            TruncatedFloat(8).decode(message, torch.empty(64), adds=True, divisor=2.0)
        for call in (EmbeddedFloat(32).encode, EmbeddedFloat(32).decode):
            with pytest.raises(Unsupported, match="escapes"):
                call(torch.empty(64), torch.empty(64))
    assert used.launched == []


def test_kernels_are_clean_under_the_sanitizers() -> None:
    assert "cases 60, lies" in run_sanitized("sanitized_floats.py", 5)


# A planted fault: file, right, wrong.
FAULTS = {
    "a barrier is missing before what all warps found is added up": (
        "checksum.hpp",
        "shared.warps[threadIdx.x / kWarp] = word;\n  __syncthreads();",
        "shared.warps[threadIdx.x / kWarp] = word;",
    ),
    "half of a warp is not asked for the largest": (
        "embedded.hpp",
        "largest = largest_of_lanes(largest) >> 23;",
        "largest = largest_of_lanes(largest, kWarp / 2) >> 23;",
    ),
    "streams draw each other's numbers": (
        "truncated.hpp",
        "value / 64 * 8 + value % 8);",
        "value / 64 * 8 + (value % 8 ^ 1));",
    ),
    "four planes are in another order": (
        "embedded.hpp",
        "plane = planes + 3 - lane % 4",
        "plane = planes + lane % 4",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, tmp_path: Path) -> None:
    shutil.copytree(SOURCES, tmp_path / "source")
    name, right, wrong = FAULTS[fault]
    text = (tmp_path / "source" / name).read_text()
    assert text.count(right) == 1
    (tmp_path / "source" / name).write_text(text.replace(right, wrong))
    library = emulated.build(source=tmp_path / "source")

    def run_in_all_orders() -> None:
        for order in ORDERS:
            used = emulated.EmulatedKernels(library, order)
            run(used, "floats", codec=SOME, n=(300,), content=("gradient",), dtype=(torch.float32,))

    with pytest.raises(AssertionError, match=r"truncated|fp4|embedded"):
        run_in_all_orders()
