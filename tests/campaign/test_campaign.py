"""The campaign can fail: a fault planted for each check is found, and without one the same case passes."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from campaign import __main__, hostile, models, residuals, schemes_drawn
from campaign.cases import KINDS, Case, run_case
from campaign.findings import launch
from gradwire import codecs, schemes

_TRAINING = {
    "world_size": 2, "model": "mlp", "dtype": "float32", "optimizer": "sgd", "bucket_cap_mb": 0.01, "view": False,
    "static_graph": False, "amp": False, "steps": 4, "features": [], "scheme": ("plain", {}),
}  # fmt: skip
_GIVEN = {**_TRAINING, "model": "given", "pattern": "normal"}
_FAULT = {
    "harm": "kill", "scheme": ("plain", {}), "world_size": 2, "victim": 1, "step": 2, "delay_ms": 0, "width": 20,
    "bucket_cap_mb": 25, "optimizer": "sgd", "place": 0,
}  # fmt: skip
_HABIT = {
    "habit": "sets a default dtype", "scheme": ("plain", {}), "fidelity": None, "door": "ddp", "world_size": 2,
    "optimizer": "SGD", "dtype": "float64", "steps": 4, "at": 2,
}  # fmt: skip
_RESUMPTION = {
    "mode": "exact", "scheme": ("top-k", {"share": 0.02}), "world_size": 1, "model": "mlp", "optimizer": "sgd",
    "amp": False, "n_before": 2, "n_steps": 3, "tampering": "drop a field", "draw": 1,
}  # fmt: skip
_HOSTILE = {
    "target": "codec", "codec": ("qsgd", {}), "dtype": "float32", "pattern": "normal", "n_values": 300,
    "attack": "flip", "draw": 1, "n_tries": 20,
}  # fmt: skip
_SOAK = {**_TRAINING, "n_attachments": 1, "n_steps": 150}
_LINKS = {**_FAULT, "harm": "down", "way": "", "scheme": ("gcomp", {}), "down_s": 0.3}
_RESIDUALS = {
    "scheme": ("slimgc", {"codec": "qsgd", "threshold_bytes": 0}), "world_size": 2,
    "shapes": [[24, 18], [64, 33], [50]], "in_common": 1.0, "power": 1, "seed": 0,
}  # fmt: skip
_PLACEMENT = {
    "placement": "device", "scheme": "one-bit", "world_size": 2, "lateness_us": 300, "widths": [7], "dtype": "float32",
    "optimizer": "momentum", "bucket_cap_mb": 0.01, "steps": 4, "features": ["loads a state"],
}  # fmt: skip
_ONE_OF_EACH = {(one.name, one.options.get("codec")): one for one in residuals.FED_BACK}

PLANTS: list[tuple[str, dict[str, Any], str, str]] = [
    ("trainings", _TRAINING, "drift", "parameters differ between ranks after step 2"),
    ("trainings", _GIVEN, "scaled", "is not the mean"),
    ("trainings", {**_GIVEN, "scheme": ("one-bit", {"warmup_steps": 0})}, "lost", "residual"),
    ("faults", _FAULT, "untyped", "got no typed error"),
    ("faults", _FAULT, "silent", "noticed nothing"),
    ("faults", {**_FAULT, "harm": "flip a bit"}, "drift", "differ between ranks"),
    ("habits", _HABIT, "drift", "parameters differ between ranks"),
    ("habits", _HABIT, "default", "a global default changes"),
    ("habits", {**_HABIT, "habit": "makes folds and closes none"}, "descriptors", "grow from fold to fold"),
    ("resuming", _RESUMPTION, "stale", "other bits resumed than in one go"),
    ("resuming", {**_RESUMPTION, "mode": "tampered"}, "untyped", "planted"),
    ("residuals", _RESIDUALS, "fed back", "residuals grow"),
    ("hostile", _HOSTILE, "accepts", "bytes were taken that are no message"),
    ("hostile", _HOSTILE, "untyped", "IndexError"),
    ("hostile", _HOSTILE, "overruns", "outside of the output"),
    ("hostile", _HOSTILE, "dies", "ended with exit code -6"),
    ("soak", _SOAK, "memory", "memory grows"),
    ("soak", _SOAK, "descriptors", "descriptors grow"),
    ("soak", _SOAK, "threads", "threads grow"),
    ("placements", _PLACEMENT, "drift", "other bits than rank 0"),
]


@pytest.mark.parametrize(("kind", "drawn", "plant", "words"), PLANTS, ids=[f"{one[0]}-{one[2]}" for one in PLANTS])
def test_planted_fault_is_found(kind: str, drawn: dict[str, Any], plant: str, words: str) -> None:
    record = run_case(kind, {**drawn, "plant": plant})
    assert record["verdict"] == "failed", record
    assert words in record["found"]


@pytest.mark.parametrize(
    ("kind", "drawn"),
    {str(drawn): (kind, drawn) for kind, drawn, _, _ in PLANTS}.values(),
    ids=lambda value: str(value)[:9],
)
def test_the_same_case_passes_without_the_fault(kind: str, drawn: dict[str, Any]) -> None:
    record = run_case(kind, drawn)
    assert record["verdict"] == "passed", record["found"]


@pytest.mark.parametrize("scheme", _ONE_OF_EACH.values(), ids=["-".join(filter(None, one)) for one in _ONE_OF_EACH])
def test_residuals_stay_bounded(scheme: schemes_drawn.Variant) -> None:
    record = run_case("residuals", {**_RESIDUALS, "scheme": (scheme.name, scheme.options)})
    assert record["verdict"] == "passed", record["found"]


def test_rank_that_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("campaign.faults.GRACE_S", -2.0)
    monkeypatch.setattr("ranks.patience", lambda: 1.0)
    record = run_case("faults", {**_FAULT, "plant": "hang"})
    assert record["verdict"] == "failed"
    assert "a rank hangs" in record["found"]


@pytest.mark.root
@pytest.mark.usefixtures("warm_interpreters")
@pytest.mark.parametrize(
    ("drawn", "verdict", "words"),
    [
        ({"harm": "down and up"}, "passed", ""),
        ({"harm": "host gone", "way": "/delay=5ms"}, "passed", ""),
        ({"harm": "lossy for a moment", "way": "/delay=20ms/jitter=2ms/loss=0.05%"}, "passed", ""),
        ({"plant": "silent"}, "failed", "noticed nothing"),
    ],
)
def test_links_fail_and_what_follows_is_judged(drawn: dict[str, Any], verdict: str, words: str) -> None:
    record = run_case("links", {**_LINKS, **drawn})
    if record["verdict"] == "refused":  # this machine makes no network namespaces
        pytest.skip(record["found"])
    assert record["verdict"] == verdict, record["found"]
    assert words in record["found"]


def test_case_is_drawn_from_its_name_alone() -> None:
    for kind in KINDS:
        case = Case.parse(f"{kind}:7:3")
        assert case.draw() == Case(kind, 7, 3).draw()
        assert case.draw() != Case(kind, 7, 4).draw()
        assert f"--case {kind}:7:3" in case.command
    with pytest.raises(ValueError, match="kinds are trainings"):
        Case.parse("training:1:1")


def test_every_scheme_codec_and_pattern_is_drawn() -> None:
    assert {one.name for one in schemes_drawn.VARIANTS} == set(schemes.names())
    assert {name for name, _ in hostile.CODECS} == set(codecs.names())
    drawn = [KINDS["trainings"].draw(random.Random(seed)) for seed in range(400)]
    assert {one["scheme"][0] for one in drawn} == set(schemes.names())
    assert {one.get("pattern") for one in drawn} >= set(models.PATTERNS)


def test_plain_first_steps_end_within_what_is_drawn() -> None:
    begins = [
        one
        for one in schemes_drawn.VARIANTS
        if 0 < one.options.get("warmup_steps", one.options.get("start_step", 0)) < 4  # of 5 to 8 steps
    ]
    assert {one.name for one in begins} >= {
        "one-bit", "two-bit", "dgc", "top-k", "acp-sgd", "power-sgd", "power-sgd-overlap",
    }  # fmt: skip
    assert {one.options.get("levels") for one in begins if one.name == "two-bit"} == {None, 4}


def test_seals_are_those_of_the_formats() -> None:
    """A sealed message that nothing was changed in is the message: the checksums here are the formats'."""
    found = launch(_seal_all, 1)[0]
    assert found.error is None, found.traceback
    assert found.result >= 16


def _seal_all(rank: int, world_size: int) -> int:
    n_sealed = 0
    for name, options in hostile.CODECS:
        values = hostile._values("normal", torch.float32, 300, 1)
        message = hostile._encode(codecs.by_name(name, **options), values)
        sealed = bytearray(message)
        n_sealed += hostile.seal(sealed, 300)
        assert bytes(sealed) == message, name
    return n_sealed


def test_campaign_goes_on_where_it_ended_and_sums_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--kinds", "hostile", "--seed", "5", "--folder", str(tmp_path)]
    assert __main__.main([*arguments, "--n", "2"]) == 0
    assert __main__.main([*arguments, "--n", "1"]) == 0
    cases = [json.loads(line)["case"] for line in (tmp_path / "5.jsonl").read_text().splitlines()]
    assert cases == ["hostile:5:0", "hostile:5:1", "hostile:5:2"]
    assert "hostile            3" in capsys.readouterr().out
    with (tmp_path / "5.jsonl").open("a") as file:
        failed = {"case": "faults:5:0", "kind": "faults", "verdict": "failed", "found": "no", "seconds": 1}
        file.write(json.dumps({**failed, "commit": "x"}))
    assert __main__.main(["--summary", "--folder", str(tmp_path)]) == 1
    assert 'make campaign CAMPAIGN_ARGS="--case faults:5:0"' in capsys.readouterr().out
