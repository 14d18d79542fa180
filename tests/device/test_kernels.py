"""The quantisers' kernels, run on the host: the CPU codecs' bytes in every order of threads."""

from __future__ import annotations

import contextlib

import emulated
import pytest
import torch
from emulated import EmulatedKernels
from kernel_checks import CONTENTS, FAMILIES, ORDERS, QUANTISED_SIZES, QUANTISERS, run, values_of

from gradwire.codecs import packed_values
from gradwire.codecs.hadamard import Thc
from gradwire.codecs.packed_values import HEAD_WORDS
from gradwire.codecs.quantised import Quantised
from gradwire.codecs.ternary import Ternary
from gradwire.errors import CorruptMessage, IncompatibleVersion, InvalidArgument, Unsupported
from gradwire.gpu.driver import CudaKernels
from gradwire.gpu.kernels import using
from gradwire.gpu.launching import raise_error


@pytest.mark.parametrize("order", ORDERS)
def test_messages_residuals_and_values_are_the_cpus(order: int) -> None:
    sizes = QUANTISED_SIZES if order == 0 else (0, 33, 4097)
    some = ("one-bit", "two-bit", "one-bit two-means by group", "two-bit by group", "four levels by group", "qsgd")
    names = some if order == 0 else tuple(QUANTISERS)
    n_cases = run(EmulatedKernels(emulated.build(), order), "quantised", codec=names, n=sizes, content=("gradient",))
    assert n_cases == 6 * len(sizes) * len(names)


def test_every_content_is_the_cpus() -> None:
    assert run(EmulatedKernels(emulated.build(), 7), "quantised", n=(65,)) == 6 * len(QUANTISERS) * len(CONTENTS)


def test_a_payload_of_many_pieces_is_the_cpus() -> None:
    axes = {"codec": ["qsgd"], "n": [70_001], "content": ["gradient"], "dtype": [torch.float32], "residual": [False]}
    assert run(EmulatedKernels(emulated.build()), "quantised", **axes) == 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("family", "n_cases"), [("products", 28), ("orthogonal", 7), ("signs", 48), ("index", 168)])
def test_what_makes_no_messages_is_the_cpus(family: str, n_cases: int, order: int) -> None:
    assert run(EmulatedKernels(emulated.build(), order), family) == n_cases


@pytest.mark.parametrize("order", ORDERS)
def test_ternary_and_thc_are_the_cpus(order: int) -> None:
    kernels = EmulatedKernels(emulated.build(), order)
    few = {} if order == 0 else {"content": ("gradient",)}
    assert run(kernels, "ternary", **few) == (240 if order == 0 else 60)
    sizes = {} if order == 0 else {"n": (63, 1025)}
    assert run(kernels, "thc", **few, **sizes) == (120 if order == 0 else 12)


def test_ternary_spans_that_are_not_finite_are_nan_on_both() -> None:
    codec, values, cpu = Ternary(), torch.ones(80), torch.device("cpu")
    for kernels in (None, EmulatedKernels(emulated.build())):
        with contextlib.nullcontext() if kernels is None else using(kernels):
            for spans in ([(0, 10), (10, 80)], [(0, 80)]):
                shares, n_bad = codec.share(80, spans, cpu), spans[-1][1] - spans[-1][0]
                scales, out = torch.zeros(len(spans)), torch.empty(80)
                for bad in (float("nan"), float("-inf")):
                    values[12] = bad
                    codec.write_scales(values, shares, scales)
                    assert scales.tolist() == [*[1.0] * (len(spans) - 1), float("inf")]
                counts = torch.empty(codec.count_bytes(80, 2), dtype=torch.uint8)
                codec.write_counts(values, shares, scales, 2, counts, 1)
                codec.read_counts(counts * 2, shares, scales, 2, out)
                assert out[:-n_bad].tolist() == [1.0] * (80 - n_bad)
                assert bool(out[-n_bad:].isnan().all())


def test_thc_blocks_that_are_not_finite_are_nan_on_both() -> None:
    codec, values = Thc(), torch.ones(1100)
    norms, codes = torch.zeros(2), torch.empty(codec.code_bytes(1100, 2), dtype=torch.uint8)
    for kernels in (None, EmulatedKernels(emulated.build())):
        with contextlib.nullcontext() if kernels is None else using(kernels):
            for bad in (float("nan"), float("-inf"), 3e38):  # the sum of the last one's squares is beyond float32
                values[1050:1060] = bad
                codec.write_norms(values, norms)
                assert norms.tolist() == [32.0, float("inf")]
            out = torch.empty(1100)
            codec.write_codes(values, norms, codes, n_ranks=2, sign_step=1, step=2)
            codec.read_sums(codes * 2, norms, 2, out, sign_step=1)
            assert not bool(out[:1024].isnan().any())
            assert bool(out[1024:].isnan().all())


def test_no_more_values_are_packed_than_there_is_room_for() -> None:
    values, message = torch.ones(70), torch.empty(HEAD_WORDS + 3, dtype=torch.int32)
    head, index = message.split([HEAD_WORDS, 3])
    packed = torch.full((30,), 7.0)  # where ranks were to hold different counts
    with using(EmulatedKernels(emulated.build())):
        packed_values.write_index(values, message, 5)
        ends = packed_values.count(index, 70, head)
        packed_values.pack(values, index, packed[:20], ends)
        packed_values.unpack(packed[:20], index, values, ends)
    assert packed.tolist() == [1.0] * 20 + [7.0] * 10
    assert values.tolist() == [1.0] * 20 + [0.0] * 50


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_is_the_cpus_on_a_gpu(family: str) -> None:
    kernels = CudaKernels(torch.device("cuda"))
    assert run(kernels, family) > 0
    if family in ("quantised", "gcomp", "floats"):
        some = {"quantised": ("one-bit", "two-bit", "qsgd"), "gcomp": ("uniform", "paper"), "floats": ("truncated 8",)}
        assert run(kernels, family, codec=some[family], n=((1 << 20) + 1, 1 << 24), content=("gradient",)) > 0


def message_of(kernels: EmulatedKernels, codec: Quantised, n: int, cuts: tuple[int, ...] = ()) -> torch.Tensor:
    message = torch.empty(codec.message_room(n, cuts), dtype=torch.uint8)
    with using(kernels):
        codec.encode(values_of("gradient", n), message, cuts=cuts)
    return message


def error_of(
    kernels: EmulatedKernels, codec: Quantised, message: torch.Tensor, n: int, cuts: tuple[int, ...] = ()
) -> tuple[int, torch.Tensor]:
    error, out = torch.zeros(1, dtype=torch.int32), torch.full((n,), 7.0)
    with using(kernels):
        codec.decode(message, out, cuts=cuts, error=error)
        codec.decode(message, again := torch.full((n,), 7.0), cuts=cuts)
    assert torch.equal(out.isnan(), again.isnan())
    return int(error), out


@pytest.mark.parametrize(
    "name", ["one-bit", "two-bit", "one-bit by group", "two-bit by group", "four levels by group", "qsgd"]
)
def test_a_changed_message_is_reported_and_not_read(name: str) -> None:
    kernels, codec, n = EmulatedKernels(emulated.build()), QUANTISERS[name], 200
    message = message_of(kernels, codec, n)
    assert error_of(kernels, codec, message, n)[0] == 0
    for byte in (0, 4, 5, 6, 7, 8, 16, 20, 28, 31, 32, 40, message.numel() - 1):
        changed = message.clone()
        changed[byte] ^= 0x10
        code, out = error_of(kernels, codec, changed, n)
        with pytest.raises((CorruptMessage, IncompatibleVersion)):
            raise_error(code, name, kernels.device)
        assert bool(out.isnan().all()), f"values of a message with another byte {byte} were used"
        with pytest.raises((CorruptMessage, IncompatibleVersion)):
            codec.decode(changed, torch.empty(n))


def test_a_code_that_no_encoder_writes_is_reported_though_the_checksum_is_right() -> None:
    kernels, codec = EmulatedKernels(emulated.build()), QUANTISERS["two-bit"]
    message = message_of(kernels, codec, 16)
    message[32] |= 3
    _seal(message)
    with pytest.raises(CorruptMessage, match="no encoder writes"):
        raise_error(error_of(kernels, codec, message, 16)[0], "two-bit", kernels.device)
    with pytest.raises(CorruptMessage, match="no encoder writes"):
        codec.decode(message, torch.empty(16))


def test_groups_that_no_encoder_writes_are_reported_though_the_checksum_is_right() -> None:
    kernels, codec, n, cuts = EmulatedKernels(emulated.build()), QUANTISERS["two-bit by group"], 200, (130,)
    message = message_of(kernels, codec, n, cuts)
    # The number of cuts, the cut, the first group's scale (Inf), the first code (3).
    for byte, to, says in ((32, 2, "flags"), (36, 1, "flags"), (41, 0xFF, "no encoder"), (48, 3, "no encoder")):
        lie = message.clone()
        lie[byte] |= to
        _seal(lie)
        with pytest.raises(CorruptMessage, match=says):
            raise_error(error_of(kernels, codec, lie, n, cuts)[0], codec.name, kernels.device)
    # All codes of four levels mean something; a scale that is not finite does not.
    four = QUANTISERS["four levels by group"]
    lie = message_of(kernels, four, n)
    lie[36:38] = torch.tensor([0x80, 0x7F])
    _seal(lie)
    with pytest.raises(CorruptMessage, match="no encoder"):
        raise_error(error_of(kernels, four, lie, n)[0], four.name, kernels.device)
    with pytest.raises(InvalidArgument, match="cuts ascend"):
        codec.message_room(n, (130, 130))


def test_what_kernels_do_not_do_is_refused() -> None:
    kernels = EmulatedKernels(emulated.build())
    with pytest.raises(InvalidArgument, match="float32 only"), using(kernels):
        QUANTISERS["one-bit"].decode(torch.empty(40, dtype=torch.uint8), torch.empty(64).half(), adds=True)
    assert kernels.launched == []
    for codec in (Ternary(), Thc()):
        with pytest.raises(Unsupported, match=f"{codec.name} has no kernels"), using(kernels):
            codec.encode(torch.empty(64), torch.empty(64, dtype=torch.uint8))
    with pytest.raises(Unsupported, match="none for 'meta'"):
        QUANTISERS["one-bit"].check_device(torch.device("meta"))


def _seal(message: torch.Tensor) -> None:
    message[28:32] = torch.tensor(list(_crc32c(bytes(message[:28]) + bytes(message[32:])).to_bytes(4, "little")))


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
