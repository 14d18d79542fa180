"""The gradient door: reduces what lies in `.grad`, parameter by parameter, without DDP. For FSDP2 and for bare modules.

A hook copies each gradient, when it is final, into its place in a flat bucket; a full bucket is on its way at once. A callback
at the end of the pass waits, puts the means into `.grad` and raises what went wrong. FSDP2 calls these hooks with the shard
that its reduce-scatter has made, after casting, accumulating and offloading: so none of that has rules here.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from gradwire import _native
from gradwire.core.bucket import Slot, check_trained, cut_into_buckets, flatten_like, local_of
from gradwire.core.named_tensors import FlatBucket
from gradwire.doors import fsdp2
from gradwire.doors.passes import BackwardPass
from gradwire.errors import InvalidArgument, PeerLost, Unsupported
from gradwire.reducer import BUCKET_MB, Reducer
from gradwire.schemes import Scheme
from gradwire.telemetry.stopwatch import Stopwatch


class _Home(NamedTuple):
    """A bucket, and which of its slots have not come in this pass."""

    bucket: FlatBucket
    missing: set[Slot]


class GradientState(Reducer):
    """A scheme on the gradients of a module's parameters; `attach` makes one for modules that are not DDP.

    Args:
        scheme: a Scheme, or a registry name; not one that steps parameters itself.
        module: FSDP2 (`fully_shard` over the ranks inside a node), native HSDP, or a module that nothing else reduces,
            whose parameters are the same on all ranks.
        optimizer: needed by schemes that read its state; or a list of all.
        scaler: the GradScaler, if the loss is scaled.
        group: the ranks to reduce over: with FSDP2 those that hold the same shard, one a node; HSDP knows them itself.
        bucket_dtype: of what is sent, where it is not the gradient's own.
        options: as for Reducer: bucket_mb, op ("sum" where FSDP2's divide factor is 1), timeout_s, trace.
    Raises: Unsupported, InvalidArgument.
    """

    inside: Reducer | None = None  # what works between the shards of a node, if anything does; closed with this

    def __init__(
        self,
        scheme: Scheme | str,
        module: nn.Module,
        optimizer: Any = None,
        scaler: Any = None,
        group: dist.ProcessGroup | Sequence[int] | None = None,
        bucket_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        fsdp2.check(module)
        self._bucket_dtype = bucket_dtype
        replicas, self._give_back = fsdp2.take_over(module)
        group = replicas if group is None else group
        self._handles: list[Any] = []
        try:
            fsdp2.check_group(module, group)
            super().__init__(scheme, group, module, optimizer, scaler, **options)
        except BaseException:
            self._give_back()
            raise
        if not fsdp2.is_fsdp2(module):
            check_equal(self, {name: _parameter(slot) for name, slot in self.slots.items()})
        self._is_syncing = True
        self._sharded = {p.sharded_param: group for group in fsdp2.param_groups(module) for p in group.fsdp_params}
        self._bucket_mb = options.get("bucket_mb", BUCKET_MB)
        self._homes: list[_Home] = []
        self._sent: list[torch.futures.Future[torch.Tensor]] = []  # of this pass, in the order of the homes
        self._home: dict[Slot, _Home] = {}
        self._take_up_trained()
        if not self._sharded:
            self.close_with(module)
        self._pass = BackwardPass(
            module, lambda: self._is_syncing and not self.closed, self._finish, self._give_up, self._after_forward
        )
        self._handles.append(self._pass)

    def _check_gradients(self, scheme: Scheme, module: nn.Module | None) -> None:
        if scheme.owns_step:
            raise Unsupported(
                f"scheme {scheme.name!r} steps parameters itself, which only a DDP model lets it do; wrap the module in DDP, "
                "or choose a scheme that leaves the step to the optimizer"
            )
        if module is not None and self._bucket_dtype is None and not scheme.takes_any_gradient:
            check_trained(module)

    def _speaks(self) -> bool:
        module = self.session.module
        shards = () if module is None else fsdp2.param_groups(module)
        return super()._speaks() and not any(getattr(shard.mesh_info, "shard_mesh_rank", 0) for shard in shards)

    def _take_up_trained(self) -> None:
        """Give a place to what trains and has none: at first, and when parameters are unfrozen, on all ranks alike.
        Buckets are in the order in which gradients usually come: last parameters first."""
        new = [slot for slot in self.slots.values() if slot not in self._home and _parameter(slot).requires_grad]
        for group in cut_into_buckets([(slot, _parameter(slot)) for slot in new[::-1]], self._bucket_mb * (1 << 20)):
            own, first = [slot for slot, _ in group], group[0][1]
            bucket = FlatBucket(own, self._bucket_dtype or first.dtype, local_of(first).device)
            self._homes.append(_Home(bucket, set(own)))
            self._home.update(dict.fromkeys(own, self._homes[-1]))
        self._handles += [
            _parameter(slot).register_post_accumulate_grad_hook(partial(self.arrive, slot)) for slot in new
        ]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add up in `.grad` and send nothing: for all but the last micro-batch."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def _after_forward(self) -> None:
        if not self.closed:
            self._take_up_trained()

    def _give_up(self) -> None:
        """The pass before never came to its end: an exception was raised in it."""
        if self._sent:
            self.fail(PeerLost("a backward pass was given up half-way, with some of its gradients sent"))
        self._reset()

    def arrive(self, slot: Slot, parameter: torch.Tensor) -> None:
        """The gradient of `slot` is final: called by autograd, or by FSDP2 when it has reduced the shard."""
        group = self._sharded.get(parameter)
        # HSDP's `set_requires_all_reduce(False)` is as `no_sync`.
        if self.closed or not self._is_syncing or (group is not None and not group.all_reduce_grads):
            return
        self._pass.begin()
        home = self._home[slot]
        if slot not in home.missing:
            self.fail(
                Unsupported(f"a second gradient of {slot.name!r} in one backward pass; call backward() once for each")
            )
            return
        gradient = parameter.grad
        assert gradient is not None
        gradient = local_of(gradient.detach())
        if gradient.layout is not torch.strided:
            self.fail(Unsupported(f"{slot.name}: a sparse gradient, which only DDP sums; make it dense (sparse=False)"))
            return
        home.bucket.places[slot.name].copy_(gradient)
        home.missing.discard(slot)
        self._send(only_full=True)

    def _send(self, only_full: bool) -> None:
        """Buckets go in one order on all ranks, whatever the order in which they fill."""
        for bucket, missing in self._homes[len(self._sent) :]:
            if missing and only_full:
                return
            for slot in missing:  # not used in this pass: what earlier ones have added up goes, as with DDP
                if (kept := _parameter(slot).grad) is None:
                    bucket.places[slot.name].zero_()
                else:
                    bucket.places[slot.name].copy_(local_of(kept.detach()))
            index, is_last = len(self._sent), bucket is self._homes[-1].bucket
            self._sent.append(self.reduce(bucket.values, bucket.slots, bucket.offsets, index, is_last))

    def _finish(self) -> None:
        """Every gradient that will come has come."""
        waiting = Stopwatch()
        try:
            if not self._sent and all(len(missing) == len(bucket.slots) for bucket, missing in self._homes):
                return  # a pass that reached none of our parameters, or one without synchronisation
            self._send(only_full=False)
            for reduced in self._sent:
                reduced.wait()
            self.close_pass(self.step - 1, waiting.elapsed_ns)
            for bucket, _ in self._homes:
                for slot, mean in zip(bucket.slots, bucket.places.values(), strict=True):
                    parameter = _parameter(slot)
                    if parameter.grad is None and bool(mean.any()):  # used on another rank only
                        parameter.grad = torch.zeros_like(parameter)
                    if parameter.grad is not None:
                        local_of(parameter.grad).copy_(mean)
        finally:
            self._reset()

    def _reset(self) -> None:
        self._sent = []
        for bucket, missing in self._homes:
            missing.update(bucket.slots)

    def stats(self) -> dict[str, Any]:
        """As any Reducer; and `inside`, the figures of the sharding group."""
        return {**super().stats(), **({} if self.inside is None else {"inside": self.inside.stats()})}

    def close(self) -> None:
        """Stop compressing. HSDP goes on with its own all-reduce; nothing reduces other modules. Every rank calls it."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._homes, self._home, self._sharded = [], [], {}, {}
        if self.inside is not None:
            self.inside.close()
        self._give_back()
        super().close()


def check_equal(reducer: Reducer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Nobody has made the replicas equal, as DDP does. Where they are not, closes the reducer and raises on all ranks."""
    crc = 0
    for tensor in tensors.values():
        own = local_of(tensor.detach()).cpu()
        values = flatten_like(own, own).view(torch.uint8)  # as it lies: buckets are laid out so
        crc = _native.crc32c(values, crc)
    communicator, mine = reducer.communicator, torch.tensor([crc], dtype=torch.int64, device="cpu")
    crcs = communicator.submit(communicator.all_gather, mine).wait().view(-1).tolist()
    members = communicator.members
    odd = [rank for rank, other in zip(members, crcs, strict=True) if other != crcs[0]]
    if odd:
        reducer.close()
        raise InvalidArgument(
            f"ranks {odd} have other parameters than rank {members[0]}: seed the ranks alike, load one checkpoint, or "
            "broadcast the parameters before attaching; DDP would do it by itself"
        )


def _parameter(slot: Slot) -> torch.Tensor:
    assert slot.parameter is not None
    return slot.parameter
