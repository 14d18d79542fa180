"""FSDP2's own collectives, compressed: weights gathered and gradients reduced inside the sharding group.

FSDP2 lets both be replaced, module by module. Everything travels on the communication thread, in the order in which FSDP2
asks: a gather is waited for where FSDP2 takes the weights out, which is later wherever it prefetches; a reduction whose
result nobody reads before the end of the backward pass is waited for when the next one comes. Gradients go through a
scheme's frame, whose collective is `Scatter`.
"""

import functools
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire import schemes
from gradwire.checks import choice as check_choice
from gradwire.codecs.embedded_float import EmbeddedFloat
from gradwire.codecs.gcomp import GCompCodec
from gradwire.core.bucket import SUPPORTED_DTYPES, Slot, local_of, offsets_of
from gradwire.core.optimizers import Optimizers
from gradwire.doors import fsdp2
from gradwire.doors.passes import BackwardPass
from gradwire.errors import InvalidArgument, PeerLost, Unsupported
from gradwire.exchange.shards import Bfloat16, Scatter, Summed, gather
from gradwire.reducer import Reducer
from gradwire.registry import parse_spec
from gradwire.schemes import Scheme
from gradwire.schemes.auto.shards import ShardsAuto
from gradwire.schemes.compressed import Compressed
from gradwire.schemes.gcomp.table import TableRefresh
from gradwire.schemes.plain import Bf16, Plain
from gradwire.telemetry.recorder import BucketRecord
from gradwire.telemetry.stopwatch import Stopwatch
from gradwire.wire.preamble import FORMAT_VERSION, Preamble, compare_preambles, hash_configuration

WEIGHTS = ("plain", "exact", "close")
SCHEMES = "plain, bf16, gcomp, embedded-float, truncated-float and qsgd"
_CLOSE_BITS = 8  # of weights
_GCOMP_BITS = 12  # of float32 gradients, as `auto` has them in its class "exact"


class ShardState(Reducer):
    """A scheme on the gradients that FSDP2 reduces between shards, and a coding of the weights that it gathers.

    Args:
        scheme: a name or a Scheme without error feedback (what it leaves out would be kept for the whole model on every rank);
            "auto" measures and chooses, weights' coding too, and leaves all to FSDP2 where nothing is to be won.
        module: what `fully_shard` was called on; all its parameters in host memory.
        optimizer, scaler: as for Reducer.
        weights: "plain": FSDP2's bytes; "exact": fewer, and the same bits (GComp's code of exponents); "close": floats of 8
            bits, which all ranks read alike; the optimizer's own weights stay as they are. None: "exact", under "auto" what
            `fidelity` allows.
        fidelity: for "auto": "exact", "close", "any", or a list of gradients' schemes.
        options: timeout_s and trace, as for Reducer.
    Raises: Unsupported, InvalidArgument.
    """

    def __init__(
        self,
        scheme: Scheme | str,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Optimizers | None = None,
        scaler: Any = None,
        weights: str | None = None,
        fidelity: str | Sequence[str] = "exact",
        **options: Any,
    ) -> None:
        self._asked = None if weights is None else check_choice("weights", weights, WEIGHTS)
        self._fidelity = fidelity
        units = list(fsdp2.units(module))
        ranks = {tuple(dist.get_process_group_ranks(group.mesh_info.shard_process_group)) for _, _, group in units}
        if len(ranks) != 1:
            raise Unsupported(f"this model is sharded over {len(ranks)} groups of ranks; attach each part by itself")
        self._weights_configuration = {one: hash_configuration("weights", {"weights": one}) for one in WEIGHTS}
        kinds, bytes_of = ("weights", "gradients"), ("bytes_sent", "original_bytes")
        self._exchanged = {f"{kind}_{what}": 0 for kind in kinds for what in bytes_of}
        self._next = 0  # the gradient of a unit that comes next in this pass
        self._exposed_ns = 0
        # The unit whose gradients FSDP2 has made of the output, before the result was in it (None: none yet), this output
        # (n,), of whose ranks' parts `whole` (world n,) is made, and when that is reduced.
        self._pending: tuple[_Unit | None, torch.Tensor, torch.Tensor, torch.futures.Future] | None = None
        super().__init__(self._inside(scheme, module), list(*ranks), module, optimizer, scaler, **options)
        self._step_watch, self._in_step = Stopwatch(), False
        self._pass = BackwardPass(module, lambda: not self.closed, self._end_pass, self._give_up)
        # Before FSDP2's own, which waits for the first weights.
        before = module.register_forward_pre_hook(self._begin_step, prepend=True)
        self._give_back = [self._pass.remove, before.remove]
        self.close_with(module)
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        for number, (name, part, group) in enumerate(units):
            own = _Unit(name, number, group, names)
            collectives = (functools.partial(_Collective, run, own) for run in (self.all_gather, self.reduce_scatter))
            self._give_back.append(fsdp2.put_in(part, group, *collectives))

    def _speaks(self) -> bool:
        return super()._speaks() and self.communicator.world_size == dist.get_world_size()  # else who is between does

    def _inside(self, scheme: Scheme | str, module: nn.Module) -> Scheme:
        """The scheme with `Scatter` for its collective; one that reduces otherwise is refused."""
        if isinstance(scheme, str):
            name, options = parse_spec(scheme)
            if name == ShardsAuto.name:
                widths = [max(dtype.itemsize for dtype in dtypes) for dtypes in fsdp2.exchanged_dtypes(module)]
                return ShardsAuto(
                    lambda spec: self._inside(spec, module), (widths[0], widths[1]), self._asked,
                    **{"fidelity": self._fidelity, **options},
                )  # fmt: skip
            if name == "gcomp" and "importance" not in options:
                # Of the optimizer's state a rank has only its shard's, so importance="paper" cannot be had.
                is_wide = fsdp2.exchanged_dtypes(module)[1] == {torch.float32}
                careful = {"importance": "uniform", "bits": _GCOMP_BITS}
                options = {**(careful if is_wide or "bits" in options else {"importance": "none"}), **options}
            scheme = schemes.by_name(name, **options)
        if isinstance(scheme, Plain):
            rounding = Bfloat16() if isinstance(scheme, Bf16) else None
            return _BySum(Scatter(rounding, functools.partial(self.count, "gradients")), scheme.name)
        codec = getattr(getattr(scheme, "collective", None), "codec", None)
        why = ""
        if not isinstance(scheme, Compressed) or codec is None:
            why = "reduces in a way of its own"
        elif scheme.error_feedback or scheme.momenta is not None:
            why = "keeps error feedback, which would be as large as the whole model on every rank"
        elif scheme.adam is not None or getattr(codec, "importance", "") == "paper":
            why = "reads the optimizer's state of the whole model"
        elif scheme.select or scheme.settling_steps:
            why = "chooses tensors by name, or begins with plain steps"
        if why or not isinstance(scheme, Compressed):
            raise Unsupported(
                f"scheme {scheme.name!r} cannot reduce FSDP2's shards: it {why}. What can: {SCHEMES} (gcomp with "
                'importance="uniform" or "none")'
            )
        scheme.collective = Scatter(codec, functools.partial(self.count, "gradients"))
        return scheme

    def switch(self, scheme: Scheme | str) -> None:
        """As any Reducer, for the gradients; the weights go on as they are."""
        module = self.session.module
        if module is None:
            raise InvalidArgument("the model that this was attached to is gone")
        super().switch(self._inside(scheme, module))

    @property
    def weights(self) -> str:
        """How weights travel in this step."""
        return self.scheme.weights if isinstance(self.scheme, ShardsAuto) else self._asked or "exact"

    def _begin_step(self, module: nn.Module, inputs: Any) -> None:
        if not self._in_step and torch.is_grad_enabled() and module.training:
            self._in_step = True
            self._step_watch.begin()

    # ---- weights

    def all_gather(
        self,
        unit: "_Unit",
        own: Callable[..., Any],
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Fill `output_tensor` with the `input_tensor` of all ranks, which lies in it; gives what to wait for."""
        start = functools.partial(own, output_tensor, input_tensor, group, async_op)
        # They are fewer where weights are resharded after the forward pass.
        if dist.get_process_group_ranks(group) != self.communicator.members:
            return start()
        if self.scheme.is_transparent:
            self.count("weights", None, input_tensor.nbytes)
            return _Work(self, self.expose(start))
        number, unit.n_gathered = unit.n_gathered, unit.n_gathered + 1
        record = self.recorder.open_bucket(self.step, -1, 0)
        gather = self._gather_on_lane
        return _Work(self, self.communicator.submit(gather, unit, output_tensor, self.weights, number, record))

    def _gather_on_lane(
        self, unit: "_Unit", output: torch.Tensor, weights: str, number: int, record: BucketRecord
    ) -> None:
        communicator = self.communicator
        n_own = output.numel() // communicator.world_size
        layout = zlib.crc32(repr((unit.name, str(output.dtype), output.numel())).encode())
        preamble = Preamble(
            FORMAT_VERSION, unit.number, "weights", self._weights_configuration[weights], layout, number, output.numel()
        )
        if layout not in unit.compared:
            compare_preambles(communicator, preamble, record)
            unit.compared.add(layout)
        wire = self.session.wire.for_bucket(preamble, record)
        before = record.bytes_sent
        if weights == "exact" and output.dtype in SUPPORTED_DTYPES:
            if not unit.has_tables:
                unit.has_tables = True
                unit.tables.begin_with(output[communicator.rank * n_own :][:n_own], communicator, record)
            unit.tables.begin_bucket(number, communicator, record)
            gather(wire, unit.codec, output, unit.tables.counts_for(number, output.dtype))
            unit.tables.end_step(number, communicator)
        else:
            is_close = weights == "close" and output.dtype in SUPPORTED_DTYPES
            gather(wire, EmbeddedFloat(_CLOSE_BITS) if is_close else None, output)
        self.count("weights", record.bytes_sent - before, n_own * output.element_size())
        self.recorder.close_bucket(record)

    def count(self, kind: str, n_sent: int | None, n_bytes: int) -> None:
        """Count bytes sent, where torch's own collective, which None stands for, sends `n_bytes` to each of the others."""
        n_original = (self.communicator.world_size - 1) * n_bytes
        self._exchanged[f"{kind}_bytes_sent"] += n_original if n_sent is None else n_sent
        self._exchanged[f"{kind}_original_bytes"] += n_original

    def expose(self, call: Callable[[], Any]) -> Any:
        """The result of `call`, whose time on the training thread counts as exposed."""
        waiting = Stopwatch()
        result = call()
        self._exposed_ns += waiting.elapsed_ns
        return result

    # ---- gradients

    def reduce_scatter(
        self,
        unit: "_Unit",
        own: Callable[..., Any],
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Make `output_tensor` (n,) this rank's part of the mean or the sum of `input_tensor` (world n,), now or by the end
        of the pass."""
        world = self.communicator.world_size
        if self.scheme.is_transparent:
            self._pass.begin()
            n_bytes = input_tensor.nbytes // world
            record = self.recorder.open_bucket(self.step, self._next, n_bytes * world)
            self._next += 1
            record.count_exchanged((world - 1) * n_bytes)
            self.count("gradients", None, n_bytes)
            work = self.expose(functools.partial(own, output_tensor, input_tensor, group, op, async_op))
            self.recorder.close_bucket(record)
            return work
        is_sum = op == dist.ReduceOp.SUM
        if not is_sum and op != dist.ReduceOp.AVG:
            raise self.fail(
                Unsupported(
                    "set_gradient_divide_factor has FSDP2 ask for a sum with a factor in it; have it divide by itself: call "
                    "set_force_sum_reduction_for_comms(True) on the same modules"
                )
            )
        self._pass.begin()
        can_wait = not is_sum and unit.is_unread()
        self._finish_pending()
        index, self._next = self._next, self._next + 1
        reduced = self.reduce(input_tensor, *unit.layout_of(input_tensor, world, is_sum), index, is_last=False)
        self._pending = unit if can_wait else None, output_tensor, input_tensor, reduced
        if not can_wait:
            self._finish_pending()
        return None

    def _finish_pending(self) -> None:
        """Put the result where FSDP2 has it: in its output, and in gradients that it has made of that in another dtype."""
        if self._pending is None:
            return
        (unit, output, whole, reduced), self._pending = self._pending, None
        self.expose(reduced.wait)
        if self._error is not None:
            raise self._error
        n, rank = output.numel(), self.communicator.rank
        output.copy_(whole[rank * n : (rank + 1) * n])
        for parameter in () if unit is None else unit.parameters:
            if parameter.grad is None:
                continue
            own = local_of(parameter.grad)
            if own.untyped_storage().data_ptr() != output.untyped_storage().data_ptr():
                own.copy_(output.as_strided(own.size(), own.stride(), own.storage_offset()))

    def _end_pass(self) -> None:
        """Every reduction of this backward pass has been asked for."""
        try:
            self._finish_pending()
            if self._next:
                step = self.step
                self.step += 1
                if not self.scheme.is_transparent:
                    self.communicator.submit(self._end_step, step)
                exposed_ns, self._exposed_ns, self._in_step = self._exposed_ns, 0, False
                took_ns = self._step_watch.elapsed_ns
                self.close_pass(step, exposed_ns)
                if isinstance(self.scheme, ShardsAuto):
                    self.scheme.end_watched_step(step, took_ns, exposed_ns)
        finally:
            self._next = 0

    def _give_up(self) -> None:
        """An exception was raised in the pass before."""
        if self._next:
            self.fail(PeerLost("a backward pass was given up half-way, with some of its gradients sent"))
        self._next, self._pending = 0, None

    def stats(self) -> dict[str, Any]:
        """As any Reducer; and of weights and gradients, bytes sent and those that torch's own collective sends."""
        return {**super().stats(), "weights": self.weights, **self._exchanged}

    def close(self) -> None:
        """Leave weights and gradients to FSDP2's own collectives again. Every rank calls it."""
        for give_back in self._give_back:
            give_back()
        self._give_back = []
        super().close()


class _Unit:
    """The state of one of FSDP2's groups of parameters, which it does not keep alive."""

    def __init__(self, name: str, number: int, group: Any, names: Mapping[torch.Tensor, str]) -> None:
        self.name, self.number, self._group = name, number, weakref.ref(group)
        self._names = [names.get(parameter, "") for parameter in self.parameters]
        self.n_gathered = 0
        self.has_tables = False
        self.compared: set[int] = set()
        self.codec = GCompCodec("none")
        self.tables = TableRefresh(self.codec, None)
        self._layouts: dict[tuple[int, bool], tuple[list[Slot], list[int]]] = {}

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Those that FSDP2 shards together."""
        group = self._group()
        return [] if group is None else [parameter.sharded_param for parameter in group.fsdp_params]

    def layout_of(self, whole: torch.Tensor, world_size: int, is_sum: bool) -> tuple[list[Slot], list[int]]:
        """Slots and offsets of `whole` (world n,): by rank, the rows of every parameter, padded to be as many on all
        ranks. One slot stands for all where some gradients have not come, so that nobody can tell whose is whose, or
        are summed."""
        key = whole.numel(), is_sum
        if key not in self._layouts:
            shapes = [(-(-p.shape[0] // world_size), *p.shape[1:]) for p in self.parameters if p.requires_grad]
            names = [name for name, p in zip(self._names, self.parameters, strict=True) if p.requires_grad]
            slots = [Slot(name, shape) for _ in range(world_size) for name, shape in zip(names, shapes, strict=True)]
            offsets = offsets_of(slots)
            if offsets.pop() != whole.numel() or is_sum:
                slots, offsets = [(Summed if is_sum else Slot)("", (world_size, whole.numel() // world_size))], [0]
            self._layouts[key] = slots, offsets
        return self._layouts[key]

    def is_unread(self) -> bool:
        """Return whether nobody (FSDP2, hooks, a sum over replicas) reads the gradients before the backward pass is over."""
        group = self._group()
        return getattr(group, "_all_reduce_hook", None) is None and all(
            parameter.grad is None and not getattr(parameter, "_post_accumulate_grad_hooks", None)
            for parameter in self.parameters
        )


class _Work(dist.Work):
    """What FSDP2 waits for; the time counts as exposed. Without `work` nothing is left to wait for."""

    def __init__(self, state: ShardState, work: Any) -> None:
        super().__init__()
        self._state, self._work = state, work

    def wait(self, timeout: Any = None) -> bool:
        if self._work is not None:
            self._state.expose(self._work.wait)
        return True

    def is_completed(self) -> bool:
        work = self._work
        return work is None or (work.done() if isinstance(work, torch.futures.Future) else work.is_completed())


class _Collective:
    """One of FSDP2's collectives for one unit, in the place of `own`."""

    def __init__(self, run: Callable[..., Any], unit: _Unit, own: Any) -> None:
        self._run, self._unit, self._own = run, unit, own

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for what is sent or comes, as FSDP2 asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._run(self._unit, self._own, *arguments, **options)


class _BySum(Compressed):
    """`plain`, whose sums are the backend's, or `bf16`, between shards."""

    takes_any_gradient = True

    def __init__(self, collective: Scatter, name: str) -> None:
        self.name = name
        super().__init__(collective=collective)

    @property
    def configuration(self) -> dict[str, Any]:
        return self.frame_configuration
