"""Schemes: published systems, each composed of codecs, collectives and residuals; `by_name` makes one."""

from collections.abc import Mapping
from typing import Any

from gradwire.core.session import Session
from gradwire.errors import InvalidArgument
from gradwire.registry import Registry, parse_spec
from gradwire.schemes.ahead import OPTIONS as AHEAD_OPTIONS
from gradwire.schemes.ahead import Ahead
from gradwire.schemes.base import Scheme
from gradwire.schemes.plain_steps import BESIDE_ADAM
from gradwire.schemes.two_level import TwoLevel

__all__ = ["Ahead", "Scheme", "Session", "TwoLevel", "by_name", "names"]

# name: "module:class". A new scheme is one file or folder and one line here.
_REGISTRY: Registry[Scheme] = Registry(
    "scheme",
    {
        "acp-sgd": "gradwire.schemes.acp_sgd:acp_sgd",
        "aqgb": "gradwire.schemes.aqgb.scheme:Aqgb",
        "auto": "gradwire.schemes.auto.scheme:Auto",
        "bf16": "gradwire.schemes.plain:Bf16",
        "broadcast": "gradwire.schemes.aqgb.scheme:Broadcast",
        "dgc": "gradwire.schemes.dgc:Dgc",
        "embedded-float": "gradwire.schemes.floats:EmbeddedFloatScheme",
        "gcomp": "gradwire.schemes.gcomp.scheme:GComp",
        "homomorphic": "gradwire.schemes.homomorphic.scheme:Homomorphic",
        "one-bit": "gradwire.schemes.quantisers:OneBitScheme",
        "one-bit-adam": "gradwire.schemes.one_bit_adam:OneBitAdam",
        "plain": "gradwire.schemes.plain:Plain",
        "power-momentum": "gradwire.schemes.power_sgd:PowerMomentum",
        "power-sgd": "gradwire.schemes.power_sgd:power_sgd",
        "power-sgd-overlap": "gradwire.schemes.power_sgd:power_sgd_overlap",
        "qsgd": "gradwire.schemes.quantisers:QsgdScheme",
        "sign-sgd": "gradwire.schemes.sign_sgd:SignSgd",
        "slimgc": "gradwire.schemes.slimgc:SlimGC",
        "terngrad": "gradwire.schemes.terngrad:TernGrad",
        "thc": "gradwire.schemes.thc:ThcScheme",
        "top-k": "gradwire.schemes.top_k:TopK",
        "truncated-float": "gradwire.schemes.floats:TruncatedFloatScheme",
        "two-bit": "gradwire.schemes.quantisers:TwoBitScheme",
    },
)

# Schemes that spare small tensors, unless `exempt` or `only` says which (selection.py).
_SPARING = ("embedded-float", "one-bit", "qsgd", "terngrad", "thc", "top-k", "truncated-float", "two-bit")

# Baselines that the laboratory registers when it is imported.
_OF_THE_LABORATORY = ("periodic", "truncate", "zlib", "zstd")


def names() -> list[str]:
    """The registered schemes, sorted."""
    return _REGISTRY.names()


def owns_step(name: str) -> bool:
    """Whether the scheme called `name` takes the optimizer's step itself, and so needs DDP, a model and an optimizer."""
    return _REGISTRY.class_of(name).owns_step


def needs_momenta(name: str) -> bool:
    """Whether the scheme called `name` exchanges or reads momenta, and works only with optimizers that have such."""
    return _REGISTRY.class_of(name).needs_momenta


def as_published(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a scheme, with those that it would choose by optimizer or model as published: for benchmarks."""
    chosen = {option: published for option, (published, _) in BESIDE_ADAM.get(name, {}).items()}
    spared = {"exempt": "none"} if name in _SPARING and not options.get("only") else {}
    return {**chosen, **spared, **options}


def by_name(name: str, **options: Any) -> Scheme:
    """A new scheme by its registry name, or by `NAME:option=value,option=value` as commands, logs and `stats()` write it.

    With `ahead=1` among the options, which may be followed by its own, the training does not wait for it: see `Ahead`.

    Raises: InvalidArgument (unknown name; an option that the scheme does not take, or that is given twice; a wrong value).
    """
    name, written = parse_spec(name)
    for twice in written.keys() & options:
        raise InvalidArgument(f"{twice} is given twice, in the scheme's name and as an argument: leave one of them out")
    options = {**written, **options}
    if name in _OF_THE_LABORATORY and name not in names():
        raise InvalidArgument(f"the scheme {name!r} is a baseline for experiments: `import gradwire_lab` registers it")
    ahead = options.pop("ahead", 0)
    if name == "slimgc" and options.pop("backup", False):  # its paper's word
        ahead = 1
    of_ahead = {key: options.pop(key) for key in AHEAD_OPTIONS if ahead and key in options}
    made = _REGISTRY.make(name, options)
    return Ahead(made, ahead, **of_ahead) if ahead else made
