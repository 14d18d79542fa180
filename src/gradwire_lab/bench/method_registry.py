"""The methods of `bench codec` by name: every codec of gradwire and every baseline, with options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire import codecs
from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec
from gradwire_lab.bench import baselines
from gradwire_lab.bench.codec_methods import BaselineMethod, CodecMethod, TimedMethod
from gradwire_lab.bench.gcomp_method import GCompMethod
from gradwire_lab.workloads.gradients import GradientFile

# What `all` means beside every codec and baseline with its own defaults: GComp as published, its other modes, dtypes and cap,
# and its table before training.
_VARIANTS = (
    "gcomp:format=1",
    "gcomp:importance=none",
    "gcomp:importance=uniform,bits=10",
    "gcomp:bits=14",
    "gcomp:dtype=bfloat16",
    "gcomp:dtype=float16",
    "gcomp:table=prior",
)


def names() -> list[str]:
    """Every codec and every baseline; a codec that has a baseline's name is `gradwire:NAME`."""
    taken = baselines.names()
    return [*(f"gradwire:{name}" if name in taken else name for name in codecs.names()), *taken]


def choose_specs(asked: Sequence[str]) -> list[str]:
    """`all` spelt out, doubles dropped. Raises: InvalidArgument (a name that is neither codec nor baseline)."""
    for spec in asked:
        if _split(spec)[0] not in ("all", *names()):
            raise InvalidArgument(f"no codec or baseline is called {spec!r}; there are: all, {', '.join(names())}")
    everything = [*names(), *(spec for spec in _VARIANTS if _split(spec)[0] in codecs.names())]
    return list(dict.fromkeys(one for spec in asked for one in (everything if spec == "all" else [spec])))


def by_spec(spec: str, file: GradientFile, n_threads: int) -> TimedMethod | None:
    """A method, or None where it cannot use `n_threads` threads. Raises: InvalidArgument (unknown name, option)."""
    name, options = _split(spec)
    if name in baselines.names():
        if options:
            raise InvalidArgument(f"{spec}: baselines take no options")
        baseline = BaselineMethod(name, file, n_threads)
        baseline.spec = spec
        return baseline if n_threads == 1 or baseline.is_threaded else None
    if name in ("gcomp", "truncate"):
        method: CodecMethod = GCompMethod(name, options, file, n_threads)
    else:
        method = CodecMethod(name, options, file, n_threads)
    method.spec = spec
    return method


def _split(spec: str) -> tuple[str, dict[str, Any]]:
    prefix = "gradwire:" if spec.startswith("gradwire:") else ""
    name, options = parse_spec(spec.removeprefix(prefix))
    return prefix + name, options
