"""docs/doors.md and docs/sites.md: their code runs as it is written (commands: tests/netlab; README: tests/docs)."""

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from ranks import on_ranks, run_ranks

ROOT = Path(__file__).parents[2]
PAGE = "".join((ROOT / "docs" / name).read_text() for name in ("doors.md", "sites.md"))
BLOCKS = re.findall(r"(?:^    .*\n)+", PAGE, re.MULTILINE)
CODE = [re.sub("^    ", "", block, flags=re.MULTILINE) for block in BLOCKS if not block.startswith("    gradwire ")]
# Code in backticks, and the object that it is called on.
SPANS = {
    "gradwire.attach(ddp, optimizer, scheme)": "",
    'gradwire.attach(ddp, optimizer, gradwire.schemes.TwoLevel("gcomp"))': "",
    "gradwire.LocalSgd(model, optimizer, scheme, every=500)": "",
    "gradwire.Reducer(scheme).all_reduce({name: tensor})": "", "attachment.state_dict(all_ranks=True)": "",
    'gradwire.register_backend("gcomp:importance=uniform,bits=12")': "",
    "set_requires_gradient_sync(False)": "sharded.", "set_requires_all_reduce(False)": "sharded.",
    "set_force_sum_reduction_for_comms(True)": "sharded.", "with attachment.no_sync():": "", "optimizer.step()": "",
}  # fmt: skip
# In an example that runs, or said of what gradwire does not test.
ELSEWHERE = {
    "Trainer(callbacks=[GradwireCallback()])": "lightning_fit.py",
    "trainer.add_callback(GradwireTrainerCallback(trainer))": "hf_trainer.py",
    "attach(accelerator, model, optimizer)": "accelerate_train.py",
    "attach(ddp, [muon, adamw])": "",  # tests/distributed/test_several_optimizers.py
    'GradwireCallback(fidelity="close")': "",  # options are handed to `attach` as they are
    **dict.fromkeys(("step()", "wait()", "stats()"), ""),
    "close()": "",  # said of what comes after it
    'attach(ddp, optimizer, "top-k", share=0.05)': "",  # tests/doors has options of every kind
    'attach(model, optimizer, "one-bit", inside="gcomp", weights="exact")': "",  # tests/distributed/test_shards.py
    "pg=gradwire.Members()": "",  # examples/diloco_elastic.py
    'stats()["n_streams"]': "",  # tests/engine/test_connections.py
    "take_shared()": "",  # tests/distributed/test_local_sgd.py
    "gradwire.all_reduce(tensor, group, scheme)": "",  # tests/doors/test_process_group.py
    'group=mesh.get_group("replicate")': "",  # an argument: in the second block
}


def make(is_sharded: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
    names: dict[str, Any] = {
        "gradwire": gradwire, "init_device_mesh": init_device_mesh, "fully_shard": fully_shard, "n_nodes": 2,
        "ranks_per_node": 2, "scheme": "one-bit", "name": "w", "tensor": torch.ones(5), "model": model,
    }  # fmt: skip
    if is_sharded:
        names["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        names["ddp"] = DistributedDataParallel(model)
    names["optimizer"] = torch.optim.AdamW(model.parameters())
    return names


@on_ranks(4)
def test_the_blocks_of_the_page_run(rank: int, world_size: int) -> None:
    assert len(CODE) == 3
    for block in CODE:
        names = make(is_sharded=True)
        for line in block.splitlines():
            if line.startswith("attachment") and "attachment" in names:  # another way to do it
                names["attachment"].close()
            exec(line, names)
            if line.startswith("fully_shard"):  # an optimizer is made of what the model has then
                names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
        before = [p.to_local().clone() for p in names["model"].parameters()]
        names["model"](torch.randn(4, 8)).square().mean().backward()
        names["optimizer"].step()
        assert names["attachment"].step == 1
        assert any(
            not torch.equal(p.to_local(), old) for p, old in zip(names["model"].parameters(), before, strict=True)
        )
        names["attachment"].close()


def run_spans(rank: int, world_size: int, spans: dict[str, str]) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    for span, of in spans.items():
        names = make()
        if of:
            names["sharded"] = fully_shard(names["model"], mesh=init_device_mesh("cpu", (4,)))
        if "attachment." in span:
            names["attachment"] = gradwire.attach(names["model"], names["optimizer"], "plain", timeout_s=100)
        exec(f"done = {of}{span}" if not span.startswith("with ") else f"{span} pass", names)
        done = names.get("done")
        for held in (done, names.get("attachment")):
            if isinstance(held, (gradwire.Reducer, gradwire.LocalSgd)):
                held.close()
        if hasattr(done, "wait"):
            done.wait()


def test_code_in_the_lines_of_the_page_runs() -> None:
    found = {" ".join(span.split()) for span in re.findall(r"`([^`]+)`", PAGE)}
    calls = {span for span in found if "(" in span}
    assert calls == SPANS.keys() | ELSEWHERE.keys(), "say of each call on the page how it is tested"
    run_ranks(run_spans, 4, SPANS)
    for span, example in ELSEWHERE.items():
        call = re.search(r"(?:Gradwire(?:Trainer)?Callback|attach)\(.*?\)", span)
        if example:
            assert call is not None, span
            with_scheme = re.escape(call[0].removesuffix(")")) + r"(, )?args\.scheme\)"
            assert re.search(with_scheme, (ROOT / "examples" / example).read_text()), span
