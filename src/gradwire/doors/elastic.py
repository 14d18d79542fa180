"""Ranks that come and go at LocalSgd's outer steps, as torchft's manager says who is there.

    members = gradwire.Members()
    manager = torchft.Manager(pg=members, min_replica_size=2, use_async_quorum=False, ...)
    loop = gradwire.LocalSgd(model, optimizer, "top-k", every=500, group=manager)

torchft's lighthouse waits for who lives, and gives a comer one of their states. Here ranks meet among those, exchange, and try
again among who is left where one was lost meanwhile. torchft is not imported.
"""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import GradwireError, InvalidArgument, PeerLost, RankMismatch
from gradwire.reducer import Reducer
from gradwire.wire.rendezvous import Meeting

# A rank that others do not go together with leaves; where none does, all of them would try for ever.
_MOST_TRIES = 5


class Members:
    """What torchft's Manager sets up in place of a process group: `Manager(pg=gradwire.Members(), ...)`."""

    meeting: Meeting | None = None

    def configure(self, store_addr: str, replica_id: str, replica_rank: int, replica_world_size: int, *_: Any) -> None:
        """Take note of who is there from now on. store_addr: "host:port/prefix" of a store that all of them reach."""
        address, prefix = store_addr.split("/", 1)
        host, port = address.rsplit(":", 1)
        stores: Any = dist  # torch's annotations do not export them
        store = stores.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
        self.meeting = Meeting(stores.PrefixStore(prefix, store), replica_rank, replica_world_size)

    def errored(self) -> None:
        """Torchft asks; errors are raised here."""


class Quorum:
    """Exchanges among who is there, each tried until it is done. `shared`, `take_shared`: called within `mean`, for a comer."""

    def __init__(
        self,
        manager: Any,
        make: Callable[[Meeting], Reducer],
        shared: Callable[[], dict[str, Any]],
        take_shared: Callable[[dict[str, Any]], None],
    ) -> None:
        members = getattr(manager, "_pg", None)
        if not isinstance(members, Members) or getattr(manager, "_use_async_quorum", True):
            raise InvalidArgument(
                "group= may be torchft's Manager(pg=gradwire.Members(), use_async_quorum=False, ...): its quorum is asked "
                "for at each outer step, and is there before the exchange"
            )
        self.reducer: Reducer | None = None
        self._manager, self._members, self._make, self._take_shared = manager, members, make, take_shared
        self._met: Meeting | None = None
        self._kept: dict[str, Any] = {}
        self._has_come = True  # has nothing of its own to give
        self._misfit: GradwireError | None = None
        manager.register_state_dict_fn("gradwire", self._take, shared)

    def _take(self, shared: dict[str, Any]) -> None:
        self._has_come = True
        try:
            self._take_shared(shared)
        except GradwireError as error:
            self._misfit = error  # told once the others can hear of it

    def mean(self, give: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The mean over those who have something to give, in place of what `give` returns; empty where none has. A rank
        that has come in this exchange gives zeros, which do not count."""
        for _ in range(_MOST_TRIES):
            try:
                self._manager.start_quorum()
            except (RuntimeError, TimeoutError) as error:
                raise PeerLost(f"no quorum of enough ranks came together in time ({error})") from error
            failure: GradwireError | None = None
            mean: dict[str, torch.Tensor] = {}
            kept = self._kept
            try:
                mean = self._exchange(give)
                kept = self._residuals()  # before all have agreed: what fails after that would lose a mean that counts
            except GradwireError as error:
                failure = error
                self._manager.report_error(error)
                if self._misfit is not None or (self._has_come and isinstance(error, RankMismatch)):
                    self.close()
                    raise
            try:
                is_done = self._manager.should_commit()
            except (RuntimeError, TimeoutError) as error:
                raise PeerLost(f"torchft's manager cannot say whether the exchange is done ({error})") from error
            if is_done:
                self._has_come, self._kept = False, kept
                return mean
        raise failure or PeerLost(f"no exchange was done in {_MOST_TRIES} tries: look at the log of torchft's manager")

    def _exchange(self, give: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        meeting = self._members.meeting
        error = self._manager.errored()
        if meeting is None or error is not None:
            raise PeerLost(f"the ranks of this quorum did not come together ({error})")
        if self.reducer is None or meeting is not self._met:
            self.close()
            self.reducer, self._met = self._make(meeting), meeting
            fresh = self.reducer.state_dict()
            fresh["state"] |= {key: kept for key, kept in self._kept.items() if key in fresh["state"]}
            self.reducer.load_state_dict({**fresh, "step": self._manager.current_step()})
        communicator = self.reducer.communicator
        if self._misfit is not None:
            raise communicator.fail(self._misfit)
        gives = torch.tensor([not self._has_come], dtype=torch.uint8, device="cpu")
        n_givers = int(communicator.submit(communicator.all_gather, gives).wait().sum())
        values = give()
        if values and n_givers:
            self.reducer.all_reduce(values).wait()
            for value in values.values():
                value *= communicator.world_size / n_givers
        return values if n_givers else {}

    def keep(self) -> None:
        """Note the residuals anew: they have come from a saved state."""
        self._kept = self._residuals()

    def _residuals(self) -> dict[str, Any]:
        """Those of this rank, which outlive the ranks that they were made among."""
        assert self.reducer is not None
        keys = self.reducer.scheme.per_rank_state
        state = self.reducer.state_dict()["state"] if keys else {}
        return {key: state[key] for key in keys or () if key in state}

    def close(self) -> None:
        """Leave. The others notice in their next exchange."""
        if self.reducer is not None:
            with contextlib.suppress(GradwireError):  # a rank was lost, which is why
                self.reducer.close()
