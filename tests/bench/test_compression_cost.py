"""The cost of compression: what is timed is the compression that training does, for schemes and PyTorch's hook alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.errors import InvalidArgument
from gradwire_lab.bench.measures import Call, compression_cost
from gradwire_lab.bench.measures.compression_cost import Asked, Gradients, HookSteps, SchemeSteps
from ranks import run_ranks

pytestmark = pytest.mark.usefixtures("warm_interpreters")


def reduce_alone(rank: int, world_size: int) -> dict[str, float]:
    """{method: |mean of equal gradients at full rank - the gradient| / |gradient|} over three steps."""
    gradients = Gradients("resnet", 1 << 20)
    assert len(gradients.buckets) > 1
    assert gradients.n_elements == sum(parameter.numel() for parameter in gradients.parameters.values())
    everything = [HookSteps(4, gradients)]
    methods = everything + [
        SchemeSteps(spec, 4, gradients)
        for spec in ("acp-sgd:start_step=9", "power-sgd:error_feedback=false", "random-k:share=1.0", "top-k:share=1.0")
    ]
    differences = {}
    for method in methods:
        for _ in range(3):
            gradients.refill()
            method.take_step()
        distances = [float((b - v).norm()) for b, v in zip(gradients.buffers, gradients.values, strict=True)]
        differences[method.name] = sum(distances) / sum(float(v.norm()) for v in gradients.values)
        assert len(method.parts) in (0, 3)
        method.close()
    return differences


def test_every_method_reduces_the_gradient_that_is_timed() -> None:
    differences = run_ranks(reduce_alone, 1)[0]
    assert differences["acp-sgd"] == 0, "steps before start_step are the plain mean of ranks that send the same"
    assert differences["top-k"] < 1e-6
    assert differences["random-k"] < 1e-6
    assert 0.1 < differences["power-sgd"] < 1, "random matrices have no low rank, but what is kept is theirs"
    assert 0.1 < differences["ddp-powersgd"] < 2


def test_records_are_flat_and_beside_the_hook(tmp_path: Path) -> None:
    schemes = ["acp-sgd:error_feedback=false", "ddp-powersgd", "top-k"]
    cells = [{"workload": "resnet", "scheme": scheme} for scheme in schemes]
    call = Call("k", cells, {"workload": "resnet"}, {"steps": 2, "warmup": 2}, tmp_path)
    found = {cell["scheme"]: record for cell, record in compression_cost.measure(call)}
    assert list(found) == schemes
    assert [found[scheme]["rank"] for scheme in schemes] == [4, 4, None]
    assert found["ddp-powersgd"]["ratio"] == 1.0
    assert found[schemes[0]]["options"] == "error_feedback=False"
    for scheme in (schemes[0], "top-k"):
        record = found[scheme]
        assert 0 < record["encode_s"] < record["step_s"]
        assert record["step_s_low"] <= record["step_s"] <= record["step_s_high"]


@pytest.mark.parametrize(
    "changes",
    [{"schemes": ["acpsgd"]}, {"workload": "bart"}, {"threads": 0}, {"steps": 0}, {"warmup": 1}, {"rank": -1},
     {"bucket_mb": 0}],
)  # fmt: skip
def test_bad_request_is_refused_before_anything_is_measured(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        Asked(**{"workload": "resnet50", "schemes": ["acp-sgd"], **changes})
    assert not dist.is_initialized()
    assert torch.get_num_threads() >= 1
