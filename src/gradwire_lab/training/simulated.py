"""A group of ranks within one process: losses at more ranks than a machine has room for.

Every message is made and read by the real codec, and sums are taken in the order of the real exchange, so that means are
those of real ranks to the bit. Nothing is sent, so there are no times.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire import schemes
from gradwire.codecs import Codec
from gradwire.codecs.gcomp import GCompCodec, HuffmanTable
from gradwire.codecs.quantised import Quantised
from gradwire.core.bucket import Bucket, Slot, slots_by_name
from gradwire.errors import Unsupported
from gradwire.exchange.owners import Owners
from gradwire.exchange.parts import QUANTISED_MIN_CHUNKS, Chunk, count_chunks, cut_into_chunks
from gradwire.exchange.ring import Ring
from gradwire.schemes.compressed import Compressed
from gradwire.schemes.gcomp.importance import QuantisationMetric
from gradwire.schemes.gcomp.scheme import GComp
from gradwire.schemes.plain import Plain
from gradwire_lab.workloads import Workload

MeanOf = Callable[[int, list[Tensor]], Tensor]

_TABLE_STEPS, _SWITCH_AFTER = 4, 2  # from one look at what is sent to the next, and to the table that it gives


class SimulatedRanks:
    """The ranks of a scheme whose messages go round a ring or through owners, or of `plain` and `bf16`.

    What the scheme derives from an optimizer when it is bound has to be said by its options. `named`: the parameters in the
    order of the gradient; GComp reads them and `optimizers`. Raises: Unsupported (another scheme).
    """

    def __init__(
        self,
        scheme: schemes.Scheme,
        n_ranks: int,
        named: dict[str, Tensor],
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        if not isinstance(scheme, Plain) and not isinstance(getattr(scheme, "collective", None), Ring | Owners):
            raise Unsupported(f"scheme {scheme.name!r} has no ring and no owners to be simulated")
        self.scheme, self.n_ranks, self.step = scheme, n_ranks, 0
        self.n_bytes = self.n_plain_bytes = 0  # sent by all ranks so far, and what a ring of float32 would have sent
        self._slots: list[Slot] = list(slots_by_name(named).values())
        ends = torch.tensor([0] + [slot.numel() for slot in self._slots]).cumsum(0).tolist()
        self._offsets, self._n = ends[:-1], ends[-1]
        self._metric: QuantisationMetric | None = None
        self._importance = torch.zeros(self._n, dtype=torch.uint8)
        self._counts = torch.zeros(256, dtype=torch.int64)
        if isinstance(scheme, GComp) and scheme.codec.importance == "paper":
            self._metric = QuantisationMetric(optimizers, n_ranks, scheme.promise)
        self._residuals: list[Tensor | None] = [None] * n_ranks
        self._room = torch.empty(0, dtype=torch.uint8)

    def mean(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the mean that every rank gets of its `gradients`, (n,) each; they are not changed."""
        scheme, buckets = self.scheme, [
            Bucket(gradient.clone(), self._slots, self._offsets, step=self.step) for gradient in gradients
        ]  # fmt: skip
        self.step += 1
        self.n_plain_bytes += 8 * (self.n_ranks - 1) * self._n
        if self.n_ranks == 1:
            return buckets[0].buffer
        own = [bucket.buffer for bucket in buckets]
        if isinstance(scheme, Plain):
            return self._backend_mean(own, scheme.wire_dtype or torch.float32)
        assert isinstance(scheme, Compressed)
        if self.step <= scheme.plain.n:
            return self._backend_mean(own, torch.float32)
        spared = scheme.select.look_for_small(buckets[0])
        if spared is None:
            return self._compressed(buckets, scheme)
        small = self._backend_mean([one[spared] for one in own], scheme.small_dtype(own[0].dtype))
        for one in own:
            one[spared] = 0
        mean = self._compressed(buckets, scheme)
        mean[spared] = small
        for residual in self._residuals:
            if residual is not None:
                residual[spared] = 0
        return mean

    def _compressed(self, buckets: list[Bucket], scheme: Compressed) -> Tensor:
        if not all(map(scheme.select, self._slots)):
            raise Unsupported("tensors that are left out are not simulated")
        if isinstance(scheme.collective, Owners):
            return self._through_owners(buckets, scheme.collective)
        assert isinstance(scheme.collective, Ring)
        if self._metric is not None:
            parameters = [slot.parameter for slot in self._slots if slot.parameter is not None]
            self._metric.write_importance(parameters, self._offsets, self._importance)
        if isinstance(scheme, GComp) and self.step % _TABLE_STEPS == _SWITCH_AFTER + 1 and self._counts.any():
            scheme.codec.use_table(HuffmanTable.from_histogram(self._counts))
            self._counts.zero_()
        return self._round_a_ring(buckets, scheme.collective)

    def _backend_mean(self, values: list[Tensor], dtype: torch.dtype) -> Tensor:
        """The sum of products with 1/N, in the order of ranks; a backend's own order is another."""
        shares = [(own * (1.0 / self.n_ranks)).to(dtype) for own in values]
        self.n_bytes += 2 * (self.n_ranks - 1) * values[0].numel() * dtype.itemsize
        return functools.reduce(torch.add, shares).to(values[0].dtype)

    # ---- a ring

    def _round_a_ring(self, buckets: list[Bucket], ring: Ring) -> Tensor:
        """Each part begins with one rank; the next ones add their share; the last one's message is everybody's."""
        codec, world, own = ring.codec, self.n_ranks, [bucket.buffer for bucket in buckets]
        mean, divisor = torch.empty_like(own[0]), world
        if mean.dtype == torch.float16:  # whose sum may overflow where the mean does not
            own, divisor = [values.float().div_(world).half() for values in own], 1
        mean_room = 0 if self._metric is None else self._metric.promise.mean_room(world)
        n_chunks = count_chunks(-(-self._n // world), ring.chunk_elements)
        for part, chunks in enumerate(cut_into_chunks(self._n, world, n_chunks, lambda n, _: n)):
            for chunk in chunks:
                values, weights = chunk.values, self._importance[chunk.values]
                of_mean = ((weights.short() + mean_room) * (weights != 0)).clamp_(max=255).byte()
                recode = functools.partial(self._recoded, codec, weights, mean.dtype)
                if ring.topology == "ring":
                    total = own[part][values]
                    for hop in range(1, world):
                        total = recode(total).add_(own[(part + hop) % world][values])
                else:
                    total = torch.zeros_like(mean[values])
                    for rank in range(world):
                        total = total + (own[rank][values] if rank == part else recode(own[rank][values]))
                mean[values] = self._recoded(codec, of_mean, mean.dtype, total, world - 1)
                mean[values] /= divisor
        return mean

    def _recoded(
        self, codec: Codec, importance: Tensor, dtype: torch.dtype, values: Tensor, n_receivers: int = 1
    ) -> Tensor:
        room = self._room_for(codec.max_encoded_bytes(values.numel(), dtype))
        n_bytes = int(codec.encode(values.contiguous(), room, importance))
        self.n_bytes += n_bytes * n_receivers
        decoded = torch.empty_like(values)
        if isinstance(codec, GCompCodec):
            if self.step % _TABLE_STEPS == 1:
                codec.histogram(decoded.copy_(values), self._counts)
            codec.decode(room[:n_bytes], decoded, importance)
        else:
            codec.decode(room[:n_bytes], decoded)
        return decoded

    # ---- owners

    def _through_owners(self, buckets: list[Bucket], owners: Owners) -> Tensor:
        """Every owner adds the messages of its part to its own values, and its sum's message is everybody's."""
        if owners.pull == "raw":
            raise Unsupported('pull="raw" is not simulated')
        codec, world = owners.codec, self.n_ranks
        n_chunks = count_chunks(-(-self._n // world), owners.chunk_elements, QUANTISED_MIN_CHUNKS)
        starts = self._offsets if codec.scale_values else []
        mean = torch.empty_like(buckets[0].buffer)
        unsent: list[Tensor | None] = [None] * world
        if isinstance(self.scheme, Compressed) and self.scheme.error_feedback:
            unsent = [torch.zeros(self._n) for _ in range(world)]
        for owner, chunks in enumerate(cut_into_chunks(self._n, world, n_chunks, lambda n, _: n, starts)):
            for index, chunk in enumerate(chunks):
                total = torch.zeros(chunk.values.stop - chunk.values.start)
                for rank, bucket in enumerate(buckets):
                    values = bucket.buffer[chunk.values]
                    if rank != owner:
                        draw = bucket.draw(rank, owner, index, False)
                        values = self._quantised(codec, values, chunk, rank, unsent[rank], draw)
                    total += values
                draw = buckets[owner].draw(owner, owner, index, True)
                sent = self._quantised(owners.answering, total, chunk, owner, unsent[owner], draw, world - 1)
                mean[chunk.values] = sent / world
        self._residuals = unsent
        return mean

    def _quantised(
        self, codec: Quantised, values: Tensor, chunk: Chunk, rank: int, unsent: Tensor | None, draw: int,
        n_receivers: int = 1,
    ) -> Tensor:  # fmt: skip
        """What `n_receivers` get of a rank's values; `unsent` takes what they do not."""
        room = self._room_for(codec.max_encoded_bytes(values.numel(), values.dtype, len(chunk.cuts)))
        before, after = (None if kept is None else kept[chunk.values] for kept in (self._residuals[rank], unsent))
        n_bytes = int(codec.encode(values, room, step=draw, cuts=chunk.cuts, residual=before, new_residual=after))
        self.n_bytes += n_bytes * n_receivers
        decoded = torch.empty(values.numel())
        codec.decode(room[:n_bytes], decoded)
        return decoded

    def _room_for(self, n_bytes: int) -> Tensor:
        if self._room.numel() < n_bytes:
            self._room = torch.empty(n_bytes, dtype=torch.uint8)
        return self._room[:n_bytes]


def play(
    workload: Workload,
    n_ranks: int,
    n_steps: int,
    seed: int,
    make_mean: Callable[[dict[str, Tensor], list[torch.optim.Optimizer]], MeanOf],
) -> tuple[list[float], dict[str, float]]:
    """Train as `n_ranks` ranks would, one after the other: the losses, means over the ranks, and the evaluation at the
    end. `make_mean`: given the parameters by name and their optimizers, returns what makes of a step's number and the
    (n,) gradients of all ranks what the optimizer gets."""
    model = workload.build_model(seed)
    optimizers = workload.build_optimizers(model)
    named: dict[str, Tensor] = {name: one for name, one in model.named_parameters() if one.requires_grad}
    sizes, mean_of = [one.numel() for one in named.values()], make_mean(named, optimizers)
    batches = [workload.batches(rank, n_ranks, seed=seed) for rank in range(n_ranks)]
    losses = []
    for step in range(n_steps):
        gradients, total = [], 0.0
        for batch in batches:
            model.zero_grad(set_to_none=True)
            loss = workload.loss(model, next(batch))
            loss.backward()
            total += float(loss.detach())
            parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in named.values()]
            gradients.append(torch.cat([part.reshape(-1) for part in parts]))
        losses.append(total / n_ranks)
        for parameter, part in zip(named.values(), mean_of(step, gradients).split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        for optimizer in optimizers:
            optimizer.step()
    return losses, workload.evaluate(model)


def train(
    workload: Workload, spec: str, n_ranks: int, n_steps: int, seed: int = 0, disturb: float = 0.0
) -> dict[str, Any]:
    """Losses under `spec`, `ratio` to a float32 ring's bytes, and the evaluation; means are off by `disturb` x noise."""
    ranks: SimulatedRanks
    noise = torch.Generator().manual_seed(seed)

    def make(named: dict[str, Tensor], optimizers: list[torch.optim.Optimizer]) -> MeanOf:
        nonlocal ranks
        ranks = SimulatedRanks(schemes.by_name(spec), n_ranks, named, optimizers)
        return mean_of

    def mean_of(step: int, gradients: list[Tensor]) -> Tensor:
        mean = ranks.mean(gradients)
        return mean.mul_(1 + disturb * torch.randn(mean.shape, generator=noise)) if disturb else mean

    losses, end = play(workload, n_ranks, n_steps, seed, make)
    return {"losses": losses, "ratio": ranks.n_bytes / max(1, ranks.n_plain_bytes), **end}
