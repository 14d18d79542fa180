"""What a scheme is, and what it is given to work with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.wire.facts import Facts
from gradwire.wire.preamble import FORMAT_VERSION, Preamble, hash_configuration


class Scheme(ABC):
    """One way to replace a bucket by its mean over the ranks.

    The life of a scheme: made with its options, `bind` once, then for every step `reduce` once per bucket and
    `end_step`; `state_dict` between steps; `close` at the end.
    """

    name: ClassVar[str]
    # Whether its state depends on how many ranks there are (residuals do, code tables do not).
    state_is_per_world: bool = False
    # Whether ranks may end a step with different results, by definition of the scheme; all but `periodic` may not.
    replicas_may_differ: ClassVar[bool] = False

    # Whether it takes the optimizer's step itself (gradwire.stepping); it then needs the model and the optimizer.
    owns_step: bool = False

    # Whether it reduces device buckets by their copies in host memory, waiting for each tensor's (`Bucket.wait_for`).
    stages_device_buckets: ClassVar[bool] = False

    session: Session

    @property
    def settling_steps(self) -> int:
        """Steps from the first one until the scheme works as it will: it measures before. A benchmark lets them pass."""
        return 0

    @property
    def is_settled(self) -> bool:
        """Whether what had to be measured first is measured; the same on all ranks between two steps."""
        return True

    @property
    @abstractmethod
    def configuration(self) -> dict[str, Any]:
        """The options that all ranks must share, as plain values."""

    @property
    def is_bound(self) -> bool:
        """Whether the scheme has a session: one scheme serves one attachment at a time."""
        return "session" in vars(self)

    def unbind(self) -> None:
        """Let go of the session, after `close`; the scheme may then be bound again."""
        vars(self).pop("session", None)

    def bind(self, session: Session) -> None:
        """Take the session. Raises: Unsupported or InvalidArgument if this run cannot be served."""
        self.session = session
        self.configuration_hash = hash_configuration(self.name, self.configuration)

    def take_over(self) -> None:
        """Called once bound and alone: a scheme that owns the step puts itself before the optimizer. Raises: Unsupported."""

    @abstractmethod
    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        """Start replacing bucket.buffer by its mean over the ranks; the future is done when it is. Never blocks."""

    def end_step(self, step: int) -> None:
        """Called on the lane after the last bucket of a step: commit what was staged. By default there is nothing."""

    def end_backward(self, step: int) -> int:
        """Called on the training thread when DDP has ended a backward pass.

        Returns: how long the training thread stood still for this scheme outside of the backward pass, in ns.
        """
        return 0

    def flush(self) -> None:
        """Take every optimizer step that was called for; only schemes that own the step have any outstanding."""

    def hand_over(self) -> None:
        """Another scheme takes over between two steps: give back what ranks share out among them. Collective."""

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
        """Take a state back. Raises: InvalidArgument if it does not fit."""

    def close(self) -> None:
        """Let go of what the scheme holds."""

    def facts(self, bucket: Bucket) -> Facts:
        """What every frame of this bucket's messages carries, for the receiver to compare."""
        return Facts(self.configuration_hash, bucket.layout_hash, bucket.step & 0xFFFFFFFF, bucket.index)

    def preamble(self, bucket: Bucket) -> Preamble:
        """What ranks compare in full before the first payload of this bucket's layout."""
        return Preamble(
            FORMAT_VERSION,
            bucket.index,
            self.name,
            self.configuration_hash,
            bucket.layout_hash,
            bucket.step,
            bucket.n_elements,
        )
