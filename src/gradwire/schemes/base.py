"""What every scheme is, with defaults for all that only some schemes do."""

from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from gradwire.core.bucket import Bucket, Slot
from gradwire.core.session import Session
from gradwire.errors import Unsupported
from gradwire.wire.preamble import FORMAT_VERSION, Preamble, hash_configuration
from gradwire.wire.wire import Wire


class Scheme(metaclass=ABCMeta):
    """One way to replace a bucket by its mean over the ranks.

    Its life: made with its options, `bind` once, then for every step `begin_step`, `reduce` once per bucket and `end_step`;
    `state_dict` between steps; `close` at the end.
    """

    name: str
    # Whether its state depends on how many ranks there are (residuals do, code tables do not).
    state_is_per_world: bool = False
    # Fields of its state that differ between ranks: tensors by name, of which another number of ranks gets the mean.
    # None: its state serves as many ranks as wrote it.
    per_rank_state: tuple[str, ...] | None = ("residuals",)
    # Whether ranks may end a step with different results, by definition of the scheme; all but `periodic` may not.
    replicas_may_differ: ClassVar[bool] = False
    # Whether it waits for each tensor of a device bucket itself (`Bucket.wait_for`); otherwise it gets whole buckets.
    waits_by_tensor: ClassVar[bool] = False
    # Whether it can reduce buckets on their device (`Session.wire`).
    works_on_device: ClassVar[bool] = False
    # Whether it takes every gradient that DDP takes, sparse ones and all dtypes.
    takes_any_gradient: ClassVar[bool] = False
    # Who is told what a bound scheme notices in mid-run that it cannot serve; None: it is raised. Set before `bind`.
    objection: Callable[[Unsupported], None] | None = None
    # Whether it takes the optimizer's step itself (gradwire.stepping); it then needs the model and the optimizer.
    owns_step: bool = False
    # Whether it works with some of torch's optimizers only, whose momenta it exchanges or reads.
    needs_momenta: bool = False
    # Whether the training goes on without its means, which it uses a step later (`ahead.py`). Set before `bind`.
    is_ahead: bool = False

    session: Session

    @property
    def is_transparent(self) -> bool:
        """True if this step's buckets are DDP's own affair, reduced as without gradwire (`auto` while it stays plain)."""
        return False

    @property
    def reads_optimizer(self) -> bool:
        """Whether it reads parameters or the optimizer's state while gradients travel, as all ranks have them then."""
        return False

    @property
    def may_object(self) -> bool:
        """Whether it looks for what it cannot serve while it is at work."""
        return False

    @property
    def wire_at_work(self) -> Wire:
        """The wire of this step's buckets: where they are reduced."""
        return self.session.wire

    @property
    def carries_residuals(self) -> bool:
        """True if `add_residuals` has something to add."""
        return False

    def add_residuals(self, slots: Sequence[Slot], gradients: Sequence[torch.Tensor]) -> None:
        """Add to the gradients, where they are, what an earlier scheme has not sent."""

    @property
    @abstractmethod
    def configuration(self) -> dict[str, Any]:
        """The options that all ranks must share, as plain values."""

    @property
    def is_bound(self) -> bool:
        """True if the scheme has a session: one scheme serves one attachment at a time."""
        return "session" in vars(self)

    def unbind(self) -> None:
        """Let go of the session, after `close`; the scheme may then be bound again."""
        vars(self).pop("session", None)

    def bind(self, session: Session) -> None:
        """Take the session. Raises: Unsupported or InvalidArgument if this run cannot be served."""
        shared = {**self.configuration, "optimizers": str(session.optimizers)}
        if session.wire.on_device:
            if not self.works_on_device:
                raise Unsupported(
                    f"scheme {self.name!r} works on host memory: leave placement out; docs/gpu.md lists what works on devices"
                )
            shared["placement"] = "device"
        self.session = session
        self.configuration_hash = hash_configuration(self.name, shared)

    def begin_at(self, step: int) -> None:
        """The next step is number `step`: told when it is bound late, and when a state has been loaded."""

    def object_to(self, error: Unsupported) -> None:
        """What the scheme has noticed in mid-run. Raises: it, unless there is somebody who has another scheme to go on with."""
        if self.objection is None:
            raise error
        self.objection(error)

    def begin_step(self, step: int) -> None:
        """Called on the training thread before the first bucket of a step, be it the scheme's own or not; the step before may
        not have ended: its backward pass was given up half-way."""

    @abstractmethod
    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        """Start replacing bucket.buffer by its mean over the ranks; the future is done when it is. Never blocks."""

    def settle(self) -> None:
        """Called on the lane when nothing else is under way: wait for what the scheme does elsewhere, on a device."""

    def end_step(self, step: int) -> None:
        """Called on the lane after the last bucket of a step: commit what was staged. By default there is nothing."""

    @property
    def settling_steps(self) -> int:
        """Steps from the first one until the scheme works as it will: it measures before."""
        return 0

    @property
    def is_settled(self) -> bool:
        """True if what had to be measured first is measured; the same on all ranks between two steps."""
        return True

    def take_over(self) -> None:
        """Called once bound and alone: a scheme that owns the step puts itself before the optimizer. Raises: Unsupported."""

    def hand_over(self) -> dict[Slot, torch.Tensor]:
        """Called before another scheme takes its place, between two steps: give away what it did not send of gradients."""
        return {} if self.needs_momenta else self.session.feedback.take()

    def end_backward(self, step: int) -> int:
        """Called on the training thread when DDP has ended a backward pass. Returns: how long that thread stood still for this
        scheme outside of the backward pass, in ns."""
        return 0

    def flush(self) -> None:
        """Take every optimizer step that was called for; only schemes that own the step have any outstanding."""

    def divide_kept(self, by: float) -> None:
        """On the lane: divide what is kept of gradients by a loss scale that nobody had told of."""
        self.session.feedback.divide(by)

    def step_figures(self) -> dict[str, float]:
        """Figures of the last step that a training log keeps beside bytes and times; none by default."""
        return {}

    def stats(self) -> dict[str, Any]:
        """Figures of this scheme's own, as plain values."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """This rank's state between steps: tensors and plain values, by parameter name."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state back. Raises: InvalidArgument if it does not fit; anything if it does not read (`checkpoint.take`)."""

    def close(self) -> None:
        """Let go of what the scheme holds."""

    def wire(self, bucket: Bucket) -> Wire:
        """This rank's end of the collectives of one bucket; on the lane."""
        return self.session.wire.for_bucket(self.preamble(bucket), bucket.record)

    def preamble(self, bucket: Bucket) -> Preamble:
        """The record that ranks compare in full before the first payload of this bucket's layout."""
        facts = bucket.layout_hash, bucket.step, bucket.n_elements
        return Preamble(FORMAT_VERSION, bucket.index, self.name, self.configuration_hash, *facts)
