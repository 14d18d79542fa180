"""A plan: what a step would take under every scheme, here or elsewhere, and one sentence on what to do."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradwire.errors import InvalidArgument
from gradwire.schemes.auto.costs import CostProfile, break_even_rate
from gradwire.schemes.auto.fidelity import levels_to, row_of
from gradwire.schemes.auto.law import PLAIN
from gradwire.wire.communicator import ring_bytes

PLAN_VERSION = 1
_MARGIN = 1.03  # what a recommendation has to win, as in the control law


@dataclass(frozen=True)
class Forecast:
    """One scheme: seconds a step, whether that was measured here, bytes a rank sends, and the link rate below which it pays."""

    spec: str
    level: str
    step_s: float
    is_measured: bool
    sent_bytes: float
    pays_below_bps: float | None
    by_name_only: bool


@dataclass(frozen=True)
class Plan:
    """The measurements of a run, and what follows."""

    profile: CostProfile  # scheme "auto" takes it: `by_name("auto", profile=plan.profile.as_dict())`
    compute_s: float  # what a step computes, without waiting
    plain_s: float  # what it takes under DDP, the slowest rank's
    measured_s: Mapping[str, float]  # seconds a step of the schemes that were tried
    fidelity: str
    adam: bool  # the optimizer is one of Adam's kin
    links: tuple[tuple[int, int, float, float], ...] = ()  # (one rank, other, bytes/s, seconds there and back)
    is_here: bool = True  # this is the network that was measured, not another

    def forecasts(self) -> list[Forecast]:
        """Every scheme that the profile knows, the fastest first, plain among them."""
        profile, step = self.profile, self.profile.step(self.compute_s)
        n_ranks, n_values, predicted = profile.machine.n_ranks, sum(profile.buckets), profile.predict_s(self.compute_s)
        # What the model misjudges in DDP itself it misjudges in all.
        bias = self.plain_s / predicted[PLAIN] if self.is_here and predicted[PLAIN] else 1.0
        found = []
        for spec, codec in profile.costs.items():
            row, shape, message = row_of(spec), profile.shapes[spec], n_values * codec.bits / 8
            step_s = max(self.measured_s.get(spec, predicted[spec] * bias), 0.0)
            sent = (n_ranks - 1) * message if shape == "gather" else ring_bytes(int(message), n_ranks)
            rate = None
            if spec != PLAIN:
                rate = break_even_rate(shape, codec, step, profile.link, profile.machine, _MARGIN)
            below_bps, is_measured = None if rate is None else 8 * rate, spec in self.measured_s
            found.append(Forecast(spec, row.level, step_s, is_measured, sent, below_bps, row.by_name_only))
        return sorted(found, key=lambda forecast: (forecast.step_s, forecast.spec))

    @property
    def plain(self) -> Forecast:
        """DDP as it is."""
        return next(forecast for forecast in self.forecasts() if forecast.spec == PLAIN)

    def best(self, level: str) -> Forecast:
        """The fastest scheme that `level` allows by itself, plain if none wins by the margin."""
        allowed, plain = levels_to(level), self.plain
        for forecast in self.forecasts():
            if forecast.spec != PLAIN and forecast.level in allowed and not forecast.by_name_only:
                # What was measured counts for more than what was predicted to be a little faster.
                doubt = 1.0 if forecast.is_measured or not self.measured_s else 1.15
                if forecast.step_s * doubt * _MARGIN < plain.step_s:
                    return forecast
        return plain

    def sentence(self) -> str:
        """Say what to do, and why."""
        plain, best = self.plain, self.best(self.fidelity)
        waits = max(0.0, 1 - self.compute_s / plain.step_s) if plain.step_s else 0.0
        if best.spec == PLAIN:
            rates = [f.pays_below_bps for f in self.forecasts() if f.pays_below_bps and not f.by_name_only]
            below = f" Compression would pay below {describe_rate(max(rates))}." if rates else ""
            return f"Use plain DDP: a step waits for the network {waits:.0%} of its time, and nothing wins 3 %.{below}"
        gain = plain.step_s / best.step_s
        how = "measured" if best.is_measured else "predicted"
        level = "" if best.level == "exact" else f', fidelity="{best.level}"'
        return (
            f"Take gradwire.attach(ddp, optimizer{level}): {best.spec} is {gain:.2g} times as fast as DDP here ({how}); "
            f"a step waits for the network {waits:.0%} of its time."
        )

    def elsewhere(
        self,
        n_ranks: int | None = None,
        rate_bps: float | None = None,
        rtt_s: float = 0,
        loss: float = 0,
        streams: int = 1,
    ) -> "Plan":
        """The same model and machine with more ranks, or on another network: all predicted.

        Args:
            rtt_s, loss, streams: of a path between sites, which every hop takes and TCP connections share (`LinkCost.over`).
        Raises: InvalidArgument.
        """
        machine, link = self.profile.machine, self.profile.link
        if n_ranks is not None:
            if n_ranks < 2:
                raise InvalidArgument(f"a plan is for two ranks or more, not {n_ranks}")
            machine = replace(machine, n_ranks=n_ranks, n_local=min(machine.n_local, n_ranks))
        if rate_bps is not None:
            if not rate_bps > 0:
                raise InvalidArgument(f"a rate is positive, got {rate_bps}")
            link = replace(link, rate=rate_bps / 8)
        link = link.over(rtt_s, loss, streams)
        profile = replace(self.profile, machine=machine, link=link)
        plain_s = profile.predict_s(self.compute_s)[PLAIN]
        return replace(self, profile=profile, plain_s=plain_s, measured_s={}, links=(), is_here=False)

    def slow_ranks(self) -> list[int]:
        """Ranks all of whose links are slower than two thirds of the typical link."""
        best: dict[int, float] = {}
        for *ranks, rate, _ in self.links:
            best |= {rank: max(rate, best.get(rank, 0.0)) for rank in ranks}
        if len(best) <= 2:
            return []
        typical = statistics.median_high(rate for _, _, rate, _ in self.links)
        return sorted(rank for rank, rate in best.items() if rate < typical * 2 / 3)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: everything that was measured, and what follows."""
        return {
            "version": PLAN_VERSION,
            **asdict(self),
            "profile": self.profile.as_dict(),
            "links": [list(link) for link in self.links],
            "slow_ranks": self.slow_ranks(),
            "sentence": self.sentence(),
            "take": self.best(self.fidelity).spec,
            "forecasts": [
                asdict(one) | ({"pays_below_bps": "always"} if one.pays_below_bps == math.inf else {})
                for one in self.forecasts()
            ],
        }

    @classmethod
    def from_dict(cls, saved: Any) -> "Plan":
        """Read what `as_dict` gave. Raises: InvalidArgument."""
        try:
            if saved["version"] != PLAN_VERSION:
                raise InvalidArgument(f"this plan has version {saved['version']}, this gradwire reads {PLAN_VERSION}")
            return cls(
                CostProfile.from_dict(saved["profile"]),
                float(saved["compute_s"]),
                float(saved["plain_s"]),
                dict(saved["measured_s"]),
                str(saved["fidelity"]),
                bool(saved["adam"]),
                tuple((int(a), int(b), float(rate), float(rtt)) for a, b, rate, rtt in saved["links"]),
                bool(saved["is_here"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(f"this is not a plan of `gradwire recommend --json`: {error}") from error


def describe_rate(bps: float | None) -> str:
    """A rate as people say it."""
    if bps is None:
        return "never"
    if math.isinf(bps):
        return "always"
    for unit, name in ((1e9, "Gb/s"), (1e6, "Mb/s")):
        if bps >= unit:
            return f"{bps / unit:.2g} {name}" if bps < 100 * unit else f"{bps / unit:.0f} {name}"
    return f"{bps / 1e3:.0f} kb/s"
