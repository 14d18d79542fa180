"""Local SGD with an outer optimizer (DiLoCo): ranks step alone, and every H steps exchange how their parameters changed.

    loop = gradwire.LocalSgd(model, optimizer, "embedded-float", every=500)
    ...the training loop as it is...
    loop.close()

The pseudo-gradient, anchor - parameter, is reduced by a scheme; the outer optimizer steps the anchors with the mean; the
parameters go on from there. Douillard et al., DiLoCo, 2023; overlap and fragments as in Streaming DiLoCo, 2025.

When not to use this: where the link carries every step's gradients in the time of a step; DDP with a scheme then learns more
from each step.
"""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from gradwire import checks
from gradwire.core.bucket import inner_of, local_of, named_parameters
from gradwire.core.named_tensors import AllReduceWork
from gradwire.core.optimizers import Optimizers
from gradwire.doors.elastic import Quorum
from gradwire.doors.gradients import check_equal
from gradwire.errors import CorruptMessage, GradwireError, InvalidArgument, Unsupported
from gradwire.reducer import Reducer
from gradwire.schemes import Scheme, by_name
from gradwire.stepping.interception import watch_scalers

OuterOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
# Error feedback delays what it carries, and momentum multiplies what comes late. At 0.5 the difference is small, and at 0
# feedback is better.
MOST_MOMENTUM_WITH_FEEDBACK = 0.5


def nesterov(anchors: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """The DiLoCo paper's outer optimizer."""
    return torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)


def average(anchors: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """No outer momentum: the shared parameters become the ranks' mean (local SGD, SparseLoCo)."""
    return torch.optim.SGD(anchors, lr=1.0)


# By name, for configurations.
OUTER: dict[str, OuterOptimizer] = {"nesterov": nesterov, "average": average}


class LocalSgd:
    """Outer steps every `every` calls of `optimizer.step()`. Collective; every rank of the group steps equally often.

    Of several optimizers a step is over when all of them have stepped, or when one is about to step again.

    Args:
        module: not wrapped in DDP over the same ranks; FSDP2, or DDP over other ranks, inside is fine.
        optimizer: the inner one, or a list of all; their state stays each rank's own.
        scheme: how pseudo-gradients are reduced; not one that reads the optimizer, or steps parameters. A name is made with
            error feedback off where the outer optimizer has a momentum above 0.5.
        every: H, inner steps between two outer ones.
        outer: makes the outer optimizer of the anchors, the parameters after the last outer step.
        group: who exchanges (default: all ranks); with FSDP2 those that hold the same shard. Or torchft's Manager, with
            `pg=gradwire.Members()`, if ranks may leave, die and join at outer steps; without `delay`, and `scheme` is a name.
            The constructor waits for the others' next outer step then, and takes what they share.
        delay: inner steps that the exchange may overlap with (0: none). Their updates are kept.
        fragments: parts of the model, about equally large, that are exchanged in turn, each every `every` steps: as many bytes
            in all, of which as few times fewer come at once. An exchange ends before the next begins.
        feedback_decay: of a scheme with error feedback, the share of a residual that is kept from one exchange to the next:
            1 keeps all of it; below, what was left out long ago fades, and takes the outer momentum's place
            (SparseLoCo, arXiv 2508.15706).
        options: as for Reducer: bucket_mb, timeout_s, trace; and `scaler`, the GradScaler, which need not be given: a step that
            any GradScaler skips counts as a step.
    Raises: InvalidArgument, Unsupported; the first `optimizer.step()` InvalidArgument, on all ranks, if these start apart.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheme: Scheme | str,
        every: int,
        outer: OuterOptimizer = nesterov,
        group: Any = None,
        delay: int = 0,
        fragments: int = 1,
        feedback_decay: float = 1.0,
        **options: Any,
    ) -> None:
        for name, number, least in (("every", every, 1), ("fragments", fragments, 1), ("delay", delay, 0)):
            checks.count(name, number, least)
        if not 1 <= fragments <= every or not 0 <= delay < every // fragments:
            raise InvalidArgument(
                "every must be at least fragments, that at least 1, and delay from 0 to every // fragments - 1, got "
                f"every={every}, fragments={fragments}, delay={delay}"
            )
        if not 0 <= feedback_decay <= 1:
            raise InvalidArgument(f"feedback_decay is a share from 0 to 1, got {feedback_decay}")
        manager = group if hasattr(group, "start_quorum") else None
        if manager is not None and delay:
            raise InvalidArgument("an exchange among ranks that come and go overlaps with nothing: leave out delay=")
        if manager is not None and not isinstance(scheme, str):
            raise InvalidArgument(f"ranks that come and go make their scheme anew: give the name of {scheme.name!r}")
        options.pop("scaler", None)
        self._every, self._delay, self._count = every, delay, 0
        self._ends = [every * (number + 1) // fragments for number in range(fragments)]  # of the fragments' exchanges
        self._module, self._named = inner_of(module), named_parameters(module)
        if odd := [name for name, parameter in self._named.items() if parameter.is_complex()]:
            raise Unsupported(f"parameter {odd[0]} is complex: keep its real and imaginary part as two parameters")
        # On the host and in float32: the outer step comes once in H, and needs no memory of the device.
        self._anchors: dict[str, nn.Parameter] = {}
        self._anchor(name for name, parameter in self._named.items() if parameter.requires_grad)
        self._outer = outer(list(self._anchors.values()))
        momentum = max(float(group.get("momentum", 0.0)) for group in self._outer.param_groups)
        forced = _fit_scheme(scheme, momentum)

        def make(place: Any) -> Reducer:
            made = by_name(scheme, **forced) if isinstance(scheme, str) else scheme
            reducer = Reducer(made, place, self._anchors, **options)
            reducer.session.feedback.decay = feedback_decay
            return reducer

        self._deltas: dict[str, torch.Tensor] = {}
        self._sent: dict[str, torch.Tensor] = {}
        self._work: AllReduceWork | None = None
        self._is_compared = manager is not None
        self._quorum: Quorum | None = None
        if manager is None:
            self.reducer = make(group)
        else:
            self._quorum = Quorum(manager, make, self._shared, self._take_shared)
            self._exchange(self._quorum)
        self._optimizers, self._stepped = Optimizers(optimizer), set[torch.optim.Optimizer]()
        self._handles = []
        for one in self._optimizers:
            self._handles += [
                one.register_step_pre_hook(lambda stepping, *_: self._before_step(stepping)),
                one.register_step_post_hook(lambda stepping, *_: self._after_step(stepping)),
                watch_scalers(one, functools.partial(self._after_scaler, one)),
            ]

    def _anchor(self, names: Iterable[str]) -> list[nn.Parameter]:
        """Anchor these parameters where they are not, in the module's order, by which states name them. Returns: new ones."""
        made = {name: nn.Parameter(_on_host(self._named[name]).clone()) for name in names if name not in self._anchors}
        anchors = self._anchors | made
        self._anchors = {name: anchors[name] for name in self._named if name in anchors}
        return list(made.values())

    def _anchor_later(self, names: Iterable[str]) -> None:
        if made := self._anchor(names):
            order = {anchor: number for number, anchor in enumerate(self._anchors.values())}
            stepped = self._outer.param_groups[0]["params"]
            stepped[:] = sorted([*stepped, *made], key=lambda anchor: order[anchor])

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in self._stepped:
            self._end_step()
        if not self._is_compared:
            self._is_compared = True
            check_equal(self.reducer, self._anchors)
        # Before the first step that changes it, when all ranks have the same.
        self._anchor_later(name for name, parameter in self._named.items() if parameter.requires_grad)

    def _after_scaler(self, optimizer: torch.optim.Optimizer, scaler: Any, has_stepped: bool) -> None:
        if not has_stepped:
            self._before_step(optimizer)
            self._after_step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._stepped.add(optimizer)
        if len(self._stepped) == len(self._optimizers):
            self._end_step()

    @torch.no_grad()
    def _end_step(self) -> None:
        self._stepped.clear()
        self._count += 1
        if self._quorum is not None:
            if self._count in self._ends:
                self._exchange(self._quorum)
            return
        if self._count + self._delay in self._ends:
            self._deltas = self._subtract()
            self._sent = {name: delta.clone() for name, delta in self._deltas.items()} if self._delay else {}
            self._work = self.reducer.all_reduce(self._deltas) if self._deltas else None
        if self._count in self._ends:
            self._count %= self._every
            work, self._work = self._work, None
            if work is not None:  # else a fragment in which nothing lies
                work.wait()
                self._step_outer()

    @torch.no_grad()
    def _exchange(self, quorum: Quorum) -> None:
        """With who is there: what this rank has learnt, or what they have, if it has just come."""
        self._deltas = quorum.mean(self._subtract)
        self._count %= self._every
        assert quorum.reducer is not None
        self.reducer = quorum.reducer
        self._step_outer()

    def _subtract(self) -> dict[str, torch.Tensor]:
        """The pseudo-gradients of the fragment that is due."""
        if self._count + self._delay not in self._ends:  # all ranks begin
            return {}
        names = self._fragment(self._ends.index(self._count + self._delay))
        return {name: self._anchors[name].detach() - _on_host(self._named[name]) for name in names}

    def _shared(self) -> dict[str, Any]:
        """What all ranks hold alike: what a comer takes, by any thread, while an exchange is due."""
        rest = {name: value for name, value in self._module.state_dict().items() if name not in self._anchors}
        return {"count": self._count, "anchors": self._anchors, "outer": self._outer.state_dict(), "rest": rest}

    @torch.no_grad()
    def _take_shared(self, shared: dict[str, Any]) -> None:
        anchors, rest = shared["anchors"], shared["rest"]
        own = self._shared()
        for mine, theirs in ((own["anchors"], anchors), (own["rest"], rest)):
            odd = sorted(name for name in mine.keys() | theirs.keys() if _shape(mine, name) != _shape(theirs, name))
            if odd:
                raise InvalidArgument(f"the ranks that are here train another model: {odd[0]!r} is not the same there")
        self._set_anchors(anchors)
        self.take_shared()
        self._module.load_state_dict(rest, strict=False)
        self._outer.load_state_dict(shared["outer"])
        self._count = shared["count"]

    def _fragment(self, number: int) -> list[str]:
        """The names of a fragment: those whose middle lies in its share of all values."""
        n_fragments, names, end = len(self._ends), [], 0
        total = sum(anchor.numel() for anchor in self._anchors.values())
        for name, anchor in self._anchors.items():
            middle, end = end + anchor.numel() / 2, end + anchor.numel()
            if min(int(middle * n_fragments / max(1, total)), n_fragments - 1) == number:
                names.append(name)
        return names

    def _step_outer(self) -> None:
        exchanged = {name: self._anchors[name] for name in self._deltas}
        before = {name: a.detach().clone() for name, a in exchanged.items()} if self._delay else {}
        for name, anchor in exchanged.items():
            anchor.grad = self._deltas[name]
        self._outer.step()
        for name, anchor in exchanged.items():
            anchor.grad = None
            local = local_of(self._named[name])
            if self._delay:  # the new anchor, and what was learnt since the exchange began
                local.add_((anchor.detach() - before[name] + self._sent[name]).to(local.device))
            else:
                local.copy_(anchor)
        self._deltas, self._sent = {}, {}

    @torch.no_grad()
    def take_shared(self) -> None:
        """Set the parameters to the shared ones, as the last exchange of each left them: the same on all ranks. To
        evaluate or to save, at the end, or where there are fragments or a delay; what ranks have learnt since goes."""
        for name, anchor in self._anchors.items():
            local_of(self._named[name]).copy_(anchor)

    def stats(self) -> dict[str, Any]:
        """The Reducer's: bytes and times of the exchanges, and the scheme's own figures."""
        return self.reducer.stats()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state between two inner steps. Raises: InvalidArgument while an exchange is under way."""
        if self._work is not None:
            raise InvalidArgument(
                "an exchange is under way: save in the first "
                f"{self._every // len(self._ends) - self._delay - 1} steps after an outer one"
            )
        return {
            "count": self._count,
            "anchors": {name: anchor.detach().clone() for name, anchor in self._anchors.items()},
            "outer": copy.deepcopy(self._outer.state_dict()),
            "reducer": self.reducer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave on this rank. Raises: CorruptMessage, and what Reducer's raises."""
        anchors = state.get("anchors") if isinstance(state, dict) else None
        if (
            not isinstance(anchors, dict)
            or not self._anchors.keys() <= anchors.keys() <= self._named.keys()
            or any(_shape(anchors, name) != local_of(self._named[name]).shape for name in anchors)
            or not isinstance(state.get("count"), int)
            or not 0 <= state["count"] < self._every
        ):
            raise CorruptMessage(
                "this is not the state of a LocalSgd over this model: pass what its state_dict() returned"
            )
        self._anchor_later(anchors)  # of a run that had unfrozen more
        before = {name: anchor.detach().clone() for name, anchor in self._anchors.items()}, self.reducer.state_dict()
        try:
            self.reducer.load_state_dict(state["reducer"])
            self._set_anchors(anchors)
            self._outer.load_state_dict(copy.deepcopy(state["outer"]))  # which looks before it takes anything
        except Exception as error:
            self._set_anchors(before[0])
            self.reducer.load_state_dict(before[1])
            if isinstance(error, GradwireError):
                raise
            raise CorruptMessage(
                f"this state of a LocalSgd does not read ({type(error).__name__}: {error}): pass what its state_dict() returned"
            ) from error
        self._count, self._is_compared = state["count"], self._quorum is not None
        if self._quorum is not None:
            self._quorum.keep()

    @torch.no_grad()
    def _set_anchors(self, values: dict[str, torch.Tensor]) -> None:
        for name, anchor in self._anchors.items():
            anchor.copy_(values[name])

    def close(self) -> None:
        """Every rank calls it; ranks keep the parameters that they have."""
        for handle in self._handles:
            handle.remove()
        self.reducer.close()


def _fit_scheme(scheme: Scheme | str, momentum: float) -> dict[str, Any]:
    """Options for a named scheme: no error feedback where that and the outer momentum do not go together."""
    made = by_name(scheme) if isinstance(scheme, str) else scheme
    if made.owns_step or made.replicas_may_differ:
        raise Unsupported(f"scheme {made.name!r} does more than reduce; LocalSgd takes one that only reduces")
    if momentum <= MOST_MOMENTUM_WITH_FEEDBACK or not getattr(made, "error_feedback", False):
        return {}
    words = f"error feedback and an outer momentum of {momentum:g} do not go together (of more than 0.5): "
    if isinstance(scheme, str):
        with contextlib.suppress(InvalidArgument):  # it cannot be without, or is asked for
            by_name(scheme, error_feedback=False)
            warnings.warn(f"{words}{made.name!r} is used without; or give outer=... less momentum", stacklevel=3)
            return {"error_feedback": False}
    warnings.warn(f"{words}give {made.name!r} error_feedback=False, or outer=... less momentum", stacklevel=3)
    return {}


def _shape(tensors: dict[str, Any], name: str) -> Any:
    return getattr(tensors.get(name), "shape", None)


def _on_host(parameter: torch.Tensor) -> torch.Tensor:
    return local_of(parameter.detach()).float().cpu()
