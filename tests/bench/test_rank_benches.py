"""`bench allreduce` and `bench train` on real ranks: the promised records, verified and counted."""

import gc
import json
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gradient_files import adamw_arrays, write

from gradwire_lab.bench.driver import needs_switch
from gradwire_lab.bench.train_methods import TrainMethod
from gradwire_lab.workloads import by_name
from programs import GRADWIRE, TORCHRUN, run, run_well
from ranks import on_ranks

pytestmark = pytest.mark.usefixtures("warm_interpreters")

_TRAINING = "--ranks 2 --steps 2 --warmup 1 --batch-size 4"


def _bench(folder: Path, words: str, launcher: Sequence[str] = GRADWIRE, **options: Any) -> list[dict[str, Any]]:
    """The flat records that `gradwire bench` writes."""
    out = folder / "out.json"
    run_well([*launcher, "bench", *words.split(), "--json", out], **options)
    records: list[dict[str, Any]] = json.loads(out.read_text())
    assert all(not isinstance(value, dict | list) for record in records for value in record.values())
    return records


def test_allreduce_records_every_scheme_and_size_verified(tmp_path: Path) -> None:
    file = write(tmp_path / "a.npz", adamw_arrays())
    schemes = ["ddp", "ddp-bf16", "plain", "gcomp", "gcomp:importance=uniform,bits=10", "truncate", "zstd"]
    options = f"--ranks 3 --n-bytes 4 40000 --rounds 2 --budget 0.1 --gradients {file}"
    records = _bench(tmp_path, f"allreduce --scheme {' '.join(schemes)} {options}")
    fields = {"scheme", "ranks", "rate_bps", "n_bytes", "time_s", "cpu_s", "wire_bytes", "kernel_bytes", "commit"}
    assert all(fields <= record.keys() for record in records)
    assert [(record["n_bytes"], record["scheme"]) for record in records] == [
        (n_bytes, scheme.partition(":")[0]) for n_bytes in (4, 40000) for scheme in schemes
    ]
    assert all(record["verified"] == "within bound" for record in records)
    assert all(record["ranks"] == 3 and record["rate_bps"] is None for record in records)
    wire = {(record["scheme"], record["options"]): record["wire_bytes"] for record in records[len(schemes) :]}
    assert wire["ddp", ""] == 2 * 2 * 40000 // 3
    assert wire["plain", ""] == pytest.approx(wire["ddp", ""], rel=0.01)  # and what the ranks compare
    assert wire["truncate", ""] < wire["gcomp", ""] < wire["ddp", ""]


def test_allreduce_runs_under_torchrun(tmp_path: Path) -> None:
    words = "allreduce --scheme ddp plain --n-bytes 4096 --rounds 2 --budget 0.1"
    records = _bench(tmp_path, words, [*TORCHRUN, "-m", "gradwire"])
    assert [record["scheme"] for record in records] == ["ddp", "plain"]


def test_train_starts_a_switch_for_who_sums_there(tmp_path: Path) -> None:
    schemes = "ddp homomorphic:mode=exact homomorphic:mode=exact,aggregator=switch"
    ddp, group, switch = _bench(tmp_path, f"train --scheme {schemes} --workload resnet:width=4 {_TRAINING}")
    assert switch["loss"] == group["loss"]  # the same integers, whoever adds them
    assert group["loss"] == pytest.approx(ddp["loss"], rel=1e-3)


def test_dense_and_sparse_all_reduce_through_the_switch_are_verified_and_counted(tmp_path: Path) -> None:
    schemes = "ddp dense-switch homomorphic:mode=exact,aggregator=switch"
    words = "--ranks 2 --n-bytes 1000000 --density 0.01 --rounds 3 --budget 0.1"
    _, dense, sparse = _bench(tmp_path, f"allreduce --scheme {schemes} {words}")
    assert dense["verified"] == "equal on all ranks"
    assert dense["relative_error"] < 1e-6
    n_packets = -(-250_000 // 256) + 1  # the values, and the exponent
    assert n_packets * 1064 <= dense["wire_bytes"] < 1.5 * n_packets * 1064
    assert sparse["wire_bytes"] < 0.1 * dense["wire_bytes"]


def test_a_switch_is_started_for_those_who_sum_in_it_alone() -> None:
    assert needs_switch(["ddp", "dense-switch"])
    assert needs_switch(["homomorphic:mode=exact,aggregator=switch"])
    assert not needs_switch(["ddp", "homomorphic", "homomorphic:aggregator=process-group"])


@on_ranks(2)
def test_methods_are_let_go(rank: int, world_size: int) -> None:
    """A method, its model and its optimizer are gone when it is done: the next one may be as large."""
    workload = by_name("gpt", n_layers=1, width=24, n_heads=2, length=8, batch_size=2)
    eager = "slimgc:threshold_bytes=0"
    for spec in ("ddp", "ddp-one-bit", "gcomp", eager, f"{eager},backup=true", "aqgb"):
        method = TrainMethod(spec, workload, seed=0, has_timeline=True)
        for _ in range(4):
            method.step()
        method.finish_turn()
        seen = [weakref.ref(thing) for thing in (method, method.session.ddp, *method.session.optimizers)]
        method.close()
        del method
        gc.collect()
        assert [ref() for ref in seen] == [None] * 3, spec


def test_train_records_split_bytes_and_loss(tmp_path: Path) -> None:
    schemes = ["ddp", "ddp-fp16", "ddp-bf16", "ddp-powersgd", "ddp-quant8", "plain", "gcomp"]
    records = _bench(tmp_path, f"train --scheme {' '.join(schemes)} --workload resnet:width=16 {_TRAINING}")
    fields = {"scheme", "workload", "ranks", "rate_bps", "iteration_s", "compute_s", "codec_s", "exposed_s", "wait_s"}
    fields |= {"wire_bytes", "loss", "samples_per_s", "loss_after_s", "loss_at_s", "commit"}
    assert all(fields <= record.keys() for record in records)
    assert [record["scheme"] for record in records] == schemes
    by_scheme = {record["scheme"]: record for record in records}
    plain_bytes = by_scheme["plain"]["wire_bytes"]  # and gradwire's comparison of the layouts
    assert plain_bytes == pytest.approx(by_scheme["ddp"]["wire_bytes"], rel=1e-3)
    assert by_scheme["plain"]["loss"] == by_scheme["ddp"]["loss"], "plain is DDP's own all-reduce, bit for bit"
    assert by_scheme["ddp-fp16"]["wire_bytes"] == by_scheme["ddp"]["wire_bytes"] / 2
    for record in records:
        assert record["loss"] == pytest.approx(by_scheme["ddp"]["loss"], rel=0.2)
        assert record["is_interleaved"]
        assert record["compute_s"] > 0
        assert min(record["exposed_s"], record["wait_s"]) >= 0


def test_steps_count_once_slimgc_has_its_table_and_overlap_is_recorded(tmp_path: Path) -> None:
    slimgc = "slimgc:warmup_steps=4"
    schemes = f"ddp ddp-one-bit ddp-two-bit:threshold=0.5 {slimgc} {slimgc},backup=true"
    options = f"--workload gpt:capture={tmp_path}/capture,step_ms=20 --compute emulate --steps 3 --warmup 1 --overlap"
    records = _bench(tmp_path, f"train --scheme {schemes} --ranks 2 {options}")
    assert [record["n_warmup"] for record in records] == [1, 1, 1, 6, 8]
    assert all(record["n_steps"] == 3 for record in records)
    assert records[0]["overlap_s"] is None
    for record in records[1:]:
        assert record["overlap_s"] >= 0
        assert record["codec_s"] >= 0
    for record in records[1:3]:
        assert record["exposed_codec_s"] > 0, "all of it is on the training thread"
        assert record["wire_bytes"] < records[0]["wire_bytes"] / 10


def _altered(folder: Path, alteration: str) -> dict[str, str]:
    """The environment in which every rank begins with `alteration`."""
    lines = ["import os", "if 'RANK' in os.environ:", *(f"    {line}" for line in alteration.splitlines())]
    (folder / "sitecustomize.py").write_text("\n".join(lines))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def test_methods_run_one_after_another_where_memory_is_short(tmp_path: Path) -> None:
    environment = _altered(tmp_path, "import gradwire_lab.bench.train as bench\nbench._MEMORY_SHARE = 0.0")
    words = f"train --scheme plain gcomp truncate --workload resnet:width=8 {_TRAINING}"
    records = _bench(tmp_path, words, env=environment)
    assert [record["scheme"] for record in records] == ["plain", "gcomp", "truncate"]
    assert not any(record["is_interleaved"] for record in records)
    assert len({record["loss_at_s"] for record in records}) == 1


_DIE_AT_THE_SECOND_SIZE = """\
import gradwire_lab.bench.allreduce as bench
measure_size = bench.measure_size
def die_at_the_second(*given):
    if given[-1] == 8192 and os.environ["RANK"] == "1":
        os._exit(7)
    return measure_size(*given)
bench.measure_size = die_at_the_second
"""


def test_rank_that_dies_is_named_and_results_so_far_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = "bench allreduce --scheme ddp --ranks 2 --n-bytes 4096 8192 --rounds 1 --json"
    result = run([*GRADWIRE, *words.split(), out], env=_altered(tmp_path, _DIE_AT_THE_SECOND_SIZE))
    assert result.returncode == 1
    assert "PeerLost" in result.stderr
    assert "rank 1 ended with status 7" in result.stderr
    assert [record["n_bytes"] for record in json.loads(out.read_text())] == [4096]
