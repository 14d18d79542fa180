"""Replay hands DDP the captured gradients, exact and in backward order, at every step."""

import os
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import CorruptMessage, IncompatibleVersion, InvalidArgument
from gradwire_lab.workloads import by_name
from gradwire_lab.workloads.replay import read_capture
from ranks import run_ranks

SMALL = {"n_layers": 2, "width": 24, "n_heads": 2, "length": 8, "batch_size": 2}


def replay(path: Path, **options):
    return by_name("gpt", compute="emulate", capture=str(path / "gpt"), step_ms=1.0, **SMALL, **options)


def real_gradients(index: int, n_captures: int) -> dict[str, torch.Tensor]:
    """What the capture should hold: the same step, run here."""
    workload = by_name("gpt", **SMALL)
    model = workload.build_model(0)
    workload.loss(model, workload.batch_at(0, index, n_captures, SMALL["batch_size"], 0)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _replayed_gradients(rank: int, world_size: int, path: Path, n_backward: int) -> list[dict[str, torch.Tensor]]:
    workload = replay(path)
    model = workload.build_model(0)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01, **workload.ddp_options())
    batch = workload.batch_at(0, rank, world_size, 1, 0)
    steps = []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        with ddp.no_sync():
            for _ in range(n_backward - 1):
                workload.loss(ddp, batch).backward()
        workload.loss(ddp, batch).backward()
        steps.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return steps


@pytest.mark.parametrize("n_backward", [1, 2, 4])
def test_ddp_reduces_the_captured_gradients_exactly_at_every_step(tmp_path: Path, n_backward: int) -> None:
    replay(tmp_path)
    expected = [real_gradients(index, 2) for index in range(2)]
    for rank, steps in enumerate(run_ranks(_replayed_gradients, 2, tmp_path, n_backward, timeout_s=150)):
        for step in steps:
            assert step.keys() == expected[0].keys()
            for name, gradient in step.items():
                mean = expected[0][name] / 2 + expected[1][name] / 2
                assert torch.equal(gradient, n_backward * mean), (rank, name)


def test_gradients_arrive_in_backward_order_of_the_real_model(tmp_path: Path) -> None:
    def arrivals(workload) -> list[str]:
        model = workload.build_model(0)
        order: list[str] = []
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        workload.loss(model, workload.batch_at(0, 0, 2, SMALL["batch_size"], 0)).backward()
        return order

    real = arrivals(by_name("gpt", **SMALL))
    replayed = arrivals(replay(tmp_path))
    owner = lambda names: [name.rpartition(".")[0] for name in names]  # noqa: E731
    assert sorted(replayed) == sorted(real)
    assert list(dict.fromkeys(owner(replayed))) == list(dict.fromkeys(owner(real)))


def test_replayed_model_has_the_real_names_in_the_real_order(tmp_path: Path) -> None:
    model = replay(tmp_path).build_model(0)
    real = by_name("gpt", **SMALL).build_model(0)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in real.named_parameters()]
    for replayed, expected in zip(model.parameters(), real.parameters(), strict=True):
        assert torch.equal(replayed, expected)


def test_a_step_changes_nothing_unless_updates_are_asked_for(tmp_path: Path) -> None:
    for update in (False, True):
        workload = replay(tmp_path, update=update)
        model = workload.build_model(0)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = workload.build_optimizer(model)
        workload.loss(model, workload.batch_at(0, 0, 1, 1, 0)).backward()
        optimizer.step()
        is_same = all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        assert is_same is not update
    # An update is this process's own, never the file's.
    assert torch.equal(read_capture(tmp_path / "gpt.pt").values[-1], torch.cat([p.flatten() for p in before]))


def test_results_are_marked_as_emulated(tmp_path: Path) -> None:
    description = replay(tmp_path).describe()
    assert description["emulated"] is True
    assert description["compute"] == "emulate"
    assert description["data"] == "replay"
    assert description["calibration"] == "step_ms given by the user"
    assert by_name("gpt").describe()["emulated"] is False


def test_emulated_time_of_all_layers_is_the_step_that_was_asked_for(tmp_path: Path) -> None:
    model = replay(tmp_path).build_model(0)
    assert sum(layer.forward_s + layer.backward_s for layer in model.layers) == pytest.approx(1e-3)


def test_capture_of_another_shape_or_number_is_refused(tmp_path: Path) -> None:
    replay(tmp_path)
    with pytest.raises(InvalidArgument, match="another shape"):
        by_name("gpt", compute="emulate", capture=str(tmp_path / "gpt"), **{**SMALL, "width": 48})
    with pytest.raises(InvalidArgument, match="x 2, not of gpt x 3"):
        replay(tmp_path, n_captures=3)


@pytest.mark.parametrize("harm", ["truncate", "text", "layer", "version"])
def test_damaged_capture_raises_its_typed_error(tmp_path: Path, harm: str) -> None:
    replay(tmp_path)
    file = tmp_path / "gpt.pt"
    content = torch.load(file, weights_only=True)
    if harm == "truncate":
        os.truncate(file, file.stat().st_size // 2)
    elif harm == "text":
        file.write_text("no capture")
    elif harm == "layer":
        content["layers"][0]["names"] *= 2
        torch.save(content, file)
    else:
        torch.save({**content, "format": 99}, file)
    with pytest.raises(IncompatibleVersion if harm == "version" else CorruptMessage):
        replay(tmp_path)
