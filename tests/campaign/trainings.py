"""Random trainings: any scheme, options, model, world, dtype, optimizer and feature of DDP for a few steps.

Checked: the same bits on all ranks at every step; `plain` has the bits of DDP alone; results near the mean, or residuals
that hold what is missing, where the scheme promises it. Schemes that own the step are looked at when they have taken it.
"""

import random
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
from campaign import models
from campaign.findings import hash_of, launch, require, require_equal, results_of
from campaign.schemes_drawn import draw_variant, optimizer_of, variant_of
from ranks import patience
from small_training import GivenParts

FEATURES = ("accumulate", "clip", "evaluate", "look", "schedule", "late group", "join", "switch", "close and go on")
# What a scheme that owns the step serves; clipping is an option there, and join is refused.
FEATURES_OF_OWNERS = ("accumulate", "evaluate", "look", "schedule")


def draw(choose: random.Random) -> dict[str, Any]:
    owner = choose.random() < 0.2
    scheme = draw_variant(choose, owns_step=owner)
    is_given = not owner and choose.random() < 0.5
    case: dict[str, Any] = {
        "scheme": scheme,
        "world_size": choose.choice([1, 2, 2, 3, 3, 4]),
        "model": "given" if is_given else choose.choice([*models.MODELS]),
        "dtype": choose.choice(["float32", "float32", "float32", "bfloat16", "float16"]),
        "optimizer": choose.choice([*models.OPTIMIZERS]),
        "bucket_cap_mb": choose.choice([0.001, 0.005, 0.01, 25]),
        "view": choose.random() < 0.3,
        "static_graph": choose.random() < 0.15,
        "amp": choose.random() < 0.2,
        "steps": choose.randint(5, 8),
        "features": [],
    }
    if is_given:
        case["pattern"] = choose.choice(models.PATTERNS)
        case["amp"] = False  # results are compared with the mean of what was given
        case["optimizer"] = choose.choice(["sgd", "momentum", "adamw"])
        return case
    known = FEATURES_OF_OWNERS if owner else FEATURES
    case["features"] = sorted(choose.sample(known, choose.choice([0, 1, 1, 2])))
    if case["optimizer"] == "fused sgd" and (case["model"] == "branches" or "late group" in case["features"]):
        # With DDP alone too, torch's fused SGD fails where some momenta of a group are younger than others, and takes
        # memory as it comes for momenta where a group's first step overflows.
        case["optimizer"] = "momentum"
    if case["amp"] or owner or case["model"] == "attention":
        case["dtype"] = "float32"
    if "join" in case["features"]:
        case["amp"] = case["static_graph"] = False
        case["features"] = ["join"]
    if case["model"] in ("branches", "recomputed") or {"accumulate", "late group"} & set(case["features"]):
        case["static_graph"] = False
    if "late group" in case["features"] or case["model"] == "oddments":
        case["view"] = False
    return case


def run(case: dict[str, Any]) -> None:
    results = results_of(launch(train, case["world_size"], case))
    variant = variant_of(case)
    if not variant.replicas_may_differ:
        require_equal([result["hashes"] for result in results])
    if case["model"] == "given":
        _check_values(case, results)
    elif variant.name == "plain" and "switch" not in case["features"]:
        require_equal([result["hashes"] for result in results] + [results[0]["hashes alone"]], "plain's and DDP's bits")


def _check_values(case: dict[str, Any], results: list[dict[str, Any]]) -> None:
    variant, dtype = variant_of(case), models.DTYPES[case["dtype"]]
    for step in range(case["steps"]):
        given = [
            _flat(models.gradients_for(case["pattern"], dtype, rank, case["world_size"], step))
            for rank in range(case["world_size"])
        ]
        mean = torch.stack(given).double().mean(0)
        found = results[0]["gradients"][step].double()
        rounding = models.rounding_of(given, dtype)
        if variant.near:
            off = (found - mean).abs()
            if variant.name != "plain":  # sums before it divides, but for float16: docs/reliability.md
                off[_sum_overflows(given, dtype) & found.isinf()] = 0
            worst = int((off - rounding).nan_to_num(nan=torch.inf).argmax())
            require(
                bool((off <= rounding).all()),
                f"step {step}, value {worst}: {found[worst]:g} is not the mean {mean[worst]:g} of "
                f"{[float(one[worst]) for one in given]}",
            )
        elif bool(found.isfinite().all()) and variant.conserves and case["world_size"] > 1:
            _check_conservation(step, results, mean, found, rounding)


def _sum_overflows(given: list[Tensor], dtype: torch.dtype) -> Tensor:
    """(n,) bool: values whose sum over the ranks, in some order, is more than `dtype` holds; never of float16."""
    sums = torch.stack(given).double().abs().sum(0)
    return (sums > torch.finfo(dtype).max) & (dtype != torch.float16)


def _check_conservation(step: int, results: list[Any], mean: Tensor, found: Tensor, rounding: Tensor) -> None:
    residuals = [torch.stack([one["residuals"][at] for one in results]).double() for at in (step, step + 1)]
    old, new = (one.mean(0) for one in residuals)
    scale = float(rounding.max()) + 1e-5 * float(torch.stack([old.abs(), new.abs(), mean.abs(), found.abs()]).max())
    off = (found + new - mean - old).abs()
    worst = int(off.argmax())
    require(
        float(off[worst]) <= scale,
        f"step {step}, value {worst}: result {found[worst]:g} + residual {new[worst]:g} is not "
        f"gradient {mean[worst]:g} + residual {old[worst]:g}",
    )


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def build(case: dict[str, Any]) -> DistributedDataParallel:
    torch.manual_seed(1)
    dtype = models.DTYPES[case["dtype"]]
    is_given = case["model"] == "given"
    model = GivenParts(models.SHAPES, dtype, 1.0) if is_given else models.MODELS[case["model"]]().to(dtype)
    return DistributedDataParallel(
        model,
        bucket_cap_mb=case["bucket_cap_mb"],
        find_unused_parameters=case["model"] == "branches",
        gradient_as_bucket_view=case["view"],
        static_graph=case["static_graph"],
    )


def train(rank: int, world_size: int, case: dict[str, Any]) -> dict[str, Any]:
    """On every rank: the run with the scheme, and for `plain` the one with DDP alone."""
    found = _Run(rank, world_size, case, has_scheme=True).train()
    if variant_of(case).name == "plain" and case["model"] != "given":
        found["hashes alone"] = _Run(rank, world_size, case, has_scheme=False).train()["hashes"]
    return found


class _Run:
    def __init__(self, rank: int, world_size: int, case: dict[str, Any], has_scheme: bool) -> None:
        self.rank, self.world_size, self.case = rank, world_size, case
        self.features = case["features"]
        self.plant = case.get("plant") if rank == world_size - 1 else None
        self.ddp = build(case)
        parameters = [p for p in self.ddp.parameters() if p.requires_grad]
        self.kept_back = parameters[-1:] if "late group" in self.features else []
        self.optimizer = models.OPTIMIZERS[optimizer_of(case)](parameters[: len(parameters) - len(self.kept_back)])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=case["amp"])
        self.variant = variant_of(case)
        self.attachment = self._attach() if has_scheme else None
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.schedule = schedule if "schedule" in self.features else None

    def _attach(self) -> Any:
        scaler = self.scaler if self.case["amp"] else None
        return gradwire.attach(self.ddp, self.optimizer, self.variant.make(), scaler=scaler, timeout_s=60 * patience())

    def train(self) -> dict[str, Any]:
        hashes, gradients, residuals = [], [], [self._residuals()]
        for step in range(self.case["steps"]):
            self._between(step)
            gradients.append(self._step(step))
            residuals.append(self._residuals())
            if self.plant == "drift" and step == 2:
                models.nudge(next(self.ddp.parameters()))
            if not self.variant.owns_step:
                hashes.append(hash_of(self.ddp.module))
        if "join" in self.features:  # at the end: torch makes the models equal then, but not the optimizers
            with self.ddp.join():
                for step in range(2 + self.rank):
                    self._step(100 + step)
        if self.attachment is not None:
            self.attachment.close()
        hashes.append(hash_of(self.ddp.module))
        return {"hashes": hashes, "gradients": gradients, "residuals": residuals}

    def _between(self, step: int) -> None:
        """What scripts do between two steps."""
        if step == 3 and self.kept_back:
            self.optimizer.add_param_group({"params": self.kept_back, "lr": 1e-3})
        if "evaluate" in self.features and step % 3 == 1:
            self.ddp.eval()
            with torch.no_grad():
                self._loss(500)
            self.ddp.train()
        if self.attachment is None:
            return
        if "look" in self.features and step % 2:
            self.attachment.stats()
            self.attachment.flush()
            self.attachment.state_dict()
            self.optimizer.state_dict()
        if "switch" in self.features and step == 3:
            self.attachment.switch("zlib")
        if "close and go on" in self.features and step == 2:
            self.attachment.close()
        if "close and go on" in self.features and step == 4:
            self.attachment = self._attach()

    def _loss(self, step: int) -> Tensor:
        dtype = models.DTYPES[self.case["dtype"]]
        if self.case["model"] == "given":
            given = models.gradients_for(self.case["pattern"], dtype, self.rank, self.world_size, step)
            return self.ddp(given)
        return (self.ddp(models.batch_for(self.rank, step).to(dtype)).float() - 1).square().mean()

    def _step(self, step: int) -> Tensor:
        """One step; the gradients after the backward pass, flat, for given ones."""
        self.optimizer.zero_grad()
        if "accumulate" in self.features:
            with self.ddp.no_sync():
                self.scaler.scale(self._loss(step + 50)).backward()
        loss = self._loss(step)
        if self.case["amp"] and step == 3 and self.rank == 0:
            loss = loss * torch.inf  # one rank's overflow: all skip the step
        self.scaler.scale(loss).backward()
        given = self.case["model"] == "given"
        gradients = _flat([p.grad for p in self.ddp.parameters()]) if given else torch.empty(0)
        if self.case.get("plant") == "scaled" and given:
            gradients = gradients * 1.01
        if "clip" in self.features:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.ddp.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.schedule is not None:
            self.schedule.step()
        return gradients

    def _residuals(self) -> Tensor:
        """(n,) this rank's residuals in the parameters' order, where the case asks for them."""
        if self.attachment is None or self.case["model"] != "given" or not self.variant.conserves:
            return torch.empty(0)
        kept = self.attachment.state_dict()["state"]["residuals"]
        out = [
            kept[name].float().reshape(-1) if name in kept else torch.zeros(parameter.numel())
            for name, parameter in self.ddp.module.named_parameters()
        ]
        flat = torch.cat(out)
        return flat * 0.5 if self.case.get("plant") == "lost" else flat
