"""Which schemes a campaign draws, with which options, and what each promises beyond equal replicas."""

import random
from dataclasses import dataclass, field
from typing import Any

from gradwire import schemes
from gradwire.registry import parse_spec


@dataclass(frozen=True)
class Variant:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    near: bool = False  # result and mean differ by no more than rounding in the gradient's dtype
    conserves: bool = False  # mean(result) + mean(new residual) = mean(gradient) + mean(old residual)
    repeats: bool = True  # the same run gives the same bits, whatever the machine's load: what resumption is checked on
    errors_are_ours: bool = True  # a fault raises gradwire's own errors from the first step on

    @property
    def owns_step(self) -> bool:
        """Whether it takes the optimizer's step, which restricts what scripts may do to `.grad`."""
        asked = self.options.get("ahead") or self.options.get("backup")
        return schemes.owns_step(self.name) or bool(asked)

    @property
    def replicas_may_differ(self) -> bool:
        return self.name == "periodic"

    def make(self) -> Any:
        return schemes.by_name(self.name, **self.options)


_NEAR = """
plain zlib zstd zstd:topology=direct,chunk_elements=1000 gcomp:importance=none
gcomp:importance=none,topology=direct,chunk_elements=1000
"""
_CONSERVES = """
one-bit:warmup_steps=0 one-bit:warmup_steps=0,scale_values=message,pull=raw,chunk_elements=4096 one-bit:warmup_steps=3
two-bit:warmup_steps=1 two-bit:levels=4,scale_values=128,warmup_steps=0
two-bit:levels=4,scale_values=512,warmup_steps=2,pull=raw
two-bit:levels=4,scale_values=64,warmup_steps=1,chunk_elements=1000
top-k:share=0.02,warmup_steps=0 top-k:share=1.0,warmup_steps=1
acp-sgd:rank=1,start_step=0,feedback_decay=1.0 acp-sgd:rank=3,buffer_mb=0.01,start_step=0,feedback_decay=1.0
power-sgd:rank=2 power-sgd:rank=1,start_step=2 power-sgd-overlap:rank=2 power-sgd-overlap:rank=2,start_step=3
"""
_OTHERS = """
gcomp gcomp:refresh_every=3 gcomp:importance=uniform,bits=6 truncate:bits=5 embedded-float:bits=7 truncated-float:bits=6
homomorphic homomorphic:mode=exact,integer_bits=64 homomorphic:mode=lossy
one-bit-adam:freeze_step=2 one-bit-adam:freeze_step=1,codec=four-level,scale_values=64 one-bit:warmup_steps=0,ahead=1
qsgd qsgd:levels=100,block=128 terngrad thc dgc:share=0.05 dgc:share=0.01,warmup_steps=3 sign-sgd
acp-sgd:rank=2,start_step=3 acp-sgd:rank=2,start_step=0,ahead=1 power-momentum:rank=2
slimgc:threshold_bytes=0 slimgc:codec=two-bit,threshold_bytes=500,topology=all-reduce
slimgc:threshold_bytes=0,backup=true slimgc:threshold_bytes=500,pull=raw
broadcast:bits=8 broadcast:bits=32,topology=ring periodic:every=2
"""
_LISTED = [Variant(*parse_spec(spec), near=True) for spec in _NEAR.split()]
_LISTED += [Variant(*parse_spec(spec), conserves=True) for spec in _CONSERVES.split()]
_LISTED += [Variant(*parse_spec(spec)) for spec in _OTHERS.split()]
_LISTED += [
    Variant("slimgc", repeats=False),  # its table is measured
    Variant("aqgb", repeats=False),  # bits follow the network
    Variant("auto", repeats=False, errors_are_ours=False),  # as long as it stays plain, all is DDP's own
]
# A scheme that is not listed is drawn with its defaults, so that none is forgotten.
VARIANTS = _LISTED + [Variant(name) for name in schemes.names() if name not in {one.name for one in _LISTED}]


def draw_variant(draw: random.Random, **wanted: Any) -> tuple[str, dict[str, Any]]:
    choices = [one for one in VARIANTS if all(getattr(one, key) == value for key, value in wanted.items())]
    chosen = draw.choice(choices)
    return chosen.name, dict(chosen.options)


def variant_of(case: dict[str, Any]) -> Variant:
    name, options = case["scheme"]
    return next((one for one in VARIANTS if (one.name, one.options) == (name, options)), Variant(name, options))


def optimizer_of(case: dict[str, Any]) -> str:
    """The optimizer that `case` names, or the one that its scheme needs."""
    return "adamw" if schemes.needs_momenta(case["scheme"][0]) else str(case["optimizer"])
