"""SlimGC: sizes of gradients, accuracy of the strategies, throughput and time split."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gradwire_lab.bench.catalogue.schemes import ACCURACY, EXPOSED, ITERATION, NATS, PLAIN, RATIO_LAST, SENT, against
from gradwire_lab.results.experiment import Column, Experiment, Goal, Plot, Ref, Table, ms

CODECS = {"1 bit": "one-bit", "2 bit": "two-bit"}
_DIGITS, _GPT = "resnet:width=8,folds=5", "gpt:n_layers=2,width=64,n_heads=4,length=64,batch_size=8"


def _slimgc(codec: str, *options: str) -> str:
    return ",".join([f"slimgc:codec={codec}", *options])


def _by_strategy(ways: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """{label: spec}: full precision, then every way under every codec."""
    return {"full precision": "plain"} | {
        f"{bits}, {name}": _slimgc(codec, *options) for bits, codec in CODECS.items() for name, options in ways.items()
    }


_BARE, _THRESHOLD, _BACKUP = "threshold_bytes=0", "threshold_bytes=15000", "backup=true"  # the paper's best threshold
_MEASURED = "warmup_steps=8"  # without a threshold in bytes it is measured first, in steps of which half are raw
# Figs. 12 and 13: one strategy after the other.
_STRATEGIES = {"threshold 0": [_BARE], "measured threshold": [_MEASURED], "backup, threshold 0": [_BACKUP, _BARE],
               "everything": [_BACKUP, _MEASURED]}  # fmt: skip
# Fig. 9.
_STEP_BY_STEP = _by_strategy({"bare": [_BARE], "threshold": [_THRESHOLD], "everything": [_THRESHOLD, _BACKUP]})
# Fig. 10: what a 2-bit value stands for, in mean magnitudes; 1 bit takes its scale from the values and has none.
_COMPRESSION = {"full precision": "plain"} | {
    f"{name}, {value:g}": _slimgc("two-bit", f"threshold={value}", *options)
    for name, options in {"bare": [_BARE], "everything": [_THRESHOLD, _BACKUP]}.items()
    for value in (0.5, 0.7, 1.0, 1.4, 2.0, 2.8)
}
# Fig. 11, bytes.
_COMMUNICATION = _by_strategy({
    f"{name}, {value:,} bytes": [f"threshold_bytes={value}", *options]
    for name, options in {"threshold": [], "everything": [_BACKUP]}.items() for value in (0, 1_500, 15_000, 150_000)
})  # fmt: skip


def _accuracy(key: str, question: str, figure: str, schemes: Mapping[str, str], *, seeds: int, seconds: float,
              gain: Mapping[str, Any] | None = None, **axes: Any) -> Experiment:  # fmt: skip
    """A training for each of `axes`: workload, steps. `gain`: where the strategies are to give back 1.1 points."""
    is_digits = "resnet" in str(axes["workload"])
    metric, parts, goals = ACCURACY if is_digits else NATS, [], []
    for (bits, codec), paper in zip(CODECS.items(), ("1.1 to 2.3", "1.1 to 1.6"), strict=True):
        mine = [spec for spec in schemes.values() if spec == "plain" or f"codec={codec}" in spec]
        bare = _slimgc(codec, _BARE)
        columns = [metric, *([against(metric, "bare", bare)] if bare in mine else []),
                   against(metric, "full precision", "plain"), RATIO_LAST]  # fmt: skip
        if len(mine) > 1:  # beside plain
            parts.append(Table(columns, where={"scheme": mine}, title=bits))
        if gain is not None:
            given_back = replace(metric, title="", kind="difference", against=bare)
            where = {"scheme": schemes[f"{bits}, everything"], **gain}
            goals.append(Goal(f"{bits}: what the strategies give back, points", given_back, ">=", 1.1, where, (), paper,
                              Ref("SlimGC", figure)))  # fmt: skip
    folds: dict[str, Any] = {"fold": list(range(5))} if is_digits else {}
    return Experiment(
        key=f"slimgc-{key}", system="slimgc", measure="training", seconds=seconds, question=question,
        of=[Ref("SlimGC", figure)], fixed={"ranks": 2}, axes={**axes, "seed": list(range(seeds)), **folds, "scheme": schemes},
        over=("seed", *folds), together=(*folds, "scheme"), baseline=PLAIN, show=parts, goals=goals,
    )  # fmt: skip


def _specs(strategies: Mapping[str, Sequence[str]], beside: Sequence[str] = ()) -> dict[str, str]:
    """{label: spec}: by codec the bare quantiser, on the training thread too with "ddp" `beside` it, and strategies."""
    found = {name: name for name in beside}
    for codec in CODECS.values():
        found |= {name: name for name in (*(f"{name}-{codec}" for name in beside), codec)}
        found |= {f"slimgc {codec}, {label}": _slimgc(codec, *options) for label, options in strategies.items()}
    return found


def _speed(key: str, workloads: list[str], schemes: Mapping[str, str], seconds: float) -> Experiment:
    times = [ms("computed_s", "C"), ms("codec_busy_s", "K"), ms("wire_s", "X"), EXPOSED, ms("overlap_s", "overlap")]
    paper, goals = Ref("SlimGC", "Fig. 13"), list[Goal]()
    if "ddp" in schemes:
        overlap, exposed = (Column(f"{what}_x", "x on thread", form=".2f") for what in ("overlap", "exposed_codec"))
        times += [overlap, ms("exposed_codec_s", "exposed codec"), exposed]
        everything = {"scheme": [spec for label, spec in schemes.items() if label.endswith("everything")]}
        goals = [Goal("overlap at least 3.5 times that of the codec on the training thread", overlap, ">=", 3.5, everything, (),
                      "3.5 to 6.4", paper),
                 Goal("exposed codec time at most 0.4 of it", exposed, "<=", 0.4, everything)]  # fmt: skip
    # One model and one codec: beside plain DDP's steps, which take seconds, the others could not be told apart.
    drawn = {"workload": workloads[0], "scheme": [spec for spec in schemes.values() if "one-bit" in spec]}
    return Experiment(
        key=f"slimgc-speed-{key}", system="slimgc", measure="overlap", seconds=seconds,
        question=f"How long does a step of {' and '.join(workloads)} take with 4 ranks, and what of it overlaps?",
        of=[Ref("SlimGC", "Fig. 12"), paper, Ref("SlimGC", "Table 2")],
        fixed={"ranks": 4, "steps": 7, "warmup": 2, "compute": "emulate", "overlap": True},
        axes={"workload": workloads, "rate": {"100 Mb/s": "100mbit", "1 Gb/s": "1gbit"}, "scheme": schemes},
        baseline={"scheme": next(iter(schemes))},
        show=[Table([ITERATION, Column("speed_up", "x bare", form=".2f"), Column("bound_share", "of the bound, %", 100, ".0f")],
                    across="rate"),
              Table(times, title="Where the time goes, ms a step"),
              Plot("rate", ms("iteration_s", "ms a step"), style="bars", x_title=f"rate, {drawn['workload']}", where=drawn)],
        goals=[Goal("never slower than the bare quantiser", Column("speed_up", form=".2f"), ">=", 1.0,
                    {"scheme": lambda spec: str(spec).startswith("slimgc")}), *goals],
    )  # fmt: skip


EXPERIMENTS = [
    Experiment(
        key="slimgc-sizes", system="slimgc", measure="shapes", seconds=20, together=("workload",),
        question="Which share of a model's tensors, and of its bytes, is in small ones?",
        of=[Ref("SlimGC", "Fig. 1")], fixed={"of": "sizes"}, axes={"workload": ["resnet50", "bert-base", "vgg16", "gpt2"]},
        show=[Table([Column("tensors_share", "of the tensors, %", 100, ".0f"),
                     Column("bytes_share", "of the bytes, %", 100, ".1f")],
                    rows=("workload",), across="below_bytes")],
    ),
    _accuracy("accuracy", "Short trainings, in which bare quantisers lose, and longer ones: what do strategies give back?",
              "Fig. 9", _STEP_BY_STEP, seeds=2, seconds=145, gain={"steps": 50}, workload=[_DIGITS], steps=[50, 200]),
    _accuracy("accuracy-gpt", "The same on a small GPT.", "Fig. 9", _STEP_BY_STEP, seeds=3, seconds=60, workload=[_GPT],
              steps=[200]),
    _accuracy("accuracy-rates", "The same with the learning rate scaled with the batch.", "Fig. 9", _STEP_BY_STEP, seeds=2,
              seconds=90, workload={"linearly": f"{_DIGITS},rate_scaling=linear",
                                    "by its root": f"{_DIGITS},rate_scaling=square-root"}, steps=[50]),
    _accuracy("compression", "How much does the compression threshold matter?", "Fig. 10", _COMPRESSION,
              seeds=1, seconds=150, workload=[_DIGITS], steps=[50]),
    _accuracy("communication", "How much does the communication threshold matter?", "Fig. 11", _COMMUNICATION,
              seeds=1, seconds=200, workload=[_DIGITS], steps=[50]),
    _speed("resnet50", ["resnet50"], _specs(_STRATEGIES, ["ddp"]), 300),
    # Without what takes minutes there: DDP, and the raw steps in which a threshold is measured.
    _speed("large", ["bert-base", "gpt", "vgg16"], _specs({k: v for k, v in _STRATEGIES.items() if _BARE in v}), 100),
    Experiment(
        key="slimgc-rivals", system="slimgc", measure="train", seconds=200,
        baseline={"scheme": _slimgc("one-bit", _BARE)},
        question="Is SlimGC ahead of other methods, on ResNet-50 at 1 Gb/s?",
        of=[Ref("SlimGC", "Table 3")],
        fixed={"workload": "resnet50", "ranks": 4, "rate": "1gbit", "compute": "emulate", "steps": 5, "warmup": 2},
        axes={"scheme": {"slimgc, 1 bit": _slimgc("one-bit", _BARE), "slimgc, 2 bit": _slimgc("two-bit", _BARE),
                         "one-bit": "one-bit", "two-bit": "two-bit", "terngrad": "terngrad",
                         "top-k 10 %": "top-k:share=0.1", "dgc 10 %": "dgc:share=0.1", "thc": "thc"}},
        show=[Table([ITERATION, Column("iteration_s", "x slimgc, 1 bit", kind="ratio"), EXPOSED, SENT])],
    ),
]  # fmt: skip
