"""The scheme `auto`: watches, tries, switches, and stays plain where nothing is to be won.

It holds the schemes that `fidelity` allows, all bound to one session, and hands each step to one of them, as the control law
says (law.py) from numbers that all ranks share (turns.py). Steps begin plain and without a communication hook, so that where
nothing is to be won DDP runs as it does without gradwire (doors/hook.py). On a GPU steps are timed by the device, and
candidates run between devices, in host memory, or both, as the attachment's `placement` says.

When not to use this: where a run must be repeated bit for bit, unless by `replay`; it decides by the clock.
"""

import itertools
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire import schemes
from gradwire.core.bucket import Bucket, Slot, check_trained
from gradwire.core.checkpoint import not_the_state
from gradwire.core.optimizers import FAMILIES
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.schemes.auto.costs import CostProfile, measure_profile
from gradwire.schemes.auto.fidelity import FIRST_ADAM_STEP, ON_DEVICE, FidelityRow, rows_for
from gradwire.schemes.auto.law import PLAIN, Law
from gradwire.schemes.auto.turns import LAG, Turns, Vote, is_changed
from gradwire.schemes.base import Scheme
from gradwire.telemetry.stopwatch import Lap, Marks
from gradwire.wire.preamble import call_together
from gradwire.wire.wire import Wire

_log = logging.getLogger("gradwire.auto")
_N_SHARES = 8  # a residual all at once would be a step several gradients long


class ResidualHandover:
    """Residuals of a scheme that another has replaced, by slot, without the loss scale: they go into the next steps' gradients,
    in eighths, on the training thread."""

    def __init__(self) -> None:
        self._left: dict[Slot, tuple[torch.Tensor, int]] = {}  # what one step takes, steps to go
        self._added: set[Slot] = set()  # in this step

    def __bool__(self) -> bool:
        return bool(self._left)

    def take(self, residuals: Mapping[Slot, torch.Tensor]) -> None:
        """Begin to hand these (n,) over beside what is still under way."""
        for slot, residual in residuals.items():
            residual = residual.detach().reshape(-1).float()
            if slot.parameter is not None:  # where its gradients are
                residual = residual.to(slot.parameter.device)
            share, n_steps = self._left.pop(slot, (torch.zeros_like(residual), 0))
            self._left[slot] = ((residual + share * n_steps) / _N_SHARES, _N_SHARES)

    def add_to(self, slots: Sequence[Slot], gradients: Sequence[torch.Tensor], loss_scale: float, asks: bool) -> None:
        """gradient += its share x loss_scale. For a gradient that is all zero here it keeps waiting: DDP may throw it away.
        `asks`: whether to look for such on a device too, which has to be waited for."""
        for slot, gradient in zip(slots, gradients, strict=True):
            kept = self._left.get(slot)
            if kept is not None and ((gradient.device.type != "cpu" and not asks) or bool(gradient.any())):
                gradient.view(-1).add_(kept[0].to(gradient.dtype), alpha=loss_scale)
                self._added.add(slot)

    def end_step(self, was_applied: bool) -> None:
        """The step is over; one that was skipped (an overflow) takes nothing."""
        for slot in self._added if was_applied else ():
            share, n_steps = self._left.pop(slot)
            if n_steps > 1:
                self._left[slot] = share, n_steps - 1
        self._added.clear()

    def left(self) -> dict[Slot, torch.Tensor]:
        """The sums that have not been added yet."""
        return {slot: share * n_steps for slot, (share, n_steps) in self._left.items()}


class Auto(Turns):
    """One of several schemes at a time, chosen by measurement; never slower than plain DDP, but for a budget.

    Args:
        fidelity: "exact" (the losses of DDP), "close", "any": what each allows is one table
            (`gradwire.schemes.auto.fidelity`, docs/auto.md); or a list of schemes, NAME:option=value, and no others.
        candidates: schemes to allow besides; at least as faithful as `fidelity`.
        budget: share of the run's time that trials may cost, 0 to 0.1. With 0 nothing is tried: all stays plain.
        replay: [(step, scheme)]: the `schedule` of an earlier run's stats, to be repeated step by step.
        profile: what `gradwire recommend` measured on this cluster, instead of measuring when attached.
    """

    works_on_device = True

    def __init__(
        self,
        fidelity: str | Sequence[str] = "exact",
        candidates: Sequence[str] = (),
        budget: float = 0.01,
        replay: Sequence[tuple[int, str]] | None = None,
        profile: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(fidelity, budget)
        self._also = list(candidates)
        rows_for(self._fidelity, FAMILIES, self._also)  # its complaints, now
        self._is_on_device = False  # whether the model is
        self._replay = None if replay is None else sorted((int(step), str(spec)) for step, spec in replay)
        self._given = None if profile is None else CostProfile.from_dict(profile)
        self._profiles: list[CostProfile] = []  # once bound: of the link that plain steps use first
        self._rows: list[FidelityRow] = []
        self._excluded: dict[str, str] = {}
        self._handover = ResidualHandover()
        self._records: list[Any] = []
        self._n_steps, self._last_scale = 0, 0.0
        self._stays_plain = ""
        self._objection = ""  # of the scheme at work, on this rank
        # The sums of all ranks' objections, under way: read a step later, so that nobody waits a round trip for them.
        self._asked: deque[tuple[torch.futures.Future, torch.Tensor]] = deque()
        self._n_late = 0  # of them may still be on their way
        self._plain = schemes.by_name(PLAIN)  # for a step that an objection meets under way

    @property
    def configuration(self) -> dict[str, Any]:
        return {"fidelity": self._fidelity, "candidates": self._also, "budget": self._budget}

    # ---- binding

    def bind(self, session: Session) -> None:
        """Bind every candidate and measure. Collective. Raises: InvalidArgument (no DDP model), RankMismatch, PeerLost."""
        module = session.module
        if not isinstance(module, DistributedDataParallel):
            raise InvalidArgument(
                'scheme "auto" times the steps of a DDP model: gradwire.attach(ddp, optimizer), or HookState(..., module=ddp)'
            )
        super().bind(session)
        self._plain.bind(session)
        self._stays_plain = self._objection = ""
        self._asked.clear()
        self._stepping = self._plain
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._is_on_device = any(parameter.device.type != "cpu" for parameter in parameters)
        families = session.optimizers.families(parameters)
        self._tell_unknown(parameters)
        rows = rows_for(self._fidelity, families, self._also, session.communicator.world_size)
        if session.communicator.world_size == 1 or self._can_only_be_plain(module):
            rows = rows[:1]
        rows = self._place(rows)
        for row in rows[1:]:
            try:
                sub = schemes.by_name(row.scheme)
                sub.objection = self._note_objection
                sub.bind(replace(session, wire=self._wire_of(row)))
            except (Unsupported, InvalidArgument) as error:
                self._excluded[row.spec] = str(error)
            else:
                self._subs[row.spec] = sub
        self.state_is_per_world = any(sub.state_is_per_world for sub in self._subs.values())
        self._rows = [rows[0], *(row for row in rows if row.spec in self._subs)]
        self._compare_offers([*(row.spec for row in self._rows), repr((self._given, self._replay))])
        self._profiles = [self._given] if self._given else [self._measure(wire, parameters) for wire in self._wires]
        predicted = {spec: us for profile in self._profiles for spec, us in profile.predict_us(1).items()}
        known = {row.spec: predicted.get(row.spec, predicted[PLAIN]) for row in self._rows}
        late = {row.spec: FIRST_ADAM_STEP for row in self._rows if row.not_before and families != {"sgd"}}
        self.law = Law(known, self._budget_permille, self._predict, self._family_of, late)

    @property
    def _wires(self) -> list[Wire]:
        """The device's first, where there is one: plain steps take that."""
        return [wire for wire in (self.session.device_wire, self.session.wire) if wire is not None]

    def _place(self, rows: list[FidelityRow]) -> list[FidelityRow]:
        """The rows as they run here: between devices, in host memory, or each of the two. Plain steps are DDP's own."""
        placed = rows[:1]
        for row, wire in itertools.product(rows[1:], self._wires):
            if wire.on_device or not row.is_on_device:
                placed.append(row.on_device() if wire.on_device else row)
        return placed

    def _wire_of(self, row: FidelityRow) -> Wire:
        return self._wires[0 if row.is_on_device or row.spec == PLAIN else -1]

    def _measure(self, wire: Wire, parameters: Sequence[torch.Tensor]) -> CostProfile:
        rows = [row for row in self._rows if self._wire_of(row) is wire]
        return self.session.communicator.submit(measure_profile, wire, rows, parameters).wait()

    def _family_of(self, spec: str) -> str:
        """Schemes whose predictions err alike: of one way to communicate, by one wire."""
        index = next((i for i, profile in enumerate(self._profiles) if spec in profile.shapes), 0)
        return self._profiles[index].family_of(spec) + (" in host memory" if index else "")

    def _tell_unknown(self, trained: Sequence[torch.Tensor]) -> None:
        """Name on rank 0 an optimizer whose family cannot be told."""
        optimizers = self.session.optimizers
        unknown = [one for p in trained if (one := optimizers.of(p)) and optimizers.family_of(p) == "unknown"]
        if unknown and self.session.communicator.rank == 0:
            _log.warning(
                "what a step of %s does with a gradient cannot be told: schemes are chosen by the error of the gradient alone "
                "(docs/auto.md)",
                type(unknown[0].optimizer).__name__,
            )

    def _can_only_be_plain(self, module: DistributedDataParallel) -> bool:
        """Return whether the model has what no scheme takes; it is said once, and the same on all ranks."""
        try:
            check_trained(module)
            if getattr(module, "_use_python_reducer", False):
                raise Unsupported("torch.compile's python_reducer makes no buckets")
        except (Unsupported, InvalidArgument) as error:
            self.stay_plain(str(error))
        return bool(self._stays_plain)

    def _predict(self, computing_us: int) -> dict[str, int]:
        return {spec: us for profile in self._profiles for spec, us in profile.predict_us(computing_us).items()}

    # ---- a step

    def begin_at(self, step: int) -> None:
        super().begin_at(step)
        self._asked.clear()
        self._n_steps = step

    def choose(self, step: int) -> None:
        """Read what is due, and decide: on the training thread, before the first forward pass of `step`. Raises: RankMismatch
        (ranks are at different steps), PeerLost."""
        self._end_handover_step()
        while (vote := self._polls.next_before(step - self._lag())) is not None:
            self._count(vote)
        name = self._replayed(step) if self._replay is not None else self.law.scheme_of(step)
        if self._stays_plain:
            name = PLAIN
        if name != self.active and self.active != PLAIN:
            self._take_over_from(self._subs[self.active])
        self._n_late = int(name == self.active)  # a scheme that begins its turn has found before what it objects to
        self.active = name
        self._enter(step, name)
        if name != PLAIN and self._subs[name].may_object:
            communicator = self.session.communicator
            said = torch.tensor([int(bool(self._objection))], dtype=torch.int64, device="cpu")
            self._asked.append((communicator.submit(communicator.start_all_reduce, said), said))

    def _take_over_from(self, sub: Scheme) -> None:
        """Have the next steps send what `sub` has not sent, once it has committed its last step."""
        wire = sub.session.wire

        def take() -> dict[Slot, torch.Tensor]:
            sub.settle()
            with wire.at_work():
                return self.session.feedback.take()

        left = self.session.communicator.submit(take).wait()
        wire.lend(left.values())
        if left:
            self._last_scale = self.session.loss_scale()
            self._handover.take(left)

    def _replayed(self, step: int) -> str:
        assert self._replay is not None
        name = next((spec for since, spec in reversed(self._replay) if since <= step), PLAIN)
        for spec in (name, name + ON_DEVICE):  # it may be of a run in host memory
            if spec == PLAIN or spec in self._subs:
                return spec
        raise InvalidArgument(f"the schedule to replay names {name!r}, which is not allowed here")

    def _end_handover_step(self) -> None:
        if not self._handover:
            return
        scale = self.session.loss_scale()
        self._handover.end_step(was_applied=scale >= self._last_scale)  # a scaler lowers it where it skips a step
        self._last_scale = scale

    def add_residuals(self, slots: Sequence[Slot], gradients: Sequence[torch.Tensor]) -> None:
        """Add what an earlier scheme has not sent, before the gradients are reduced."""
        if self._handover:
            may_be_unused = bool(getattr(self.session.module, "find_unused_parameters", False))
            self._handover.add_to(slots, gradients, self._last_scale, asks=may_be_unused)

    def _note_objection(self, error: Unsupported) -> None:
        """Note what the scheme at work cannot serve: it does not end what DDP trains, and once all ranks
        have heard of it they stay plain."""
        self._objection = self._objection or str(error)

    def begin_step(self, step: int) -> None:
        self._stepping = self._subs[self.active]
        while len(self._asked) > self._n_late:
            started, said = self._asked.popleft()
            self.session.communicator.finish(started.wait())
            if said.item():
                self._stepping = self._plain
                self._say_plain(self._objection or "another rank has found what its scheme cannot serve; see its log")
        self._stepping.begin_step(step)

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        self._records.append(bucket.record)
        return super().reduce(bucket)

    @property
    def wire_at_work(self) -> Wire:
        return self._stepping.session.wire

    @property
    def carries_residuals(self) -> bool:
        return bool(self._handover)

    def divide_kept(self, by: float) -> None:
        with self.wire_at_work.at_work():
            super().divide_kept(by)

    def settle(self) -> None:
        self._stepping.settle()

    def end_watched_step(self, step: int, took_ns: int, waited_ns: int, on_device: Marks | None = None) -> None:
        """Put this rank's numbers (`Lap`) to the vote: on the training thread, after the backward pass of `step`."""
        self._n_steps = step + 1
        fell_back = any(record.fallbacks for record in self._records)
        self._records.clear()
        if self.session.communicator.world_size == 1 or self._replay is not None or self._stays_plain:
            return
        link = self.session.device_wire or self.session.wire  # of plain steps
        self._vote(step, Lap(took_ns, waited_ns, on_device), fell_back, (p.grad for p in self.session.names), link)

    def _lag(self) -> int:
        """The steps that a vote may take; the same on all ranks. A device may always be so far behind."""
        if self._is_on_device:
            return LAG
        plain = self._profiles[0]
        return self._lag_of(2e6 * (plain.machine.n_ranks - 1) * plain.link.backend_hop_s)

    def _count(self, vote: Vote) -> None:
        if vote.density:
            self._profiles = [replace(profile, density=vote.density) for profile in self._profiles]
        super()._count(vote)

    def _note_transfer(self, transfer_us: int) -> bool:
        """Whether a probe of plain steps' link says that it is another. Host memory's, beside it, is taken to have changed as
        much."""
        plain, *beside = self._profiles
        found_us = self._probes.found(transfer_us, plain.link.rate, lambda us: plain.with_transfer(us).link.rate)
        if found_us:
            found = plain.with_transfer(found_us)
            factor = found.link.rate / plain.link.rate
            self._profiles = [found, *(one.at_rate(factor * one.link.rate) for one in beside)]
        return bool(found_us)

    def plan_for(self, rate_bps: float) -> tuple[float, str, float]:
        """(seconds a step under plain, the best scheme, its seconds) on a link of that rate, by the model alone. The best is
        plain where nothing wins 3 %."""
        there: dict[str, int] = {}
        for profile in self._profiles:
            there |= profile.at_rate(rate_bps / 8).predict_us(self.law.computing_us)
        best = min(self.law.candidates, key=lambda spec: (there[spec], spec))
        if there[best] * 1.03 >= there[PLAIN]:
            best = PLAIN
        return there[PLAIN] / 1e6, best, there[best] / 1e6

    def stay_plain(self, why: str) -> None:
        """Never leave DDP's own all-reduce again: something outside forbids it. On all ranks alike."""
        self._say_plain(why)
        self.active = PLAIN

    def _say_plain(self, why: str) -> None:
        """From the next step on."""
        self._stays_plain = why
        _log.warning("auto stays plain: %s", why)

    def agree_on_step(self, step: int) -> int:
        """The next step's number, after steps that some ranks have not seen. Collective. Raises: PeerLost."""
        communicator = self.session.communicator
        latest = max(communicator.submit(call_together, communicator, "switch", step).wait())
        self.begin_at(latest)
        return latest

    def stats(self) -> dict[str, Any]:
        """`auto`: state, scheme, candidates with what was predicted and measured, decisions with reasons, the schedule."""
        found = super().stats()
        found["auto"] |= {
            "state": "stay" if self._stays_plain else self.law.state,
            "candidates": [
                *(self.law.candidates[row.spec].as_dict() | {"level": row.level, "excluded": ""} for row in self._rows),
                *({"spec": spec, "excluded": why} for spec, why in self._excluded.items()),
            ],
            "link_mbit": self._profiles[0].link.rate * 8 / 1e6,
            "density": self._profiles[0].density,
            "stays_plain": self._stays_plain,
        }
        return found

    # ---- between runs

    def state_dict(self) -> dict[str, Any]:
        self._end_handover_step()
        names = {slot: name for name, slot in self.session.slots.items()}
        # Residuals belong to the run, and so to whoever is at work; other state is kept with its scheme.
        kept = {s: sub for s, sub in self._subs.items() if s == self.active or not sub.state_is_per_world}
        return {
            "law": self.law.state_dict(),
            "rate": self._profiles[0].link.rate,
            "step": self._n_steps,
            "active": self.active,
            "schemes": {spec: sub.state_dict() for spec, sub in kept.items()},
            "carried": {names[slot]: residual.cpu() for slot, residual in self._handover.left().items()},
            "world_size": self.session.communicator.world_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the scheme that was at work. Of another world size only what does not hang on it is taken."""
        saved, active, step = state["schemes"], str(state["active"]), int(state["step"])
        carried = {self.session.slots[name]: residual for name, residual in state["carried"].items()}
        if any(residual.numel() != slot.numel() for slot, residual in carried.items()):
            raise not_the_state("scheme auto", "what it carries has other sizes than the model's parameters")
        is_same_world = int(state["world_size"]) == self.session.communicator.world_size
        if is_same_world:
            now = self._profiles[0].link.rate
            is_same_link = not is_changed(float(state.get("rate", now)), now)
            self.law.load_state_dict(state["law"], step, is_same_link)
        else:
            self.law.go_on_at(step, PLAIN)
        self.session.feedback.clear()  # of the run that is left
        for spec, sub in self._subs.items():
            if spec in saved and (is_same_world or not sub.state_is_per_world):
                sub.load_state_dict(saved[spec])
        self._handover = ResidualHandover()
        self.active = active if is_same_world and active in self._subs else PLAIN
        if is_same_world and carried:
            self._last_scale = self.session.loss_scale()
            self._handover.take(carried)
        self.begin_at(step)

    def hand_over(self) -> dict[Slot, torch.Tensor]:
        self._end_handover_step()
        kept, left = super().hand_over(), self._handover.left()
        self._handover = ResidualHandover()
        return {
            **kept,
            **{slot: one + kept[slot].to(one.device) if slot in kept else one for slot, one in left.items()},
        }

    def unbind(self) -> None:
        self._plain.unbind()
        super().unbind()
