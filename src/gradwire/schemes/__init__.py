"""Schemes: published systems, each composed of codecs, collectives and residuals; `by_name` makes one."""

from __future__ import annotations

import importlib
from typing import Any

from gradwire.core.session import Session
from gradwire.errors import InvalidArgument
from gradwire.registry import describe_choices, describe_wrong_option
from gradwire.schemes.base import Scheme

__all__ = ["Scheme", "Session", "by_name", "names"]

# name: "module:class". A new scheme is one file or folder and one line here.
_REGISTRY: dict[str, str] = {
    "acp-sgd": "gradwire.schemes.acp_sgd:AcpSgd",
    "aqgb": "gradwire.schemes.aqgb.scheme:Aqgb",
    "broadcast": "gradwire.schemes.aqgb.scheme:Broadcast",
    "dgc": "gradwire.schemes.dgc:Dgc",
    "embedded-float": "gradwire.schemes.through_codec:EmbeddedFloat",
    "gcomp": "gradwire.schemes.gcomp.scheme:GComp",
    "homomorphic": "gradwire.schemes.homomorphic.scheme:Homomorphic",
    "one-bit": "gradwire.schemes.one_bit:OneBit",
    "periodic": "gradwire.schemes.periodic:Periodic",
    "plain": "gradwire.schemes.plain:Plain",
    "power-sgd": "gradwire.schemes.power_sgd:PowerSgd",
    "power-sgd-overlap": "gradwire.schemes.power_sgd:PowerSgdOverlap",
    "qsgd": "gradwire.schemes.qsgd:Qsgd",
    "random-k": "gradwire.schemes.random_k:RandomK",
    "sign-sgd": "gradwire.schemes.sign_sgd:SignSgd",
    "slimgc": "gradwire.schemes.slimgc:SlimGC",
    "terngrad": "gradwire.schemes.terngrad:TernGrad",
    "thc": "gradwire.schemes.thc:Thc",
    "top-k": "gradwire.schemes.top_k:TopK",
    "truncate": "gradwire.schemes.through_codec:Truncate",
    "truncated-float": "gradwire.schemes.through_codec:TruncatedFloat",
    "two-bit": "gradwire.schemes.two_bit:TwoBit",
    "zlib": "gradwire.schemes.through_codec:Zlib",
    "zstd": "gradwire.schemes.through_codec:Zstd",
}


def names() -> list[str]:
    """The registered schemes, sorted."""
    return sorted(_REGISTRY)


def owns_step(name: str) -> bool:
    """Whether the scheme called `name` takes the optimizer's step itself, and so needs DDP, a model and an optimizer."""
    module_path, class_name = _REGISTRY[name].split(":")
    return bool(getattr(importlib.import_module(module_path), class_name).owns_step)


def by_name(name: str, **options: Any) -> Scheme:
    """A new scheme by its registry name.

    Raises: InvalidArgument (unknown name, or an option that the scheme does not take or whose value is out of range).
    """
    if name not in _REGISTRY:
        raise InvalidArgument(f"no scheme is called {name!r}; {describe_choices(name, names())}")
    module_path, class_name = _REGISTRY[name].split(":")
    cls = getattr(importlib.import_module(module_path), class_name)
    try:
        scheme: Scheme = cls(**options)
    except TypeError as error:
        wrong = describe_wrong_option(cls, options)
        raise InvalidArgument(f"scheme {name!r} {wrong}" if wrong else f"scheme {name!r}: {error}") from error
    return scheme
