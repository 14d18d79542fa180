"""GComp's kernels, run on the host: the CPU codec's bytes in every order of threads, clean under the sanitizers."""

from __future__ import annotations

import shutil
from pathlib import Path

import emulated
import numpy as np
import pytest
import torch
from gcomp_lies import error_of, is_refused, lies, message_of
from kernel_checks import CONTENTS, FLOAT_EDGES, GCOMP, GCOMP_SIZES, ORDERS, assert_gcomp, run, values_of
from sanitizing import run_sanitized

from gcomp_gradients import KINDS, NAMES, make_gradient, make_importance, tensor_of, words_of
from gradwire.codecs.gcomp import GCompCodec, HuffmanTable, describe
from gradwire.errors import (
    CorruptMessage,
    IncompatibleVersion,
    InvalidArgument,
    RankMismatch,
    Unsupported,
)
from gradwire.gpu.compiler import SOURCES
from gradwire.gpu.kernels import using
from gradwire.gpu.launching import raise_error

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "gcomp").glob("v2_*.npz"))


def kernels(order: int = 0) -> emulated.EmulatedKernels:
    return emulated.EmulatedKernels(emulated.build(), order)


@pytest.mark.parametrize("order", ORDERS)
def test_messages_and_values_are_the_cpus(order: int) -> None:
    sizes = GCOMP_SIZES if order == 0 else (0, 33)
    assert run(kernels(order), "gcomp", n=sizes, content=("gradient",)) == 3 * len(sizes) * len(GCOMP)


@pytest.mark.parametrize("order", ORDERS)
def test_the_edges_of_chunks_are_the_cpus(order: int) -> None:
    sizes = FLOAT_EDGES if order == 0 else (16_385,)
    names = ("paper, few codes",) if order else ("paper, few codes", "uniform")
    n_cases = run(kernels(order), "gcomp", codec=names, n=sizes, content=("gradient",), dtype=(torch.float32,))
    assert n_cases == len(sizes) * len(names)


def test_some_of_the_messages_have_escapes() -> None:
    codec, values = GCOMP["paper, few codes"], values_of("gradient", 90)
    counts, lengths = torch.zeros(256, dtype=torch.int64), torch.tensor(codec.table_of_width(8).lengths)
    codec.histogram(values, counts)
    assert int(counts[lengths[:-1] == 0].sum()) > 3
    assert describe(message_of(codec, values, make_importance(90)))["n_raw_chunks"] == 0


def test_every_content_is_the_cpus() -> None:
    assert run(kernels(7), "gcomp", n=(65,)) == 3 * len(GCOMP) * len(CONTENTS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_pattern_is_the_cpus(kind: str) -> None:
    for codec in GCOMP.values():
        for dtype in NAMES:
            assert_gcomp(kernels(), codec, make_gradient(kind, 700, dtype), make_importance(700))


def golden(path: Path) -> tuple[dict[str, np.ndarray], torch.dtype, GCompCodec]:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    dtype, importance, bits = arrays["settings"]
    table = HuffmanTable.from_bytes(arrays["table"].tobytes())
    codec = GCompCodec(str(importance), bits=None if bits == "None" else int(bits), table=table)
    return arrays, getattr(torch, str(dtype).removeprefix("torch.")), codec


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_messages_are_written_and_read(path: Path) -> None:
    arrays, dtype, codec = golden(path)
    used, n = kernels(), arrays["decoded_bits"].size
    importance, message = torch.from_numpy(arrays["importance"]), torch.from_numpy(arrays["message"])
    out = torch.empty(n, dtype=dtype)
    assert error_of(used, codec, message, out, importance) == 0
    np.testing.assert_array_equal(words_of(out), arrays["decoded_bits"])
    written = torch.empty(codec.max_encoded_bytes(n, dtype), dtype=torch.uint8)
    with using(used):
        n_bytes = int(codec.encode(tensor_of(arrays["gradient_bits"], dtype), written, importance))
    assert torch.equal(written[:n_bytes], message)


def test_every_changed_byte_is_reported_and_not_read() -> None:
    codec, n = GCOMP["paper, few codes"], 90
    used, importance = kernels(), make_importance(n)
    message = message_of(codec, make_gradient("gaussian", n, torch.float32), importance)
    assert error_of(used, codec, message, torch.empty(n), importance) == 0
    for byte in range(message.numel()):
        changed = message.clone()
        changed[byte] ^= 0x10
        out = torch.full((n,), 7.0)
        code = error_of(used, codec, changed, out, importance)
        with pytest.raises((CorruptMessage, IncompatibleVersion)):
            raise_error(code, codec.name, used.device)
        assert bool(out.isnan().all()), f"values of a message with another byte {byte} were used"
        with pytest.raises((CorruptMessage, IncompatibleVersion)):
            codec.decode(changed, out, importance)


@pytest.mark.parametrize("name", ["paper, few codes", "none, every exponent has a code", "uniform"])
def test_a_lie_with_right_checksums_is_answered_as_on_the_cpu(name: str) -> None:
    codec, n = GCOMP[name], 90
    used, importance = kernels(), make_importance(n)
    for dtype in (torch.float16, torch.float32):
        message = message_of(codec, make_gradient("gaussian", n, dtype), importance)
        found = [
            is_refused(used, codec, message, lie, torch.empty(n, dtype=dtype), importance) for lie in lies(message)
        ]
        assert 100 < sum(found) < len(found)  # most change mantissas, which say anything


def test_another_table_and_other_importance_are_named() -> None:
    codec, n = GCompCodec("paper"), 50
    used, importance, values = kernels(), make_importance(n), torch.randn(n)
    message = message_of(codec, values, importance)
    with pytest.raises(RankMismatch, match="learning rates"):
        raise_error(error_of(used, codec, message, torch.empty(n), importance + 1), "gcomp", used.device)
    codec.use_table(GCOMP["paper, few codes"].table_of_width(8))
    with pytest.raises(CorruptMessage, match="another Huffman table"):
        raise_error(error_of(used, codec, message, torch.empty(n), importance), "gcomp", used.device)
    assert error_of(used, codec, message_of(codec, values, importance), torch.empty(n), importance) == 0


def test_sums_begin_with_an_addend() -> None:
    codec, values, own = GCompCodec("none"), torch.randn(50), torch.randn(50)
    message, sums = message_of(codec, values, make_importance(50)), torch.empty(50)
    with using(kernels()):
        codec.decode(message, sums, addend=own)
    assert torch.equal(sums, own + values)


def test_what_kernels_do_not_do_is_refused() -> None:
    used, message, out = kernels(), torch.empty(200, dtype=torch.uint8), torch.empty(64)
    with using(used):
        with pytest.raises(InvalidArgument, match="importance bytes"):
            GCompCodec("paper").encode(out, message)
        with pytest.raises(InvalidArgument, match="importance bytes"):
            GCompCodec("paper").decode(message, out)
        with pytest.raises(InvalidArgument, match="divisor"):
            GCompCodec("none").decode(message, out, adds=True, divisor=2.0)
        for call in (GCompCodec("none", format=1).encode, GCompCodec("none", format=1).decode):
            with pytest.raises(Unsupported, match="format 2"):
                call(out, out)
    assert used.launched == []


def test_kernels_are_clean_under_the_sanitizers() -> None:
    assert "cases 12, lies" in run_sanitized("sanitized_gcomp.py", 5)


# A planted fault: file, right, wrong. None that writes outside the memory that it was given.
FAULTS = {
    "a lane takes the word of the one above": (
        "gcomp.hpp",
        "n_words - __popc(taking >> lane)",
        "n_words - __popc(taking >> lane >> 1)",
    ),
    "a barrier is missing before the table is read": (
        "gcomp.hpp",
        "look_up[i] = p.table->look_up[i];\n  __syncthreads();",
        "look_up[i] = p.table->look_up[i];",
    ),
    "bits that share a word are written as if they did not": (
        "gcomp.hpp",
        "atomicOr(&shared.stage[at / 32], static_cast<u32>(placed))",
        "shared.stage[at / 32] = static_cast<u32>(placed)",
    ),
    "a barrier is missing before coded exponents are copied": (
        "gcomp.hpp",
        "  __syncthreads();\n  for (u32 i = threadIdx.x; i < own.exponent_bytes",
        "  for (u32 i = threadIdx.x; i < own.exponent_bytes",
    ),
    "the ballot of both halves of a warp is taken for one's own": (
        "gcomp.hpp",
        "taking = ballot_of_segment(takes)",
        "taking = __ballot_sync(kWholeWarp, takes)",
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
            run(used, "gcomp", codec=["paper"], n=(100, 16_400), content=("gradient",), dtype=(torch.float32,))

    with pytest.raises(AssertionError, match="paper"):
        run_in_all_orders()
