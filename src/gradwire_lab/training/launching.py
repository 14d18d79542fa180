"""Starting a training: ranks on this machine, or this process as one of torchrun's; and what a person sees of it."""

import ast
import functools
import json
import os
from pathlib import Path
from typing import Any

from gradwire import checks, schemes
from gradwire.errors import InvalidArgument
from gradwire.registry import describe_choices
from gradwire_lab import workloads
from gradwire_lab.ranks.launch import run_gradwire
from gradwire_lab.results.captions import describe_network, duration
from gradwire_lab.results.tables import Grid, print_grid
from gradwire_lab.training import sharding
from gradwire_lab.training.config import TrainConfig, TrainResult
from gradwire_lab.training.loop import train_rank
from gradwire_lab.training.torch_hooks import HOOKS, check_options

# Set for ranks that `run_ranks` starts: their configuration, and that rank 0 reports as lines to the starter.
_CONFIG_VARIABLE = "GRADWIRE_TRAIN_CONFIG"
_REPORT_MARK = "@gradwire "


def run_ranks(config: TrainConfig, n_ranks: int, rate: str = "none") -> dict[str, Any]:
    """Train in `n_ranks` new processes here, behind links of `rate`; prints and returns the run's summary. Raises:
    InvalidArgument, Unsupported (before any rank starts), PeerLost (a rank failed; its own words are on stderr)."""
    check(config)
    checks.count("ranks", n_ranks)
    summary: dict[str, Any] = {}

    def take_line(rank: int, line: str) -> None:
        if not line.startswith(_REPORT_MARK):
            print(f"[{rank}] {line}", flush=True)
            return
        report = json.loads(line[len(_REPORT_MARK) :])
        if "summary" in report:
            summary.update(report["summary"])
        else:
            print_step(config, report["step"])

    run_gradwire(["train"], n_ranks, rate, take_line, env={_CONFIG_VARIABLE: to_text(config)})
    print_summary(summary)
    return summary


def to_text(config: TrainConfig) -> str:
    """A configuration as a line, for ranks."""
    return repr({key: str(value) if isinstance(value, Path) else value for key, value in vars(config).items()})


def from_text(text: str) -> TrainConfig:
    """What `to_text` wrote."""
    fields: dict[str, Any] = ast.literal_eval(text)
    for name in ("out", "checkpoint"):
        fields[name] = None if fields[name] is None else Path(fields[name])
    return TrainConfig(**fields)


def given_config() -> TrainConfig | None:
    """The configuration that `run_ranks` gave this process, None in any other."""
    text = os.environ.get(_CONFIG_VARIABLE)
    return None if text is None else from_text(text)


def check(config: TrainConfig) -> None:
    """Raises: InvalidArgument, Unsupported: a wrong name or option is one error and not one a rank."""
    if config.scheme in HOOKS:
        check_options(config.scheme, config.scheme_options)
    elif config.scheme in sharding.OVER_ALL:
        sharding.check_options(config.scheme, config.scheme_options)
    elif config.scheme not in schemes.names():
        choices = describe_choices(config.scheme, [*HOOKS, *sharding.OVER_ALL, *schemes.names()])
        raise InvalidArgument(f"no scheme is called {config.scheme!r}; {choices}")
    else:
        schemes.by_name(config.scheme, **config.scheme_options)
    workloads.by_name(config.workload, **config.workload_options)


def train_and_report(config: TrainConfig) -> TrainResult:
    """Train as a rank; rank 0 shows progress and summary, or reports them to the process that started it."""
    if os.environ["RANK"] != "0":
        return train_rank(config)
    if _CONFIG_VARIABLE in os.environ:
        result = train_rank(config, lambda record: _report({"step": record}))
        _report({"summary": result.summary})
        return result
    result = train_rank(config, functools.partial(print_step, config))
    print_summary(result.summary)
    return result


def _report(content: dict[str, Any]) -> None:
    print(_REPORT_MARK + json.dumps(content), flush=True)


# ---- what a person sees


def print_step(config: TrainConfig, record: dict[str, Any]) -> None:
    """A line for every tenth of the run's steps."""
    done = record["step"] + 1
    if done % max(1, config.steps // 10) == 0 or done == config.steps:
        figures = f"loss {record['loss']:.4f}  {1e3 * record['iteration_s']:.0f} ms  ratio {record['ratio']:.3f}"
        left_s = (config.steps - done) * record["iteration_s"]
        ending = f"  {duration(left_s)} left" if left_s >= 1 else ""
        print(f"{config.workload}, {config.scheme}: step {done}/{config.steps}  {figures}{ending}", flush=True)


def print_summary(summary: dict[str, Any]) -> None:
    """The table at the end of a run."""
    computed = " (computed)" if summary["wire_bytes_origin"] != "counted" else ""
    equal = "equal on all ranks" if summary["replicas_equal"] else "NOT equal on all ranks"
    times = (("iteration", "iteration, median"), ("exposed", "exposed communication"), ("codec", "codec, busy"))
    evaluated = [key for key in ("held_out_loss", "accuracy", "exact") if key in summary]
    rows = [
        ("steps", str(summary["n_steps"])),
        ("parameters", f"{summary['n_parameters']:,}"),
        ("data, compute", f"{summary['data']}, {summary['compute']}"),
        ("network", describe_network(summary)),
        (f"MB sent a step{computed}", f"{summary['wire_bytes'] / 1e6:.3f}"),
        ("ratio to a float32 ring", f"{summary['ratio']:.4f}"),
        *((f"{title}, ms", f"{1e3 * summary[f'{name}_s']:.1f}") for name, title in times),
        ("loss, last step", f"{summary['loss']:.6f}"),
        ("loss, mean of last 10", f"{summary['loss_last_10']:.6f}"),
        *((key.replace("_", " "), f"{summary[key]:.4f}") for key in evaluated),
        *([("fallbacks", f"{summary['n_fallbacks']:.0f}")] if summary["n_fallbacks"] else []),
        ("parameters", f"sha256 {summary['parameters_sha256'][:16]}..., {equal}"),
    ]
    print_grid(Grid(f"{summary['workload']} with {summary['scheme']}, {summary['ranks']} ranks", ["", ""], rows))
