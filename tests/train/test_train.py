"""The training job: same result on all ranks, resumption bit by bit, records, and clear errors."""

import argparse
import functools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from gradwire.errors import CorruptMessage, IncompatibleVersion, InvalidArgument, RankMismatch, Unsupported
from gradwire_lab import cli
from gradwire_lab.cli import train
from gradwire_lab.training import TrainConfig, TrainResult, checkpoints, train_rank
from gradwire_lab.training.launching import check, given_config, to_text
from gradwire_lab.workloads.gpt import GptWorkload

pytestmark = pytest.mark.usefixtures("warm_interpreters")

# A busy machine needs its time: these are tests of results, and pytest's own time limit catches a hang.
run_ranks = functools.partial(ranks.run_ranks, timeout_s=150)
try_ranks = functools.partial(ranks.try_ranks, timeout_s=150)

TINY_GPT = {"n_layers": 1, "width": 32, "n_heads": 2, "length": 16, "batch_size": 2}
CONFIG = TrainConfig(workload="gpt", workload_options=TINY_GPT, scheme="plain", steps=6, evaluate=False)


def _train(rank: int, world_size: int, config: TrainConfig) -> TrainResult:
    return train_rank(config)


def _train_each(rank: int, world_size: int, configs: list[TrainConfig]) -> list[TrainResult]:
    return [train_rank(config) for config in configs]


def _spoil_and_train(rank: int, world_size: int, config: TrainConfig) -> TrainResult:
    """Rank 1 starts from other weights, and DDP is told not to correct it."""
    GptWorkload.ddp_options = lambda self: {"init_sync": False}
    return train_rank(replace(config, seed=config.seed + rank))


def _assert_refused(function: Any, world_size: int, config: TrainConfig, error: type, words: str = "") -> None:
    for outcome in try_ranks(function, world_size, config):
        assert isinstance(outcome.error, error), outcome
        assert words in str(outcome.error)


def _train_in_turn(*configs: TrainConfig) -> list[TrainResult]:
    """Rank 0's results of two ranks that run all of these."""
    return run_ranks(_train_each, 2, list(configs))[0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_end_with_the_same_parameters_and_records(world_size: int) -> None:
    results = run_ranks(_train, world_size, CONFIG)
    assert len({result.parameters_sha256 for result in results}) == 1
    assert all(result.losses == results[0].losses for result in results)
    assert len(results[0].losses) == CONFIG.steps
    assert results[0].losses[-1] < results[0].losses[0]


def test_plain_scheme_trains_as_ddp_does_and_runs_repeat() -> None:
    plain, ddp, again, other = _train_in_turn(CONFIG, replace(CONFIG, scheme="ddp"), CONFIG, replace(CONFIG, seed=1))
    assert plain.losses == ddp.losses == again.losses
    assert plain.parameters_sha256 == ddp.parameters_sha256 == again.parameters_sha256
    assert other.parameters_sha256 != plain.parameters_sha256
    # plain also compares steps and layouts over the ranks: tens of bytes a step.
    assert 0 < plain.summary["wire_bytes"] - ddp.summary["wire_bytes"] < 200
    assert (plain.summary["wire_bytes_origin"], ddp.summary["wire_bytes_origin"]) == ("counted", "computed for a ring")


def test_shards_train_as_whole_models_do_and_are_evaluated_whole() -> None:
    exact = {"gradients": "plain", "weights": "exact"}
    whole, shards, coded = _train_in_turn(*(
        replace(CONFIG, scheme=scheme, scheme_options=options, evaluate=True)
        for scheme, options in (("ddp", {}), ("fully-shard", {}), ("fsdp2-shards", exact))
    ))  # fmt: skip
    assert coded.parameters_sha256 == shards.parameters_sha256, "weights and sums bit for bit"
    assert coded.losses == shards.losses
    assert shards.losses == pytest.approx(whole.losses, abs=1e-5)
    assert shards.summary["held_out_loss"] == pytest.approx(whole.summary["held_out_loss"], abs=1e-5)
    origins = [run.summary["wire_bytes_origin"] for run in (shards, coded)]
    assert origins == ["computed for a ring", "counted"]
    assert 0 < coded.summary["wire_bytes"] < shards.summary["wire_bytes"] < 1.5 * whole.summary["wire_bytes"] + 1


def test_what_shards_cannot_be_combined_with_is_refused(tmp_path: Path) -> None:
    for given in ({"checkpoint": tmp_path}, {"local_sgd": 2}, {"device": "cuda"}):
        with pytest.raises(InvalidArgument, match="cuts the model into shards"):
            TrainConfig(scheme="fully-shard", **given)
    with pytest.raises(InvalidArgument, match="expected param or reduce"):
        check(replace(CONFIG, scheme="fully-shard", scheme_options={"param": "int8"}))


def test_torchs_hooks_send_half_and_train_almost_as_ddp_does() -> None:
    names = ("ddp", "ddp-bf16", "ddp-fp16", "bf16")
    ddp, bf16, fp16, scheme = _train_in_turn(*(replace(CONFIG, scheme=name) for name in names))
    assert bf16.summary["ratio"] == fp16.summary["ratio"] == 0.5
    assert bf16.summary["wire_bytes_origin"] == "computed for a ring"
    assert bf16.losses == scheme.losses, "the scheme is PyTorch's hook"
    for half in (bf16, fp16):
        assert half.losses != ddp.losses
        assert half.losses == pytest.approx(ddp.losses, abs=1e-2)


def test_torchs_power_sgd_is_plain_and_then_low_rank() -> None:
    powersgd = replace(CONFIG, scheme="ddp-powersgd", scheme_options={"rank": 2, "start": 3})
    ddp, low_rank = _train_in_turn(replace(CONFIG, scheme="ddp"), powersgd)
    ratios = [step["ratio"] for step in low_rank.steps]
    assert ratios[:3] == [1.0] * 3
    assert 0 < ratios[3] < 0.6
    assert len(set(ratios[3:])) == 1
    assert low_rank.losses[:4] == ddp.losses[:4], "a loss is that of the step before it was changed"
    assert low_rank.losses[4] != ddp.losses[4]


@pytest.mark.parametrize(("workload", "options"), [("gpt", TINY_GPT), ("resnet", {"width": 4, "batch_size": 8})])
@pytest.mark.parametrize("scheme", ["plain", "ddp", "gcomp"])
def test_resumed_run_has_the_bits_of_one_rewrapped(tmp_path: Path, workload: str, options: dict, scheme: str) -> None:
    schedule = {"schedule": "cosine", "schedule_steps": 20, "warmup_steps": 2}
    whole = replace(CONFIG, workload=workload, workload_options=options | schedule, scheme=scheme)
    reference = replace(whole, rewrap_at=(4,), out=tmp_path / "reference")
    part = replace(whole, steps=4, checkpoint=tmp_path / "checkpoints", out=tmp_path / "run")
    rest = replace(part, steps=6, resume=True)
    uninterrupted, _, resumed = _train_in_turn(reference, part, rest)
    assert resumed.parameters_sha256 == uninterrupted.parameters_sha256
    assert resumed.losses == uninterrupted.losses[4:]

    def lines(name: str) -> list[tuple[int, float]]:
        records = [json.loads(line) for line in (tmp_path / name / "steps.jsonl").read_text().splitlines()]
        return [(record["step"], record["loss"]) for record in records]

    assert lines("run") == lines("reference") == list(enumerate(uninterrupted.losses))


def test_only_the_two_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    run_ranks(_train, 2, replace(CONFIG, checkpoint=tmp_path, save_every=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000006"]
    newest = checkpoints.find_newest(tmp_path)
    assert sorted(path.name for path in newest.iterdir()) == ["rank-0.pt", "rank-1.pt", "shared.pt"]


@pytest.mark.parametrize(
    ("world_size", "changes", "error", "words"),
    [
        (1, {}, RankMismatch, "written by 2 ranks, this run has 1"),
        (2, {"seed": 9}, InvalidArgument, "seed=0"),
        (2, {"scheme": "ddp"}, InvalidArgument, "scheme='plain'"),
        (2, {"batch_size": 3}, InvalidArgument, "batch_size=None"),
        (2, {"workload_options": {**TINY_GPT, "width": 16}}, InvalidArgument, "workload_options"),
        (2, {"steps": 6}, InvalidArgument, "already at step 6"),
    ],
)
def test_checkpoint_of_another_run_is_refused_on_every_rank(
    tmp_path: Path, world_size: int, changes: dict, error: type, words: str
) -> None:
    run_ranks(_train, 2, replace(CONFIG, checkpoint=tmp_path))
    resuming = replace(CONFIG, checkpoint=tmp_path, resume=True, **{"steps": 8, **changes})
    _assert_refused(_train, world_size, resuming, error, words)


def _without_version(folder: Path) -> None:
    content = torch.load(folder / "shared.pt", weights_only=True)
    torch.save({**content, "format": 99}, folder / "shared.pt")


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (lambda folder: os.truncate(folder / "shared.pt", 200), CorruptMessage),
        (lambda folder: (folder / "rank-0.pt").unlink(), CorruptMessage),
        (lambda folder: torch.save({"a": 1}, folder / "shared.pt"), CorruptMessage),
        (_without_version, IncompatibleVersion),
        # not a plain value: weights_only refuses it
        (lambda folder: torch.save(CONFIG, folder / "shared.pt"), CorruptMessage),
    ],
    ids=["truncate", "missing", "foreign", "version", "code"],
)
def test_damaged_checkpoint_raises_its_typed_error(tmp_path: Path, harm, error: type) -> None:
    run_ranks(_train, 1, replace(CONFIG, steps=2, checkpoint=tmp_path))
    harm(tmp_path / "step-00000002")
    _assert_refused(_train, 1, replace(CONFIG, checkpoint=tmp_path, resume=True), error)


def test_checkpoint_that_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    config = replace(CONFIG, steps=2, checkpoint=tmp_path / "file" / "folder")
    _assert_refused(_train, 2, config, RankMismatch, "could not write the checkpoint")


def test_replicas_that_may_differ_are_reported_and_not_checkpointed(tmp_path: Path) -> None:
    config = replace(CONFIG, scheme="periodic", scheme_options={"every": 4}, steps=6)
    result = run_ranks(_train, 2, config)[0]
    assert result.summary["replicas_equal"] is False
    _assert_refused(_train, 2, replace(config, checkpoint=tmp_path), Unsupported)


def test_replicas_that_come_apart_are_named() -> None:
    _assert_refused(_spoil_and_train, 2, replace(CONFIG, scheme="ddp", steps=2), RankMismatch, "rank(s) [1]")


def test_records_hold_what_a_report_needs(tmp_path: Path) -> None:
    run_ranks(_train, 2, replace(CONFIG, out=tmp_path, evaluate=True, steps=3))
    config, summary = (json.loads((tmp_path / name).read_text()) for name in ("config.json", "summary.json"))
    assert config["scheme"] == "plain"
    assert config["ranks"] == 2
    assert config["n_parameters"] == summary["n_parameters"]
    assert summary["held_out_loss"] > 0
    assert len(summary["parameters_sha256"]) == 64
    assert {"rate_bps", "iteration_s", "compute_s", "codec_s", "exposed_s", "wire_bytes", "loss"} <= summary.keys()
    for line in (tmp_path / "steps.jsonl").read_text().splitlines():
        record = json.loads(line)
        # Two ranks: 2 (N-1)/N = 1; and what they compare, tens of bytes.
        assert 0 < record["bytes_sent"] - record["original_bytes"] < 200
        for key in ("loss", "iteration_s", "elapsed_s", "exposed_s", "encode_s", "decode_s", "ratio"):
            assert record[key] >= 0


def test_ranks_are_given_the_configuration_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(
        workload="resnet", workload_options={"optimizer": "sgd", "learning_rate": 0.1, "compute": "emulate"},
        scheme="gcomp", scheme_options={"importance": None, "limit": 11}, steps=7, batch_size=4, seed=3,
        deterministic=False, n_threads=2, bucket_cap_mb=0.5, out=Path("o"), trace=True, checkpoint=Path("c"),
        resume=True, save_every=5, rewrap_at=(2, 4), evaluate=False,
    )  # fmt: skip
    for one in (config, TrainConfig()):
        monkeypatch.setenv("GRADWIRE_TRAIN_CONFIG", to_text(one))
        assert given_config() == one


def test_command_line_says_all_of_a_configuration() -> None:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    words = "--workload resnet --workload-option optimizer=sgd --compute emulate --scheme gcomp:limit=11 --steps 7"
    words += (
        " --seed 3 --batch-size 4 --no-deterministic --threads 2 --bucket-mb 0.5 --out o --trace --dump-gradients 2"
    )
    words += " --local-sgd 3 --outer average --feedback-decay 0.9 --no-evaluate"
    expected = TrainConfig(
        workload="resnet", workload_options={"optimizer": "sgd", "compute": "emulate"}, scheme="gcomp",
        scheme_options={"limit": 11}, steps=7, batch_size=4, seed=3, deterministic=False, n_threads=2, bucket_cap_mb=0.5,
        out=Path("o"), trace=True, dump_gradients_every=2, evaluate=False, local_sgd=3, outer="average", feedback_decay=0.9,
    )  # fmt: skip
    assert train.configs_from(parser.parse_args(words.split())) == [expected]
    words = "--scheme plain --steps 7 --checkpoint c --resume --save-every 5 --rewrap-at 2 4"
    expected = TrainConfig(scheme="plain", steps=7, checkpoint=Path("c"), resume=True, save_every=5, rewrap_at=(2, 4))
    assert train.configs_from(parser.parse_args(words.split())) == [expected]


def test_local_sgd_exchanges_every_few_steps_and_may_end_between_two() -> None:
    every_3 = replace(CONFIG, local_sgd=3)
    shorter = [replace(every_3, steps=steps) for steps in (5, 3)]
    in_parts = replace(every_3, fragments=3, delay=0)
    three, two, one, parts, full = _train_in_turn(every_3, *shorter, in_parts, CONFIG)
    sent = [record["bytes_sent"] > 0 for record in three.steps]
    assert sent == [False, False, True, False, False, True]
    assert three.summary["replicas_equal"]
    assert two.summary["parameters_sha256"] == one.summary["parameters_sha256"], "what ranks share"
    assert all(record["bytes_sent"] > 0 for record in parts.steps)
    assert parts.summary["replicas_equal"]
    assert three.steps[2]["bytes_sent"] == pytest.approx(full.steps[2]["bytes_sent"], rel=0.1)
    assert [record["ratio"] for record in three.steps[:2]] == [0, 0]
    for wrong in ({"scheme": "ddp"}, {"checkpoint": Path("x")}, {"rewrap_at": (2,)}):
        with pytest.raises(InvalidArgument, match="local SGD"):
            replace(every_3, **wrong)
    with pytest.raises(InvalidArgument, match="local_sgd=-1"):
        replace(CONFIG, local_sgd=-1)
    with pytest.raises(InvalidArgument, match="outer is one of"):
        replace(CONFIG, outer="adam")


def test_without_an_outer_optimizer_two_bit_is_averaged_with_its_residuals() -> None:
    runs = [replace(CONFIG, local_sgd=3, scheme="two-bit", scheme_options={}, **options)
            for options in ({"outer": "average"}, {"outer": "average", "feedback_decay": 0.0})]  # fmt: skip
    kept, faded = _train_in_turn(*runs)
    assert [record["loss"] for record in kept.steps[:6]] == [record["loss"] for record in faded.steps[:6]]
    assert kept.summary["parameters_sha256"] != faded.summary["parameters_sha256"], "the second exchange has a residual"


def test_options_are_numbers_truths_or_words() -> None:
    words = ["a=1", "b=0.5", "c=True", "d=none", "e='x=y'", "f=1e-3", "g=a/b"]
    assert train.parse_options(words, "--o") == {
        "a": 1, "b": 0.5, "c": True, "d": "none", "e": "x=y", "f": 1e-3, "g": "a/b",
    }  # fmt: skip
    for word in ("", "a", "=1", "a b=1"):
        with pytest.raises(InvalidArgument, match="KEY=VALUE"):
            train.parse_options([word], "--o")


def test_command_starts_ranks_and_writes_a_flat_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    options = [f"--workload-option={key}={value}" for key, value in TINY_GPT.items()]
    arguments = ["train", "--scheme", "plain", "--ranks", "2", "--steps", "4", "--no-evaluate", *options]
    assert cli.main([*arguments, "--out", str(tmp_path / "run"), "--json", str(tmp_path / "r.json"), "--trace"]) == 0
    (record,) = json.loads((tmp_path / "r.json").read_text())
    assert not any(isinstance(value, dict | list) for value in record.values())
    assert record["network"] == "loopback"
    assert record["loss"] == json.loads((tmp_path / "run" / "steps.jsonl").read_text().splitlines()[-1])["loss"]
    assert json.loads((tmp_path / "run" / "trace-rank1.json").read_text())["traceEvents"]
