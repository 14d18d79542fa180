"""The messages that users meet first say what is wrong, where, and what to do next: each is provoked as a user would."""

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from page_text import DOCS, ROOT
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import attach, codecs, errors, registry, schemes
from gradwire.core.bucket import check_gradient
from gradwire_lab.cli import main
from programs import run
from ranks import try_ranks

Said = dict[str, tuple[str, str]]


_models: list[DistributedDataParallel] = []  # an attachment is closed when its model goes


def wrapped() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(1)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
    _models.append(ddp)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


def load_altered(attachment: Any, **fields: int) -> None:
    attachment.load_state_dict({**attachment.state_dict(), **fields})


def attach_beside_a_hook(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    ddp.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    attach(ddp, optimizer)


def clip_where_the_scheme_steps(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    attach(ddp, optimizer, "broadcast")
    ddp(torch.ones(2, 8)).sum().backward()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
    optimizer.step()


def train_another(model: nn.Module, batch: torch.Tensor) -> None:
    ddp = DistributedDataParallel(model)
    attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), "one-bit")
    ddp(batch).sum().backward()


def go_on_after_close(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    attachment = attach(ddp, optimizer, "one-bit")
    attachment.close()
    attachment.switch("gcomp")


# What a user does, with a model and its optimizer -> the error, what it says is wrong and where, and what it says to do.
MISTAKES: dict[str, tuple[Callable[..., object], type[Exception], list[str], str]] = {
    "attach twice": (
        lambda ddp, optimizer: [attach(ddp, optimizer, scheme) for scheme in ("plain", "gcomp")],
        errors.Unsupported, ["has an attachment already"], "attachment.switch(scheme), or close()",
    ),
    "attach beside a hook": (
        attach_beside_a_hook,
        errors.Unsupported, ["has a communication hook already"], "leave out its register_comm_hook",
    ),
    "swap the arguments": (
        lambda ddp, _: attach(ddp, ddp),
        errors.Unsupported, ["got DistributedDataParallel"], "attach(ddp, optimizer, scheme)",
    ),
    "attach before DDP": (
        lambda ddp, _: attach(ddp, torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)),
        errors.InvalidArgument, ["none of the model's parameters"], "after DDP(...)",
    ),
    "load a model's checkpoint": (
        lambda ddp, optimizer: attach(ddp, optimizer, "one-bit").load_state_dict(ddp.state_dict()),
        errors.CorruptMessage, ["not a gradwire state_dict"], "attachment.state_dict()",
    ),
    "load another scheme's checkpoint": (
        lambda *given: attach(*wrapped(), "one-bit").load_state_dict(attach(*given, "gcomp").state_dict()),
        errors.InvalidArgument, ["'gcomp'", "'one-bit' is"], "attach 'gcomp', load, then",
    ),
    "load another world's checkpoint": (
        lambda *given: load_altered(attach(*given, "one-bit"), world_size=8),
        errors.InvalidArgument, ["8 ranks", "has 2"], "state_dict(all_ranks=True)",
    ),
    "load another rank's checkpoint": (
        lambda *given: load_altered(attach(*given, "one-bit"), rank=1 - dist.get_rank()),
        errors.InvalidArgument, ["rank 0", "rank 1"], "load each rank's own file",
    ),
    "clip where the scheme steps": (
        clip_where_the_scheme_steps, errors.Unsupported, ["parameter 0.weight"], "max_grad_norm=",
    ),
    "train with sparse gradients": (
        lambda *_: train_another(nn.EmbeddingBag(10, 4, sparse=True), torch.zeros(1, 2, dtype=torch.int64)),
        errors.Unsupported, ["sparse gradient"], "Embedding(sparse=False)",
    ),
    "train in double": (
        lambda *_: train_another(nn.Linear(3, 2).double(), torch.ones(1, 3).double()),
        errors.InvalidArgument, ["torch.float64", "float32, bfloat16, float16"], "convert the model",
    ),
    "go on after close": (go_on_after_close, errors.InvalidArgument, ["is closed"], "attach a scheme again"),
}  # fmt: skip


def commit(rank: int, world_size: int) -> Said:
    said = {}
    for mistake, (make, *_) in MISTAKES.items():
        try:
            make(*wrapped())
            said[mistake] = ("nothing", "")
        except Exception as error:
            said[mistake] = (type(error).__name__, str(error))
    return said


@pytest.fixture(scope="module")
def said() -> list[Said]:
    outcomes = try_ranks(commit, 2)
    assert all(outcome.error is None for outcome in outcomes), [outcome.traceback for outcome in outcomes]
    return [outcome.result for outcome in outcomes]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_message_says_what_where_and_what_next(said: list[Said], mistake: str) -> None:
    _, kind, what, cure = MISTAKES[mistake]
    for of_rank in said:
        name, message = of_rank[mistake]
        assert name == kind.__name__, message
        assert [words for words in [*what, cure] if words not in message] == [], message


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: schemes.by_name("gcmop"), ["no scheme is called 'gcmop'; did you mean 'gcomp'? there are: acp-sgd, "]),
        (lambda: schemes.by_name("Power_SGD"), ["did you mean 'power-sgd'"]),
        (lambda: schemes.by_name("acp-sgd", rnk=4), ["has no option 'rnk'; did you mean 'rank'? there are: "]),
        (lambda: schemes.by_name("one-bit:scale=best"), ["scale", "best"]),
        (lambda: schemes.by_name("acp-sgd:rank=4", rank=2), ["rank is given twice", "leave one of them out"]),
        (lambda: schemes.by_name("one-bit", scale="best"), ["scale is one of ", "not 'best'"]),
    ],
)
def test_wrong_name_gets_the_nearest_right_one(make: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(errors.InvalidArgument) as raised:
        make()
    assert [word for word in words if word not in str(raised.value)] == []


def test_tensor_on_a_device_without_a_door_is_told_where_to_go() -> None:
    with pytest.raises(errors.Unsupported, match=r"a gradient on meta: .* gradient\.cpu\(\)"):
        check_gradient(torch.empty(4, device="meta"))


def test_attach_without_a_process_group_names_both_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # as a launcher says
    model = nn.Linear(3, 2)
    words = r"not initialised: .*torchrun.*init_process_group\('gloo'\) before"
    with pytest.raises(errors.InvalidArgument, match=words):
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "plain")


def test_missing_extra_names_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(errors.Unsupported, match=r"pip install '\.\[bench\]'"):
        schemes.by_name("zstd")


def test_a_baseline_of_the_laboratory_says_what_registers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    for by_name in (codecs.by_name, schemes.by_name):
        with pytest.raises(errors.InvalidArgument, match=r"'zlib' is a baseline .* `import gradwire_lab` registers it"):
            by_name("zlib")


def test_command_that_there_is_not_is_answered_by_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["trian"])
    assert re.search(r"\Ausage: .*invalid choice: 'trian' .*train", capsys.readouterr().err, re.DOTALL)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("python", "said"),
    [(sys.executable, "no C++ compiler found (C++20: GCC 11 or Clang 14); Debian and Ubuntu: apt-get install g++"),
     ("/bin/false", "gradwire needs Python 3.10 or newer")],
)  # fmt: skip
def test_make_names_what_is_missing(python: str, said: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "bin").mkdir()
    for tool in ("find", "nproc"):
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    command = [shutil.which("make"), ".venv/bin/python", f"PYTHON={python}"]
    ended = run(command, 60, cwd=tmp_path, env={"PATH": str(tmp_path / "bin")})
    assert ended.returncode != 0
    assert said in ended.stderr


def test_build_without_a_compiler_says_so_in_a_sentence(tmp_path: Path) -> None:
    cmake, ninja = (shutil.which(name, path=str(Path(sys.executable).parent)) for name in ("cmake", "ninja"))
    if cmake is None or ninja is None:
        pytest.skip("needs cmake and ninja")
    command = [cmake, "-S", str(ROOT), "-B", str(tmp_path / "build"), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    ended = run(command, 60, env={"PATH": str(tmp_path)})
    assert ended.returncode != 0
    assert "gradwire needs a C++20 compiler (GCC 11 or Clang 14), and none was found" in " ".join(ended.stderr.split())


def test_every_error_type_has_its_section() -> None:
    page = (DOCS / "errors.md").read_text()
    kinds = [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert [name for name in kinds if f"\n## {name}\n" not in page] == []
    assert [name for name in kinds if name not in gradwire.__all__] == []
