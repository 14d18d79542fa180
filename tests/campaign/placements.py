"""Placements: trainings on the late device, staged through host memory or reduced there, against the same on the CPU.

The device (tests/device) runs everything late and in its streams' order, so that a wait that is missing shows as other
bits. Checked: the bits of the CPU (near, where three ranks and more add floats), and the same bits on all ranks.
"""

import itertools
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradwire
from campaign import models
from campaign.findings import Refused, launch, require, results_of
from ranks import patience
from small_training import flat

_DEVICE_TESTS = Path(__file__).parents[1] / "device"
if str(_DEVICE_TESTS) not in sys.path:
    sys.path.append(str(_DEVICE_TESTS))

import emulated  # noqa: E402
import late  # noqa: E402
import late_cases  # noqa: E402
import test_on_device  # noqa: E402

PLACEMENTS = {"staged": late_cases.SCHEMES, "device": test_on_device.SCHEMES}
FEATURES = ("accumulate", "clip", "views", "overflow", "loads a state", "switches", "closes and goes on")
# Do not serve every feature: they own the step, or follow the clock.
_ON_THEIR_OWN = ("auto", "aqgb", "broadcast", "periodic", "slimgc backup", "slimgc that measures")


def draw(choose: random.Random) -> dict[str, Any]:
    placement = choose.choice(list(PLACEMENTS))
    scheme = choose.choice([name for name in PLACEMENTS[placement] if name not in _ON_THEIR_OWN])
    needs_adam = "adam" in scheme
    return {
        "placement": placement,
        "scheme": scheme,
        "world_size": choose.choice([1, 2, 2, 3]),
        "lateness_us": choose.choice([0, 300, 2_000, 5_000]),
        "widths": [choose.choice([1, 7, 60, 130]) for _ in range(choose.randint(1, 3))],
        "dtype": "float32" if needs_adam else choose.choice(["float32", "float32", "bfloat16", "float16"]),
        "optimizer": "adamw" if needs_adam else choose.choice(["adamw", "momentum"]),
        "bucket_cap_mb": choose.choice([0.001, 0.01, 25]),
        "steps": choose.randint(4, 7),
        "features": sorted(choose.sample(FEATURES, choose.choice([0, 1, 2]))) if not needs_adam else [],
    }


def run(case: dict[str, Any]) -> None:
    try:
        libraries = late.build(), emulated.build()
    except Exception as error:
        raise Refused(f"this torch or machine builds no late device: {error}") from error
    results = results_of(launch(train_on_both, case["world_size"], libraries, case, timeout_s=200))
    # Of more than two ranks the backends add floats each in its own order.
    is_near = case["world_size"] > 2 and (
        case["dtype"] != "float32" or case["scheme"].startswith((*test_on_device.SUMS_OF_FLOATS, "plain", "bf16"))
    )
    for rank, (_, found) in enumerate(results):
        require(_is_same(found, results[0][1]), f"on the device rank {rank} ends with other bits than rank 0")
    if not is_near:
        for rank, (expected, found) in enumerate(results):
            off = (found - expected).abs().nan_to_num(0.0).max()
            require(_is_same(found, expected), f"rank {rank} ends {float(off)} off the CPU's run")


def _is_same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(12345.0), other.nan_to_num(12345.0))


def train_on_both(rank: int, world_size: int, libraries: tuple[Path, Path], case: dict[str, Any]) -> tuple[Any, Any]:
    """On every rank: all parameters after the run on the CPU, and after the one on the device."""
    functions, place = test_on_device.begin_with_kernels(libraries[0])
    expected = _train(rank, late_cases.Place(late_cases.CPU), case)
    functions.set_lateness_us(case["lateness_us"])
    return expected, _train(rank, place, case)


def _train(rank: int, place: Any, case: dict[str, Any]) -> Tensor:
    features, dtype, is_late = case["features"], models.DTYPES[case["dtype"]], place.device != late_cases.CPU
    torch.manual_seed(1)
    sizes = [20, *case["widths"], 3]
    layers = [nn.Linear(*ends) for ends in itertools.pairwise(sizes)]
    ddp = place.model(
        nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh()))).to(dtype),
        bucket_cap_mb=case["bucket_cap_mb"], gradient_as_bucket_view="views" in features,
    )  # fmt: skip
    parameters = list(ddp.parameters())
    # In float16 Adam's smallest denominator would be 0; torch's foreach steps, a device's default, round otherwise there.
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.02, momentum=0.9, foreach=False)
    if case["optimizer"] == "adamw":
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3, foreach=False)
    options = {"placement": "device"} if is_late and case["placement"] == "device" else {}

    def attach() -> Any:
        made = PLACEMENTS[case["placement"]][case["scheme"]]()
        return gradwire.attach(ddp, optimizer, made, timeout_s=60 * patience(), **options)

    def loss_of(step: int) -> Tensor:
        batch = late_cases.batch(rank, step, place, dtype)
        return (ddp(batch).float() - 1.0).square().mean()

    attachment = attach()
    for step in range(case["steps"]):
        optimizer.zero_grad()
        if "accumulate" in features:
            with ddp.no_sync():
                loss_of(50 + step).backward()
        has_overflown = "overflow" in features and step == 2
        (loss_of(step) * (torch.inf if has_overflown and rank == 0 else 1.0)).backward()
        if is_late and case.get("plant") == "drift" and rank == 0:
            parameters[0].grad[0] += 1e-2  # type: ignore[index]
        if "clip" in features:
            nn.utils.clip_grad_norm_(parameters, 0.1)
        if not has_overflown:  # as a scaler skips it, on all ranks
            optimizer.step()
        if step != 2:
            continue
        if "loads a state" in features:
            attachment.load_state_dict(attachment.state_dict())
        if "switches" in features:
            attachment.switch("plain")
        if "closes and goes on" in features:
            attachment.close()
            attachment = attach()
    attachment.close()
    return flat(ddp).double()
