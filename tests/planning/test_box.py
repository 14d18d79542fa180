"""One machine with several GPUs: what its links are called, and what the arithmetic says of machines that others measured."""

import math
from pathlib import Path

import pytest

from gradwire.errors import InvalidArgument
from gradwire.planning.box import GpuLinks, advise, describe, plan_box
from gradwire.planning.plan import Plan
from gradwire_lab.cli import main

_NODE = """
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tPIX\tNODE\tSYS\tSYS\t0-23,48-71\t0\t\tN/A
GPU1\tPIX\t X \tNODE\tSYS\tSYS\t0-23,48-71\t0\t\tN/A
GPU2\tNODE\tNODE\t X \t%s\tSYS\t0-23,48-71\t0\t\tN/A
GPU3\tSYS\tSYS\t%s\t X \tPIX\t24-47,72-95\t1\t\tN/A
NIC0\tSYS\tSYS\tSYS\tPIX\t X \t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""
_PAIR = "\x1b[4m\tGPU0\tGPU1\tCPU Affinity\x1b[0m\nGPU0\t X \tNV12\t0-15\nGPU1\tNV12\t X \t0-15\n"

# 8 x A40 without NVLink, 1.2 B parameters: EgoVerse, issue 667. Seconds a step on one GPU, under DDP on eight, and with
# PyTorch's bf16 hook, all theirs.
_ONE_GPU_S, _EIGHT_GPUS_S, _BF16_HOOK_S = 1.4, 6.4, 3.6
# 8 GPUs that NCCL joins through host memory: LoongForge, issue 223. An all-reduce of 557 ms in 16 bits beside a backward pass
# of 336 ms; no step's time is published. A forward pass is taken to be half a backward pass, the bus to carry 10 GB/s.
_ALL_REDUCE_S, _BACKWARD_S = 0.557, 0.336


def first_case() -> Plan:
    return plan_box(8, 1.2e9, _ONE_GPU_S, plain_s=_EIGHT_GPUS_S)


def second_case() -> Plan:
    n_values = _ALL_REDUCE_S * 10e9 / (2 * 7 / 8) / 2
    return plan_box(8, n_values, 1.5 * _BACKWARD_S, bus_rate=10e9, gradient_bits=16)


def seconds(plan: Plan) -> dict[str, float]:
    return {describe(forecast.spec): forecast.step_s for forecast in plan.forecasts()}


def test_a_matrix_of_links_is_read_and_said_in_words() -> None:
    there = GpuLinks.from_text(_NODE % ("PHB", "PHB"), "4, 16\n4, 16\n3, 16\n4, 8\n")
    assert there.links[0, 1] == "PIX"
    assert there.links[2, 3] == "PHB"
    assert (there.has_nvlink, there.farthest) == (False, "SYS")
    assert there.pcie_rate == pytest.approx(15.8e9, rel=0.01)
    assert "two sockets, at 15.8 GB/s" in there.sentence()
    mixed = GpuLinks.from_text(_NODE % ("NV4", "NV4"))
    assert not mixed.has_nvlink
    assert math.isinf(mixed.pcie_rate)
    pair = GpuLinks.from_text(_PAIR)
    assert pair.has_nvlink
    assert "leave gradwire out" in pair.sentence()


@pytest.mark.parametrize("text", ["", "no GPUs here", _NODE % ("???", "PHB"), "GPU0 X\nGPU1 PIX"])
def test_what_is_no_matrix_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="nvidia-smi topo -m"):
        GpuLinks.from_text(text)


def test_the_published_step_with_bf16_is_predicted_within_15_percent() -> None:
    """From the step on one GPU, that on eight and the bytes alone."""
    predicted = seconds(first_case())
    assert predicted["plain"] == pytest.approx(_EIGHT_GPUS_S, rel=0.001)
    assert predicted["bf16"] == pytest.approx(_BF16_HOOK_S, rel=0.15)
    assert predicted["8 bits"] < predicted["bf16"]
    assert "take 8 bits" in advise(first_case())


def test_the_case_without_a_published_step_is_bounded_by_what_it_computes_and_sends() -> None:
    predicted = seconds(second_case())
    forward_s = 0.5 * _BACKWARD_S
    assert predicted["plain"] == pytest.approx(forward_s + _ALL_REDUCE_S, rel=0.03)
    assert predicted["8 bits"] > forward_s + _BACKWARD_S
    assert "bf16" not in predicted, "DDP sends 16 bits already"


def test_a_machine_with_nvlink_is_told_to_leave_gradwire_out_and_a_fast_bus_too() -> None:
    assert advise(first_case(), GpuLinks.from_text(_PAIR)).startswith("NVLink joins all GPUs: leave gradwire out")
    fast = plan_box(8, 1.2e9, 1.4, bus_rate=200e9)
    assert "leave gradwire out, nothing wins 3 %" in advise(fast)
    assert fast.plain.step_s < 1.45


@pytest.mark.parametrize(
    "wrong",
    [
        {}, {"plain_s": 1.3},
        *({"plain_s": 6.4, **wrong} for wrong in ({"bus_rate": 1e9}, {"ranks": 1}, {"gradient_bits": 8}, {"parameters": 0})),
    ],
)  # fmt: skip
def test_a_box_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument):
        plan_box(**{"ranks": 8, "parameters": 1.2e9, "compute_s": 1.4, **wrong})


def test_the_command_says_it_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described = "ranks=8,parameters=1.2e9,compute_s=1.4,plain_s=6.4"
    assert main(["recommend", "--box", described, "--json", str(tmp_path / "plan.json")]) == 0
    out = capsys.readouterr().out
    assert "bus bandwidth 1.42 GB/s, as NCCL counts it" in out
    assert "By arithmetic: nothing was measured here" in out
    assert "take 8 bits" in out
    (tmp_path / "topology.txt").write_text(_NODE % ("PHB", "PHB"))
    again = ["recommend", "--profile", str(tmp_path / "plan.json"), "--topology", str(tmp_path / "topology.txt")]
    assert main([*again, "--fidelity", "exact", "--json", str(tmp_path / "plan.json")]) == 0
    assert '"fidelity": "exact"' in (tmp_path / "plan.json").read_text()
    assert "the farthest pair is joined by two sockets" in capsys.readouterr().out
    capsys.readouterr()
    assert main(["recommend", "--box", "ranks=8,wheels=4"]) == 1
    assert "--box takes" in capsys.readouterr().err
