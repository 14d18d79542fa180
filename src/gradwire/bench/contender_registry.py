"""The contenders of `bench codec` by name: every codec of gradwire and every rival, with options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire import codecs
from gradwire.bench import rivals
from gradwire.bench.contenders import CodecContender, Contender, RivalContender
from gradwire.bench.gcomp_contender import GCompContender
from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec
from gradwire.workloads.gradients import GradientFile

# What `all` means beside every codec and rival with its own defaults: GComp as published, its other modes, dtypes and cap,
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
    """Every codec and every rival; a codec that has a rival's name is `gradwire:NAME`."""
    taken = rivals.names()
    return [*(f"gradwire:{name}" if name in taken else name for name in codecs.names()), *taken]


def choose_specs(asked: Sequence[str]) -> list[str]:
    """`all` spelt out, doubles dropped. Raises: InvalidArgument (a name that is neither codec nor rival)."""
    for spec in asked:
        if _split(spec)[0] not in ("all", *names()):
            raise InvalidArgument(f"no codec or rival is called {spec!r}; there are: all, {', '.join(names())}")
    everything = [*names(), *(spec for spec in _VARIANTS if _split(spec)[0] in codecs.names())]
    return list(dict.fromkeys(one for spec in asked for one in (everything if spec == "all" else [spec])))


def by_spec(spec: str, file: GradientFile, n_threads: int) -> Contender | None:
    """A contender, or None where it cannot use `n_threads` threads. Raises: InvalidArgument (unknown name, option)."""
    name, options = _split(spec)
    if name in rivals.names():
        if options:
            raise InvalidArgument(f"{spec}: rivals take no options")
        rival = RivalContender(name, file, n_threads)
        rival.spec = spec
        return rival if n_threads == 1 or rival.is_threaded else None
    if name in ("gcomp", "truncate"):
        contender: CodecContender = GCompContender(name, options, file, n_threads)
    else:
        contender = CodecContender(name, options, file, n_threads)
    contender.spec = spec
    return contender


def _split(spec: str) -> tuple[str, dict[str, Any]]:
    prefix = "gradwire:" if spec.startswith("gradwire:") else ""
    name, options = parse_spec(spec.removeprefix(prefix))
    return prefix + name, options
