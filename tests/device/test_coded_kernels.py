"""Kernels run on the host: messages, elements and arguments that they refuse, and of GComp's, every pattern of bits."""

import contextlib
import sys
from pathlib import Path

import pytest
import torch
from emulated import kernels
from kernel_checks import FLOATS, GCOMP, QUANTISERS, assert_gcomp, values_of
from lies import N_VALUES, WRONG_ELEMENTS, Coded, assert_reported, error_of, is_refused, lies_of, message_of, sealed
from test_kernels import SOME_FLOATS, SOME_QUANTISERS
from torch import Tensor

from float_messages import same_bits
from gcomp_gradients import KINDS, NAMES, make_gradient, make_importance
from gradwire.codecs.embedded_float import EmbeddedFloat
from gradwire.codecs.gcomp import GCompCodec, describe
from gradwire.codecs.hadamard import Thc
from gradwire.codecs.selection import CHECKSUM, OUTSIDE, Sample, take_by_sample, take_largest
from gradwire.codecs.selection import raise_error as raise_selection_error
from gradwire.codecs.ternary import Ternary
from gradwire.codecs.truncated_float import TruncatedFloat
from gradwire.errors import CorruptMessage, IncompatibleVersion, InvalidArgument, RankMismatch, Unsupported
from gradwire.gpu.kernels import using
from gradwire.gpu.launching import raise_error

sys.path.append(str(Path(__file__).parents[1] / "golden"))
import test_golden as golden


def coded(name: str, content: str, dtype: torch.dtype = torch.float32) -> tuple[Coded, Tensor | None, Tensor]:
    """A codec, importance, and a message of the CPU's."""
    if name not in GCOMP:
        codec: Coded = FLOATS[name] if name in FLOATS else QUANTISERS[name]
        return codec, None, message_of(codec, values_of(content, N_VALUES, dtype))
    importance = make_importance(N_VALUES)
    return GCOMP[name], importance, message_of(GCOMP[name], make_gradient(content, N_VALUES, dtype), importance)


FLOAT_CASES = [(name, content) for name in SOME_FLOATS for content in ("gradient", "nan")]
CHANGED_CASES = [*FLOAT_CASES, *((name, "gradient") for name in (*SOME_QUANTISERS, "one-bit by group"))]


@pytest.mark.parametrize(("name", "content"), [*CHANGED_CASES, ("paper, few codes", "gaussian")])
def test_every_changed_byte_is_reported_and_not_read(name: str, content: str) -> None:
    codec, importance, message = coded(name, content)
    used = kernels()
    assert error_of(used, codec, message, torch.empty(N_VALUES), importance) == 0
    for byte in range(message.numel()):
        changed, out = message.clone(), torch.full((N_VALUES,), 7.0)
        changed[byte] ^= 0x10
        code = error_of(used, codec, changed, out, importance)
        with pytest.raises((CorruptMessage, IncompatibleVersion)):
            raise_error(code, codec.name, used.device)
        with using(used):
            codec.decode(changed, again := torch.empty(N_VALUES), importance)
        assert bool((out.isnan() & again.isnan()).all()), f"values of a message with another byte {byte} were used"
        with pytest.raises((CorruptMessage, IncompatibleVersion)):
            codec.decode(changed, out, importance)


GCOMP_CASES = [
    (name, "gaussian", dtype)
    for name in ("paper, few codes", "none, every exponent has a code", "uniform")
    for dtype in (torch.float16, torch.float32)
]


@pytest.mark.parametrize(("name", "content", "dtype"), [*((*one, torch.float32) for one in FLOAT_CASES), *GCOMP_CASES])
def test_a_lie_with_right_checksums_is_answered_as_on_the_cpu(name: str, content: str, dtype: torch.dtype) -> None:
    codec, importance, message = coded(name, content, dtype)
    used, found = kernels(), []
    for lie in lies_of(codec, message):
        out = torch.full((N_VALUES,), 7.0, dtype=dtype)
        found.append(is_refused(used, codec, message, lie, out, importance))
    # Most change codes or mantissas, which say anything.
    assert (100 if name in GCOMP else 40) < sum(found) < len(found)


# Of messages of so many values, cut there: bytes that no encoder writes, and what is said.
LIES = [
    ("two-bit", 16, (), {32: 0xFF}, "no encoder writes"),
    ("two-bit by group", 200, (130,), {32: 3}, "flags"),  # the number of cuts
    ("two-bit by group", 200, (130,), {36: 131}, "flags"),  # the cut
    ("two-bit by group", 200, (130,), {41: 0xFF}, "no encoder"),  # the first group's scale
    ("two-bit by group", 200, (130,), {48: 0xFF}, "no encoder"),  # the first codes
    # All codes of four levels mean something; a scale that is not finite does not.
    ("four levels by group", 200, (), {36: 0x80, 37: 0x7F}, "no encoder"),
]


@pytest.mark.parametrize(("name", "n", "cuts", "lie", "says"), LIES)
def test_what_no_encoder_writes_is_reported_though_the_checksum_is_right(
    name: str, n: int, cuts: tuple[int, ...], lie: dict[int, int], says: str
) -> None:
    used, codec = kernels(), QUANTISERS[name]
    message = message_of(codec, values_of("gradient", n), cuts=cuts)
    for place, byte in lie.items():
        message[place] = byte
    sealed(codec, message)
    with pytest.raises(CorruptMessage, match=says):
        raise_error(error_of(used, codec, message, out := torch.full((n,), 7.0), cuts=cuts), codec.name, used.device)
    with using(used):  # also where nobody asks for an error word
        codec.decode(message, again := torch.full((n,), 7.0), cuts=cuts)
    assert torch.equal(out.isnan(), again.isnan())
    if not cuts:  # of which the CPU's codec knows what the message says
        with pytest.raises(CorruptMessage, match=says):
            codec.decode(message, torch.empty(n))


# ---- GComp alone


def test_some_of_the_messages_have_escapes() -> None:
    codec, values = GCOMP["paper, few codes"], values_of("gradient", 90)
    counts, lengths = torch.zeros(256, dtype=torch.int64), torch.tensor(codec.table_of_width(8).lengths)
    codec.histogram(values, counts)
    assert int(counts[lengths[:-1] == 0].sum()) > 3
    assert describe(message_of(codec, values, make_importance(90)))["n_raw_chunks"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_pattern_is_the_cpus(kind: str) -> None:
    for codec in GCOMP.values():
        for dtype in NAMES:
            assert_gcomp(kernels(), codec, make_gradient(kind, 700, dtype), make_importance(700))


@pytest.mark.parametrize("name", [name for name in golden.FILES if name.startswith("gcomp/v2_")])
def test_golden_messages_are_written_and_read(name: str) -> None:
    gradient, message, decoded, importance, table = golden.load(name)
    used, codec, out = kernels(), GCompCodec(table=table, **golden.FILES[name].options), torch.empty_like(decoded)
    assert error_of(used, codec, message, out, importance) == 0
    assert same_bits(out, decoded)
    with using(used):
        assert torch.equal(golden.write(golden.FILES[name], gradient, importance, table), message)


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


def test_values_are_added() -> None:
    codec, values, own = GCompCodec("none"), torch.randn(50), torch.randn(50)
    message, sums = message_of(codec, values, make_importance(50)), own.clone()
    with using(kernels()):
        codec.decode(message, sums, adds=True)
    assert torch.equal(sums, own + values)


def test_what_kernels_do_not_do_is_refused() -> None:
    used, message, out = kernels(), torch.empty(200, dtype=torch.uint8), torch.empty(64)
    with using(used):
        with pytest.raises(InvalidArgument, match="importance bytes"):
            GCompCodec("paper").encode(out, message)
        with pytest.raises(InvalidArgument, match="importance bytes"):
            GCompCodec("paper").decode(message, out)
        for call in (GCompCodec("none", format=1).encode, GCompCodec("none", format=1).decode):
            with pytest.raises(Unsupported, match="format 2"):
                call(out, out)
        for codec in (GCompCodec("none"), TruncatedFloat(8)):
            with pytest.raises(InvalidArgument, match="divisor"):
                codec.decode(message, out, adds=True, divisor=2.0)
        for call in (EmbeddedFloat(32).encode, EmbeddedFloat(32).decode):
            with pytest.raises(Unsupported, match="escapes"):
                call(out, out)
        with pytest.raises(InvalidArgument, match="float32 only"):
            QUANTISERS["one-bit"].decode(message, out.half(), adds=True)
        for codec in (Ternary(), Thc()):
            with pytest.raises(Unsupported, match=f"{codec.name} has no kernels"):
                codec.encode(out, message)
    assert used.launched == []
    with pytest.raises(InvalidArgument, match="cuts ascend"):
        QUANTISERS["two-bit by group"].message_room(200, (130, 130))
    with pytest.raises(Unsupported, match="none for 'meta'"):
        QUANTISERS["one-bit"].check_device(torch.device("meta"))


# ---- elements


@pytest.mark.parametrize("name", WRONG_ELEMENTS)
def test_what_no_rank_sends_is_reported_and_not_written_outside(name: str) -> None:
    wrong = WRONG_ELEMENTS[name]
    for used in (None, kernels()):
        fenced = torch.zeros(wrong.n_elements + 16)
        assert_reported(used, wrong, fenced[8:-8])
        assert not fenced[:8].any()
        assert not fenced[-8:].any()


def test_error_words_are_told() -> None:
    raise_selection_error(0)
    for code, says in ((CHECKSUM, "checksum does not match"), (OUTSIDE, "outside of the bucket"), (9, "error word 9")):
        with pytest.raises(CorruptMessage, match=says):
            raise_selection_error(code)


def test_more_values_than_indices_can_tell_are_refused() -> None:
    values = torch.empty(1 << 31, device="meta")
    for take in (lambda: take_largest(values, 1), lambda: take_by_sample(values, [], [], [])):
        with pytest.raises(InvalidArgument, match="at most 2147483647"):
            take()


def test_nothing_is_taken_of_no_tensors() -> None:
    for used in (None, kernels()):
        values = torch.ones(7)
        with contextlib.nullcontext() if used is None else using(used):
            n_taken, indices, taken = take_by_sample(values, [(0, 0), (7, 7)], [0, 0], [Sample(None, 0)] * 2)
        assert (int(n_taken), indices.numel(), taken.numel()) == (0, 0, 0)
        assert bool((values == 1).all())
