"""The importance bytes say what the paper's table says, and what they let go of does not move the parameter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from optimizer_cases import CASES, MANTISSA_BITS, Case, byte_of, expected, finite, stepped, trained, truncate
from torch import Tensor

from float_messages import DTYPES, decode, encode, same_bits
from gradwire import codecs
from gradwire.schemes.gcomp.importance import Promise, QuantisationMetric

N_ELEMENTS = 4000
PUBLISHED = Promise(format=1, rounding="truncate")

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
states = pytest.mark.parametrize(
    ("dtype", "n_steps"), [*((torch.float32, n) for n in (0, 1, 2, 30)), (torch.bfloat16, 5), (torch.float16, 5)]
)


def importance_of(
    optimizer: torch.optim.Optimizer,
    parameter: Tensor,
    world_size: int = 1,
    promise: Promise = PUBLISHED,
    **options: float,
) -> Tensor:
    out = torch.full((parameter.numel(),), 7, dtype=torch.uint8)
    QuantisationMetric(optimizer, world_size, promise).write_importance([parameter], [0], out, **options)
    return out


def assert_bytes_follow(scale: np.ndarray, rounding: np.ndarray, importance: Tensor) -> None:
    """`importance` is the byte of `scale`, or of something within float32's `rounding` of it."""
    found = importance.numpy().astype(np.int64)
    assert (found >= byte_of(np.maximum(scale - rounding, 0))).all()
    assert (found <= byte_of(scale + rounding)).all()
    assert (found == byte_of(scale)).mean() > 0.99


@cases
@states
def test_bytes_are_the_table_in_float64_to_a_quarter_octave(case: Case, dtype: torch.dtype, n_steps: int) -> None:
    optimizer, parameter, gradient = trained(case, n_steps, N_ELEMENTS, dtype, seed=n_steps)
    oracle = expected(optimizer, parameter, gradient)
    sane = finite(parameter) & np.isfinite(oracle.scale)
    assert_bytes_follow(oracle.scale[sane], oracle.rounding[sane], importance_of(optimizer, parameter)[sane])
    assert sane.mean() > (0.9 if dtype != torch.float32 else 0.999)


@cases
@states
def test_dropped_bits_move_the_next_parameter_less_than_the_bound(case: Case, dtype: torch.dtype, n_steps: int) -> None:
    # In float64 the step is exact beside 2^-23: shift < (1 + rho) 2^-23 |A|, A in the parameter's own unit.
    optimizer, parameter, gradient = trained(case, n_steps, N_ELEMENTS, dtype, seed=10 + n_steps)
    truncated, dropped = truncate(gradient, importance_of(optimizer, parameter))
    oracle = expected(optimizer, parameter, gradient)
    exact = stepped(optimizer, parameter, gradient, torch.float64)
    shift = (stepped(optimizer, parameter, truncated, torch.float64) - exact).abs().numpy()
    sane = finite(exact, parameter)
    with np.errstate(over="ignore"):
        bound = (1 + oracle.slack) * 2.0 ** -MANTISSA_BITS[dtype] * (oracle.scale + oracle.rounding) * oracle.gain
    assert (shift <= np.where(dropped > 0, bound, 0))[sane].all()
    assert sane.mean() > (0.9 if dtype != torch.float32 else 0.999)
    if dtype != torch.float32:
        assert (dropped > 0).any()
    elif n_steps > 0 or case.name.startswith(("sgd", "momentum", "nesterov")):
        assert {0, 6, 12} <= set(dropped), "the levels should occur, or the test shows nothing"


@cases
def test_dropped_bits_move_the_next_float32_parameter_at_most_two_last_places(case: Case) -> None:
    optimizer, parameter, gradient = trained(case, 20, N_ELEMENTS, torch.float32, seed=20)
    truncated, dropped = truncate(gradient, importance_of(optimizer, parameter))
    oracle = expected(optimizer, parameter, gradient)
    with_all, with_kept = (stepped(optimizer, parameter, g).numpy() for g in (gradient, truncated))
    largest = np.maximum(np.abs(parameter.detach().numpy()), oracle.scale * oracle.gain).astype(np.float32)
    last_places = np.abs(with_all - with_kept) / np.spacing(largest)
    assert (last_places[dropped == 0] == 0).all()
    assert (last_places <= 2 * (1 + oracle.slack)).all()
    assert np.quantile(last_places, 0.999) <= 2


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[8]], ids=lambda case: case.name)
def test_one_truncation_per_rank_along_a_ring_stays_within_the_same_bound(case: Case, world_size: int) -> None:
    optimizer, parameter, _ = trained(case, 10, N_ELEMENTS, torch.float32, seed=world_size)
    gradients = [trained(case, 0, N_ELEMENTS, torch.float32, seed=world_size + rank)[2] for rank in range(world_size)]
    importance = importance_of(optimizer, parameter, world_size)
    partial_sum, exact_sum = torch.zeros(N_ELEMENTS), torch.zeros(N_ELEMENTS, dtype=torch.float64)
    rounding = np.zeros(N_ELEMENTS)
    for gradient in gradients:
        partial_sum, _ = truncate(partial_sum + gradient, importance)
        exact_sum += gradient
        rounding += 2.0**-24 * np.abs(partial_sum.numpy())
    oracle = expected(optimizer, parameter, gradients[0])
    with_all, with_kept = (
        stepped(optimizer, parameter, total / world_size, torch.float64) for total in (exact_sum, partial_sum.double())
    )
    # Besides the truncations, the float32 additions of the ring round.
    bound = oracle.gain * (2.0**-23 * (oracle.scale + oracle.rounding) + 1.1 * rounding / world_size)
    assert ((with_all - with_kept).abs().numpy() <= bound).all()


@cases
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 7, 8, 100])
def test_world_size_enters_as_n_over_the_next_power_of_two(case: Case, world_size: int) -> None:
    optimizer, parameter, gradient = trained(case, 3, 500, torch.float32, seed=40)
    factor = world_size / 2 ** np.ceil(np.log2(world_size))
    oracle = expected(optimizer, parameter, gradient)
    found = importance_of(optimizer, parameter, world_size)
    assert_bytes_follow(factor * oracle.scale, factor * oracle.rounding, found)


@cases
def test_a_loss_scale_leaves_the_dropped_bits_as_they_were(case: Case) -> None:
    optimizer, parameter, gradient = trained(case, 3, N_ELEMENTS, torch.float32, seed=50)
    _, plainly = truncate(gradient, importance_of(optimizer, parameter))
    _, scaled = truncate(gradient * 1024, importance_of(optimizer, parameter, loss_scale=1024.0))
    in_range = importance_of(optimizer, parameter, loss_scale=1024.0).numpy() < 255
    known = importance_of(optimizer, parameter).numpy() > 0
    np.testing.assert_array_equal(plainly[in_range & known], scaled[in_range & known])


def test_a_gradient_of_fewer_mantissa_bits_than_its_parameter_keeps_them() -> None:
    # DDP with a bfloat16 reduction: dropping n of 7 bits costs 2^16 times what dropping n of 23 does.
    optimizer, parameter, _ = trained(CASES[0], 0, N_ELEMENTS, torch.float32, seed=60)
    own = importance_of(optimizer, parameter).numpy().astype(np.int64)
    out = torch.empty(N_ELEMENTS, dtype=torch.uint8)
    metric = QuantisationMetric(optimizer, 1, PUBLISHED)
    metric.write_importance([parameter], [0], out, gradient_dtype=torch.bfloat16)
    np.testing.assert_array_equal(out.numpy(), np.maximum(own - 4 * 16, 0))


@cases
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_codec_drops_the_bits_that_the_metric_allows_and_no_other(case: Case, dtype: torch.dtype) -> None:
    optimizer, parameter, gradient = trained(case, 5, N_ELEMENTS, dtype, seed=70)
    importance = importance_of(optimizer, parameter)
    expected_values, _ = truncate(gradient, importance)
    expected_values[gradient.abs() < torch.finfo(dtype).tiny] = 0  # subnormals travel as +0
    codec = codecs.by_name("gcomp", format=1, rounding="truncate")
    message = encode(codec, gradient, importance=importance)
    assert same_bits(decode(codec, message, N_ELEMENTS, dtype), expected_values)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 1e-3}),
        (torch.optim.RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.9}),
    ],
)
def test_windows_of_any_size_add_up_to_the_whole(cls: type, options: dict) -> None:
    """Importance asked for chunk by chunk is the whole bucket's, whatever the chunks cut through."""
    torch.manual_seed(0)
    shapes = [torch.randn(100), torch.randn(12, 8, 2, 2).to(memory_format=torch.channels_last), torch.randn(0)]
    parameters = [torch.nn.Parameter(values) for values in [*shapes, torch.randn(3)]]
    optimizer = cls(parameters, **options)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    in_bucket = [*parameters, torch.nn.Parameter(torch.randn(10))]  # the last in no group: byte 0
    offsets, whole = [0, 100, 484, 484, 487], torch.empty(497, dtype=torch.uint8)
    metric = QuantisationMetric(optimizer, world_size=3)
    metric.write_importance(in_bucket, offsets, whole, 4.0)
    assert whole.count_nonzero() > 400
    for window in (1, 7, 64, 1_000):
        pieces = torch.full_like(whole, 77)
        for start in range(0, whole.numel(), window):
            metric.of_bucket(in_bucket, offsets, 4.0).write(start, pieces[start : start + window])
        assert torch.equal(pieces, whole)
