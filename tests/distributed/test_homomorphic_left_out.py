"""What homomorphic leaves out, by a sparsifier or by estimates: conserved, and sent later."""

from __future__ import annotations

import torch
from homomorphic_cases import SHAPES, make, parameters

from buckets import LAYOUT, Driver, flat
from gradwire import schemes
from ranks import on_ranks


@on_ranks(3)
def test_results_and_residuals_conserve_the_gradients(rank: int, world_size: int) -> None:
    for options in (
        {"sparsifier": "top-k", "density": 0.05},
        {"mode": "lossy", "budget": 0.05, "error_feedback": True},
        {"integer_bits": 16},
        {"integer_bits": 8},
        {"integer_bits": 16, "mode": "exact"},
        {"integer_bits": 8, "mode": "exact"},
    ):
        driver = Driver(make(**options), parameters(), LAYOUT)
        old = torch.zeros(flat(parameters()).numel())
        for step in range(3):
            mine = [torch.randn(shape) * 2.0**-step for shape in SHAPES]
            driver.loss_scale = 2.0**step
            result = flat(driver.reduce([gradient * driver.loss_scale for gradient in mine])) / driver.loss_scale
            state = driver.scheme.state_dict()["residuals"]
            new = torch.cat([state[f"p{i}"].view(-1) for i in range(len(SHAPES))])
            balance = flat(mine).double() + old.double() - new.double()
            everyone = driver.communicator.submit(driver.communicator.all_gather, balance)
            everyone.wait()
            scale = float(new.abs().max()) + 1
            assert torch.allclose(everyone.value().mean(0), result.double(), atol=2e-5 * scale)
            assert float(new.abs().max()) > 0
            old = new
        stats = driver.scheme.stats()
        assert stats["n_buckets_too_dense"] == stats["n_steps_not_finite"] == 0
        driver.close()


@on_ranks(2)
def test_error_feedback_of_estimates_does_not_grow_without_bound(rank: int, world_size: int) -> None:
    """An estimate at a tenth of the size is off by 3.7 times the value: fed back as it is, it would grow 3.7-fold a step."""
    driver = Driver(make(mode="lossy", budget=0.1, error_feedback=True), parameters(), LAYOUT)
    generator = torch.Generator().manual_seed(rank)
    gradient = [torch.randn(shape, generator=generator) for shape in SHAPES]
    total = torch.zeros(flat(gradient).numel(), dtype=torch.float64)
    n_steps = 120
    for _ in range(n_steps):
        total += flat(driver.reduce([g.clone() for g in gradient])).double()
    state = driver.scheme.state_dict()["residuals"]
    residual = torch.cat([state[f"p{i}"].view(-1) for i in range(len(SHAPES))])
    means = []
    for mine in (residual, flat(gradient)):
        everyone = driver.communicator.submit(driver.communicator.all_gather, mine)
        everyone.wait()
        means.append(everyone.value().double().mean(0))
    driver.close()
    assert float(means[0].norm() / means[1].norm()) < 40
    assert float((total / n_steps - means[1]).norm() / means[1].norm()) < 0.5


@on_ranks(3)
def test_sum_of_sparsified_gradients_is_that_of_top_k_without_gathering(rank: int, world_size: int) -> torch.Tensor:
    results = []
    for scheme in (make(sparsifier="top-k", density=0.02), schemes.by_name("top-k", share=0.02)):
        driver = Driver(scheme, parameters(), LAYOUT)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            result = flat(driver.reduce([torch.randn(shape, generator=generator) for shape in SHAPES]))
        results.append(result)
        driver.close()
    through_sketch, gathered = results
    assert torch.allclose(through_sketch, gathered, atol=1e-5)
    assert torch.equal(through_sketch != 0, gathered != 0)
    return through_sketch
