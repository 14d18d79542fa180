"""bench compression-cost: what is timed is the compression that training does, for schemes and PyTorch's hook alike."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradwire.bench import compression_cost
from gradwire.bench.compression_cost_steps import Gradients, HookSteps, SchemeSteps
from gradwire.errors import InvalidArgument
from ranks import run_ranks


def reduce_alone(rank: int, world_size: int) -> dict[str, float]:
    """{contender: |mean of equal gradients at full rank - the gradient| / |gradient|} over three steps."""
    gradients = Gradients("resnet", 1 << 20)
    assert len(gradients.buckets) > 1
    assert gradients.n_elements == sum(p.numel() for p in gradients.names)
    everything = [HookSteps(4, gradients)]
    contenders = everything + [
        SchemeSteps(spec, 4, gradients)
        for spec in ("acp-sgd:start_step=9", "power-sgd:error_feedback=false", "random-k:share=1.0", "top-k:share=1.0")
    ]
    differences = {}
    for contender in contenders:
        for _ in range(3):
            gradients.refill()
            contender.take_step()
        distances = [float((b - v).norm()) for b, v in zip(gradients.buffers, gradients.values, strict=True)]
        differences[contender.name] = sum(distances) / sum(float(v.norm()) for v in gradients.values)
        assert len(contender.parts) in (0, 3)
        contender.close()
    return differences


def test_every_contender_reduces_the_gradient_that_is_timed() -> None:
    differences = run_ranks(reduce_alone, 1)[0]
    assert differences["acp-sgd"] == 0, "steps before start_step are the plain mean of ranks that send the same"
    assert differences["top-k"] < 1e-6
    assert differences["random-k"] < 1e-6
    assert 0.1 < differences["power-sgd"] < 1, "random matrices have no low rank, but what is kept is theirs"
    assert 0.1 < differences["ddp-powersgd"] < 2


def test_command_writes_flat_records_beside_the_hook(tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    command = [
        sys.executable,
        "-m",
        "gradwire",
        "bench",
        "compression-cost",
        "--workload",
        "resnet",
        "--steps",
        "2",
    ]
    command += ["--warmup", "2", "--scheme", "acp-sgd:error_feedback=false", "top-k", "--json", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert result.returncode == 0, result.stderr
    records = json.loads(out.read_text())
    assert [record["scheme"] for record in records] == ["ddp-powersgd", "acp-sgd", "top-k"]
    assert [record["rank"] for record in records] == [4, 4, None]
    assert records[0]["ratio"] == 1.0
    assert records[1]["options"] == "error_feedback=False"
    for record in records[1:]:
        assert 0 < record["encode_s"] < record["step_s"]
        assert record["step_s_low"] <= record["step_s"] <= record["step_s_high"]


@pytest.mark.parametrize(
    "words",
    [["--scheme", "acpsgd"], ["--workload", "bart"], ["--threads", "0"], ["--steps", "0"], ["--warmup", "1"],
     ["--rank", "0"], ["--bucket-mb", "0"]],
)  # fmt: skip
def test_bad_request_is_refused_before_anything_is_measured(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    compression_cost.add_arguments(parser)
    with pytest.raises(InvalidArgument):
        compression_cost.run(parser.parse_args(words))
    assert not dist.is_initialized()
    assert torch.get_num_threads() >= 1
