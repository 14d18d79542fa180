"""The importance bytes say what the paper's table says, and what they let go of does not move the parameter."""

import numpy as np
import pytest
import torch
from optimizer_cases import CASES, MANTISSA_BITS, OTHERS, byte_of, expected, finite, stepped, trained, truncate
from torch import Tensor
from torch.optim import Optimizer

from float_messages import DTYPES, decode, encode, same_bits
from gradwire import codecs
from gradwire.schemes.gcomp.importance import Promise, QuantisationMetric

N_ELEMENTS = 4000
PUBLISHED = Promise(format=1, rounding="truncate")

DEFAULT = codecs.by_name("gcomp")

cases = pytest.mark.parametrize("case", CASES)
states = pytest.mark.parametrize(
    ("dtype", "n_steps"), [*((torch.float32, n) for n in (0, 1, 2, 30)), (torch.bfloat16, 5), (torch.float16, 5)]
)


def importance_of(
    optimizer: Optimizer, parameter: Tensor, world_size: int = 1, promise: Promise = PUBLISHED, **options: float
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


def sent(gradient: Tensor, importance: Tensor) -> Tensor:
    """`gradient` after one message of the default codec."""
    message = encode(DEFAULT, gradient, importance=importance)
    return decode(DEFAULT, message, gradient.numel(), gradient.dtype, importance=importance)


def moved(optimizer: Optimizer, parameter: Tensor, found: Tensor, exact: Tensor, n_more: int = 0) -> np.ndarray:
    """(n,) float64: how far `found` moves the parameter from where `exact` does."""
    one, other = (stepped(optimizer, parameter, values, torch.float64, n_more) for values in (found, exact))
    return (one - other).abs().numpy()


@cases
@states
def test_bytes_are_the_table_in_float64_to_a_quarter_octave(case: str, dtype: torch.dtype, n_steps: int) -> None:
    optimizer, parameter, gradient = trained(case, n_steps, N_ELEMENTS, dtype, seed=n_steps)
    oracle = expected(optimizer, parameter, gradient)
    sane = finite(parameter) & np.isfinite(oracle.scale)
    assert_bytes_follow(oracle.scale[sane], oracle.rounding[sane], importance_of(optimizer, parameter)[sane])
    assert sane.mean() > (0.9 if dtype != torch.float32 else 0.999)


@cases
@states
def test_dropped_bits_move_the_next_parameter_less_than_the_bound(case: str, dtype: torch.dtype, n_steps: int) -> None:
    # In float64 the step is exact beside 2^-23: shift < (1 + rho) 2^-23 |A|, A in the parameter's own unit.
    optimizer, parameter, gradient = trained(case, n_steps, N_ELEMENTS, dtype, seed=10 + n_steps)
    truncated, dropped = truncate(gradient, importance_of(optimizer, parameter))
    oracle = expected(optimizer, parameter, gradient)
    shift = moved(optimizer, parameter, truncated, gradient)
    sane = finite(stepped(optimizer, parameter, gradient, torch.float64), parameter)
    with np.errstate(over="ignore"):
        bound = (1 + oracle.slack) * 2.0 ** -MANTISSA_BITS[dtype] * (oracle.scale + oracle.rounding) * oracle.gain
    assert (shift <= np.where(dropped > 0, bound, 0))[sane].all()
    assert sane.mean() > (0.9 if dtype != torch.float32 else 0.999)
    if dtype != torch.float32:
        assert (dropped > 0).any()
    elif n_steps > 0 or case.startswith(("sgd", "momentum", "nesterov")):
        assert {0, 6, 12} <= set(dropped), "the levels should occur, or the test shows nothing"


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("case", ["sgd", "momentum dampening decay", "nesterov decay"])
def test_one_truncation_per_rank_along_a_ring_stays_within_the_same_bound(case: str, world_size: int) -> None:
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
    shift = moved(optimizer, parameter, partial_sum.double() / world_size, exact_sum / world_size)
    # Besides the truncations, the float32 additions of the ring round.
    bound = oracle.gain * (2.0**-23 * (oracle.scale + oracle.rounding) + 1.1 * rounding / world_size)
    assert (shift <= bound).all()


@cases
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 7, 8, 100])
def test_world_size_enters_as_n_over_the_next_power_of_two(case: str, world_size: int) -> None:
    optimizer, parameter, gradient = trained(case, 3, 500, torch.float32, seed=40)
    factor = world_size / 2 ** np.ceil(np.log2(world_size))
    oracle = expected(optimizer, parameter, gradient)
    found = importance_of(optimizer, parameter, world_size)
    assert_bytes_follow(factor * oracle.scale, factor * oracle.rounding, found)


@cases
def test_a_loss_scale_leaves_the_dropped_bits_as_they_were(case: str) -> None:
    optimizer, parameter, gradient = trained(case, 3, N_ELEMENTS, torch.float32, seed=50)
    _, plainly = truncate(gradient, importance_of(optimizer, parameter))
    _, scaled = truncate(gradient * 1024, importance_of(optimizer, parameter, loss_scale=1024.0))
    in_range = importance_of(optimizer, parameter, loss_scale=1024.0).numpy() < 255
    known = in_range & (importance_of(optimizer, parameter).numpy() > 0)
    np.testing.assert_array_equal(plainly[known], scaled[known])


def test_a_gradient_of_fewer_mantissa_bits_than_its_parameter_keeps_them() -> None:
    # DDP with a bfloat16 reduction: dropping n of 7 bits costs 2^16 times what dropping n of 23 does.
    optimizer, parameter, _ = trained("sgd", 0, N_ELEMENTS, torch.float32, seed=60)
    own = importance_of(optimizer, parameter).numpy().astype(np.int64)
    out = torch.empty(N_ELEMENTS, dtype=torch.uint8)
    metric = QuantisationMetric(optimizer, 1, PUBLISHED)
    metric.write_importance([parameter], [0], out, gradient_dtype=torch.bfloat16)
    np.testing.assert_array_equal(out.numpy(), np.maximum(own - 4 * 16, 0))


@cases
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_codec_drops_the_bits_that_the_metric_allows_and_no_other(case: str, dtype: torch.dtype) -> None:
    optimizer, parameter, gradient = trained(case, 5, N_ELEMENTS, dtype, seed=70)
    importance = importance_of(optimizer, parameter)
    expected_values, _ = truncate(gradient, importance)
    expected_values[gradient.abs() < torch.finfo(dtype).tiny] = 0  # subnormals travel as +0
    codec = codecs.by_name("gcomp", format=1, rounding="truncate")
    message = encode(codec, gradient, importance=importance)
    assert same_bits(decode(codec, message, N_ELEMENTS, dtype), expected_values)


@pytest.mark.parametrize("case", ["momentum", "adamw", "rmsprop centered momentum"])
def test_windows_of_any_size_add_up_to_the_whole(case: str) -> None:
    """Importance asked for chunk by chunk is the whole bucket's, whatever the chunks cut through."""
    torch.manual_seed(0)
    shapes = [torch.randn(100), torch.randn(12, 8, 2, 2).to(memory_format=torch.channels_last), torch.randn(0)]
    parameters = [torch.nn.Parameter(values) for values in [*shapes, torch.randn(3)]]
    optimizer = CASES[case](parameters)
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


# ---- the promise, which the default codec keeps


@pytest.mark.parametrize(("tolerance", "n_elements"), [(0.25, 4000), (1.0, 4000), (32.0, 1 << 16)])
@cases
def test_the_promise_is_kept_and_not_over_kept(case: str, tolerance: float, n_elements: int) -> None:
    optimizer, parameter, gradient = trained(case, 20, n_elements, torch.float32, seed=80)
    importance = importance_of(optimizer, parameter, promise=Promise(tolerance))
    oracle = expected(optimizer, parameter, gradient)
    promised = tolerance * 2.0**-23 * (oracle.scale + oracle.rounding) * oracle.gain
    shift = moved(optimizer, parameter, sent(gradient, importance), gradient)
    known = (importance > 0).numpy()
    assert (shift <= np.where(known, (1 + oracle.slack) * promised, 0)).all()
    assert (shift[known] / promised[known]).max() > 0.9


def test_a_short_vector_keeps_a_tolerance_of_one() -> None:
    for n_elements, is_loose in ((4000, False), (1 << 16, True)):
        optimizer, parameter, _ = trained("sgd", 1, n_elements, torch.float32, seed=81)
        one, loose = (importance_of(optimizer, parameter, promise=Promise(tolerance)) for tolerance in (1.0, 4.0))
        assert torch.equal(loose, one) != is_loose


@pytest.mark.parametrize("world_size", [2, 3, 4, 16])
@pytest.mark.parametrize("case", ["sgd", "momentum dampening decay", "adagrad"])
def test_the_roundings_of_a_ring_move_as_much_as_one_message_in_the_mean_square(case: str, world_size: int) -> None:
    """Each is as likely up as down; what the ring's additions in float32 lose is not theirs."""
    optimizer, parameter, _ = trained(case, 10, N_ELEMENTS, torch.float32, seed=82)
    promise = Promise()
    importance = importance_of(optimizer, parameter, world_size, promise=promise)
    of_mean = torch.where(importance > 0, importance.int() + promise.mean_room(world_size), 0).clamp(max=255).byte()
    partial_sum, lost = torch.zeros(N_ELEMENTS), torch.zeros(N_ELEMENTS, dtype=torch.float64)
    for rank in range(world_size):
        total = partial_sum + trained(case, 0, N_ELEMENTS, torch.float32, seed=83 + rank)[2]
        partial_sum = sent(total, importance if rank < world_size - 1 else of_mean)
        lost += partial_sum.double() - total
    promised = 2.0**-23 * expected(optimizer, parameter, total).scale
    share = (lost.abs().numpy() / world_size / promised)[(importance > 0).numpy()]
    # Of one message: 1/sqrt(3) of its largest, which is half to all of what is promised.
    assert 0.25 < np.sqrt((share**2).mean()) < 0.6
    assert share.max() < world_size**0.5


@pytest.mark.parametrize(
    "case",
    [
        "momentum", "momentum dampening decay", "nesterov", "nesterov decay", "rmsprop momentum", "adam", "adamw",
        "nadam", "nadam decay",
    ],
)  # fmt: skip
def test_the_horizon_of_a_life_holds_for_all_that_a_gradient_adds(case: str) -> None:
    optimizer, parameter, gradient = trained(case, 20, N_ELEMENTS, torch.float32, seed=84)
    size = 2.0**-23 * stepped(optimizer, parameter, torch.zeros_like(gradient), torch.float64).abs().numpy()
    share = {}
    for horizon in ("step", "life"):
        importance = importance_of(optimizer, parameter, promise=Promise(horizon=horizon))
        shift = moved(optimizer, parameter, sent(gradient, importance), gradient, n_more=80)
        share[horizon] = float(np.quantile((shift / size)[(importance > 0).numpy()], 0.95))
    assert share["life"] < 1.1
    assert share["step"] > 1.5 * share["life"]


@pytest.mark.parametrize("case", OTHERS)
def test_terms_beyond_the_papers_keep_the_promise_too(case: str) -> None:
    """But for the share by which a gradient's own effect on the moments adds to its direct one."""
    optimizer, parameter, gradient = trained(case, 20, N_ELEMENTS, torch.float32, seed=85)
    importance = importance_of(optimizer, parameter, promise=Promise())
    size = 2.0**-23 * stepped(optimizer, parameter, torch.zeros_like(gradient), torch.float64).abs().numpy()
    known = (importance > 0).numpy()
    share = (moved(optimizer, parameter, sent(gradient, importance), gradient) / size)[known]
    assert known.mean() > 0.95
    assert 0.4 < np.quantile(share, 0.95) < 1.1
    assert np.quantile(share, 0.999) < 12


def test_lion_keeps_the_last_place_of_what_decides_the_sign() -> None:
    class Lion(Optimizer):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise AssertionError("read only")

    _, parameter, gradient = trained("sgd", 1, N_ELEMENTS, torch.float32, seed=86)
    optimizer, moment = Lion([parameter], {"lr": 1e-4, "betas": (0.9, 0.99)}), 0.3 * gradient.roll(1)
    assert not importance_of(optimizer, parameter).any()
    optimizer.state[parameter] = {"exp_avg": moment}
    importance = importance_of(optimizer, parameter, promise=Promise())
    share = 0.1 * (sent(gradient, importance).double() - gradient).abs() / (2.0**-23 * 0.9 * moment.double().abs())
    assert 0.9 < share.max() <= 1 + 1e-6


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(48, 160), (160, 48)])
def test_muon_keeps_the_promise_in_the_mean_square_of_a_matrix(shape: tuple[int, int], nesterov: bool) -> None:
    torch.manual_seed(87)
    parameter = torch.nn.Parameter(torch.randn(shape) / 20)
    optimizer = torch.optim.Muon([parameter], lr=0.02, momentum=0.9, nesterov=nesterov)
    for _ in range(10):
        parameter.grad = torch.randn(shape) * 1e-3
        optimizer.step()
    gradient, moment = torch.randn(shape) * 1e-3, optimizer.state[parameter]["momentum_buffer"].double()

    def update(values: Tensor) -> Tensor:
        new = 0.9 * moment + 0.1 * values.double()
        x = 0.1 * values.double() + 0.9 * new if nesterov else new
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x - 4.775 * gram @ x + 2.0315 * gram @ gram @ x
        return 0.02 * max(1, shape[0] / shape[1]) ** 0.5 * x

    importance = importance_of(optimizer, parameter, promise=Promise())
    found = sent(gradient.flatten(), importance).view(shape)
    shift = (update(found) - update(gradient)).square().mean().sqrt()
    promised = 2.0**-23 * parameter.detach().double().square().mean().sqrt()
    assert 0.05 * promised < shift <= promised
