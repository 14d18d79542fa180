"""Any file of the format loads; every other one is refused with the name of what is wrong or missing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradient_files import adamw_arrays, load, sparse_arrays, write

from gradwire.errors import InvalidArgument, Unsupported
from gradwire_lab.bench.level_rule import make_optimizer
from gradwire_lab.workloads.gradients import collect_arrays, load_gradients


def test_files_load_with_the_state_that_they_hold(tmp_path: Path) -> None:
    """Dense with its optimizer's; sparse, as its dense gradient, and a gradient alone without."""
    file = load(tmp_path, adamw_arrays())
    assert file.name == "a.npz"
    assert file.state is not None
    assert file.state.optimizer == "adamw"
    assert set(file.state.arrays) == {"exp_avg", "exp_avg_sq"}
    assert file.state.hyper["beta2"] == pytest.approx(0.999)
    arrays = sparse_arrays()
    file = load(tmp_path, arrays)
    assert file.state is None
    assert file.gradient.size == 5000
    assert np.array_equal(np.flatnonzero(file.gradient), arrays["nonzero_index"])
    file = load(tmp_path, {"gradient": adamw_arrays()["gradient"]})
    assert file.state is None
    assert "no 'parameter'" in file.missing


WRONG: list[tuple[Callable[[], dict[str, Any]], str, np.ndarray | None, str]] = [
    *((adamw_arrays, missing, None, missing)
      for missing in ("parameter", "exp_avg", "exp_avg_sq", "learning_rate", "beta1", "eps", "step")),
    *((sparse_arrays, missing, None, missing) for missing in ("nonzero_index", "nonzero_value", "n_elements")),
    (adamw_arrays, "exp_avg", np.zeros(7, np.float32), "'exp_avg' has 7 elements, the gradient 3000"),
    (adamw_arrays, "parameter", np.zeros(3000, np.float64), "'parameter' is float64, expected float32"),
    (adamw_arrays, "gradient", np.zeros(0, np.float32), "no elements"),
    (adamw_arrays, "learning_rate", np.zeros(3, np.float32), "'learning_rate' must be a single number"),
    (adamw_arrays, "optimizer", np.array("lion"), "'lion' is not one of"),
    *((sparse_arrays, "nonzero_index", index, "100 different integers below 5000")
      for index in (np.arange(100, dtype=np.int32) + 4950, np.zeros(100, np.int32), np.zeros(100, np.float32),
                    np.arange(99), -np.arange(100))),
]  # fmt: skip


@pytest.mark.parametrize(("arrays", "key", "value", "message"), WRONG)
def test_missing_or_wrong_array_is_named(tmp_path: Path, arrays: Callable, key: str, value: Any, message: str) -> None:
    content = {**arrays(), key: value}
    if value is None:
        del content[key]
    with pytest.raises(InvalidArgument, match=message):
        load(tmp_path, content)


def test_what_is_no_gradient_file_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.npz", adamw_arrays()).read_bytes()
    (tmp_path / "text.npz").write_text("not an archive")
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    for name, message in (("absent", "no such file"), ("text", "not a readable"), ("cut", "not a readable")):
        with pytest.raises(InvalidArgument, match=message):
            load_gradients(tmp_path / f"{name}.npz")
    with pytest.raises(InvalidArgument, match="neither 'gradient' nor"):
        load(tmp_path, {"weights": np.zeros(3, np.float32)})


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dumped_optimizer_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    torch.manual_seed(1)
    parameter = torch.nn.Parameter(torch.randn(40, 5))
    optimizer = OPTIMIZERS[name]([parameter])
    for _ in range(3):
        parameter.grad = torch.randn(40, 5)
        optimizer.step()
    parameter.grad = torch.randn(40, 5)
    file = load(tmp_path, collect_arrays(optimizer, step=4))
    assert file.state is not None
    assert np.array_equal(file.gradient, parameter.grad.numpy().ravel())
    copy = make_optimizer(file.state)
    assert type(copy) is type(optimizer)
    [(held, state)] = copy.state.items()
    assert torch.equal(held, parameter.detach().view(-1))
    for key, value in optimizer.state[parameter].items():
        assert torch.equal(state[key].view(-1), torch.as_tensor(value).view(-1)), key
    for key in ("lr", "momentum", "nesterov", "weight_decay", "betas", "eps", "alpha", "lr_decay"):
        if key in optimizer.param_groups[0]:
            assert copy.param_groups[0][key] == pytest.approx(optimizer.param_groups[0][key]), key


def test_optimizer_without_a_place_in_the_format_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(Unsupported, match="amsgrad"):
        collect_arrays(torch.optim.Adam([parameter], amsgrad=True), 2)
    with pytest.raises(Unsupported, match="NAdam"):
        collect_arrays(torch.optim.NAdam([parameter]), 2)
