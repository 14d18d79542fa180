"""FSDP2's own collectives: weights bit for bit in fewer bytes, gradients by a scheme, whatever FSDP2 is asked for."""

import contextlib
import itertools
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp2_cases import Sharded, batch_of, make_mesh
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradwire
from gradwire import _native
from gradwire.codecs.gcomp import GCompCodec
from gradwire.codecs.huffman import HuffmanTable
from gradwire.codecs.tensors import bytes_of, dtype_code
from gradwire.schemes.auto.law import PLAIN
from gradwire.schemes.auto.shards import ShardsAuto
from logs import log_of
from ranks import agree, bits_of, on_ranks, patience, try_ranks

CASES = [
    "", "clip", "noreshard", "mixed32", "bf16", "fp16", "offload", "compile", "micro sync", "micro", "mixed32 micro", "tied",
    "frozen", "prefetch", "divided", "bf16 divided", "ordinary", "reentrant", "mixed32 reentrant",
]  # fmt: skip


def mesh_of(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,))


UNEVEN = ["", "mixed32", "bf16", "tied", "frozen", "micro sync"]


@pytest.mark.parametrize(
    ("world_size", "weights", "cases"),
    [(2, "plain", CASES[:6]), (2, "exact", CASES[:9]), (2, "exact", CASES[9:]), (3, "exact", UNEVEN)],
)
@on_ranks()
def test_plain_gradients_give_the_bits_of_fsdp2(rank: int, world_size: int, weights: str, cases: list[str]) -> None:
    """In all that FSDP2 does; over three ranks shards are uneven, and some hold nothing of a bias."""
    mesh = mesh_of(world_size)
    for case in cases:
        theirs = Sharded(rank, mesh, case).take_steps(range(12))
        ours = Sharded(rank, mesh, case, "plain", weights=weights).take_steps(range(12))
        assert ours.state.step == (36 if case.endswith("micro") else 12), case
        ours.state.close()
        assert ours.has_bits_of(theirs), case
        ours.take_steps([12])  # FSDP2 goes on by itself


@on_ranks(2)
def test_two_ranks_lose_nothing_where_all_is_bfloat16(rank: int, world_size: int) -> None:
    """A float32 sum of two bfloat16 values, rounded, is their sum in bfloat16: gcomp's default there keeps every bit."""
    theirs, ours = (Sharded(rank, mesh_of(2), "bf16", scheme).take_steps(range(12)) for scheme in (None, "gcomp"))
    assert ours.has_bits_of(theirs)


class Watched(nn.Linear):
    """All ranks compute with the same weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert agree(self.weight)
        return super().forward(x)


POLICIES: list[dict[str, Any]] = [{}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}]


def wide(world_size: int, policy: dict[str, Any], scheme: str, weights: str) -> tuple[Any, torch.optim.Optimizer, Any]:
    """Layers that are large enough for headers not to count, their optimizer and attachment."""
    torch.manual_seed(3)
    net = nn.Sequential(*(Watched(512, 512) for _ in range(2)))
    for layer in (*net, net):
        fully_shard(layer, mesh=mesh_of(world_size), mp_policy=MixedPrecisionPolicy(**policy))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    return net, optimizer, gradwire.attach(net, optimizer, scheme, weights=weights, timeout_s=20)


def wide_loss(net: nn.Module, rank: int) -> torch.Tensor:
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(rank))
    return (net(x).float() - x).square().mean()


RATIOS = {"plain": 1.0, "bf16": 0.5, "gcomp": 0.56, "embedded-float": 0.26, "truncated-float": 0.26, "qsgd": 0.14}
OF_WEIGHTS = {"exact": (0.86, 0.68), "close": (0.26, 0.52)}  # of float32, of bfloat16


@pytest.mark.parametrize(
    ("weights", "names"),
    [("exact", ["plain", "gcomp", "qsgd"]), ("close", ["bf16", "embedded-float", "truncated-float"])],
)
@on_ranks(3)
def test_bytes_of_weights_and_gradients(rank: int, world_size: int, weights: str, names: list[str]) -> None:
    """Every scheme stays within reach of the mean."""
    for scheme, policy in itertools.product(names, POLICIES):
        net, optimizer, state = wide(world_size, policy, scheme, weights)
        for _ in range(5):
            loss = wide_loss(net, rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = state.stats()
        state.close()
        of_weights, of_gradients = OF_WEIGHTS[weights][bool(policy)], RATIOS[scheme] + 0.01
        assert stats["weights_bytes_sent"] <= of_weights * stats["weights_original_bytes"], (scheme, policy, stats)
        assert stats["gradients_bytes_sent"] <= of_gradients * stats["gradients_original_bytes"], (scheme, stats)
        assert float(loss) < 1.05, (scheme, float(loss))


@on_ranks(2)
def test_small_tensors_are_spared_inside_shards(rank: int, world_size: int) -> None:
    """Four bits are for matrices: the mean of a bias comes in 16, as behind DDP; and nowhere if gradients are summed."""
    for policy in POLICIES:
        gradients = []
        for scheme in ("plain", "embedded-float:bits=4"):
            net, _, state = wide(world_size, policy, scheme, "plain")
            wide_loss(net, rank).backward()
            state.close()
            gradients.append([parameter.grad.to_local() for parameter in net.parameters()])
        for exact, ours in zip(*gradients, strict=True):
            error = float((exact - ours).abs().max() / exact.abs().max())
            assert error < 2**-7 if exact.dim() == 1 else 2**-7 < error < 0.2


@on_ranks(4)
def test_inside_and_between_have_a_scheme_each(rank: int, world_size: int) -> None:
    """HSDP, and shards with a group: plain everywhere has native HSDP's bits, others count both ways."""
    mesh = make_mesh()
    theirs = Sharded(rank, mesh).take_steps(range(12))
    for sharded, options in [(mesh, {}), (mesh["shard"], {"group": mesh.get_group("replicate")})]:
        ours = Sharded(rank, sharded, "", "plain", weights="exact", **options).take_steps(range(12))
        assert ours.state.stats()["inside"]["weights_bytes_sent"] > 0
        assert ours.has_bits_of(theirs)
    ours = Sharded(rank, mesh)
    del ours.optimizer.param_groups[0]["params"][0]
    texts = log_of("gradwire")
    ours.attach("qsgd", inside="gcomp")
    told = torch.tensor(sum("none of the optimizers" in text for text in texts))
    dist.all_reduce(told)
    assert told == 1  # by one rank, of one of its two groups
    stats = ours.take_steps(range(12)).state.stats()
    assert stats["inside"]["gradients_bytes_sent"] < 0.6 * stats["inside"]["gradients_original_bytes"]
    assert stats["ratio"] < 1
    assert all(agree(shard, mesh.get_group("replicate")) for shard in ours.shards())


@on_ranks(2)
def test_a_run_resumes_from_a_distributed_checkpoint(rank: int, world_size: int, tmp_path: Path) -> None:
    first, again = (Sharded(rank, mesh_of(2), "mixed32", "gcomp") for _ in range(2))
    first.take_steps(range(6))
    saved = dict(zip(("model", "optimizer"), get_state_dict(first.net, first.optimizer), strict=True))
    dcp.save(saved, checkpoint_id=tmp_path)
    again.state.load_state_dict(first.state.state_dict())
    loaded = dict(zip(("model", "optimizer"), get_state_dict(again.net, again.optimizer), strict=True))
    dcp.load(loaded, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(again.net, again.optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert again.state.step == 6
    for one in (first, again):
        one.take_steps(range(6, 10)).state.close()
    assert again.has_bits_of(first)


@on_ranks(2)
def test_a_scheme_is_switched_and_a_model_without_gradients_is_served(rank: int, world_size: int) -> None:
    ours = Sharded(rank, mesh_of(2), "", "embedded-float", weights="close").take_steps(range(2))
    net, state = ours.net, ours.state
    state.switch("gcomp")
    ours.take_steps(range(2, 4))
    x, _ = batch_of(rank, 9)
    with torch.no_grad():
        net.eval()(x)
    assert (state.step, state.stats()["scheme"]) == (4, "gcomp")
    (net(x) * float("nan") if rank else net(x)).sum().backward()
    assert not net.head.weight.grad.to_local().isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exact_values_keep_every_bit_and_say_what_is_not_whole(dtype: torch.dtype) -> None:
    """All patterns of 16 bits, few or many among normal values; the codec alone loses signs of zeros and subnormals."""
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    patterns = torch.arange(1 << 16).to(torch.int16).view(integers)
    if dtype == torch.float32:
        patterns = torch.cat([patterns, patterns >> 9, patterns << 15])
    normal = (torch.randn(40 * patterns.numel()) * 0.02).to(dtype)
    counts = torch.zeros(256, dtype=torch.int64)
    codec = GCompCodec("none")
    codec.histogram(normal, counts)
    codec.use_table(HuffmanTable.from_histogram(counts))
    native = _native.exact_exchange_codec(codec.exchange_codec(dtype, None, None), dtype_code(dtype))

    def encode(values: torch.Tensor) -> torch.Tensor:
        room = torch.empty(_native.exchange_codec_max_bytes(native, values.numel()), dtype=torch.uint8)
        return room[: _native.exchange_codec_encode(native, bytes_of(values), dtype_code(dtype), room)].clone()

    def decode(message: torch.Tensor, n: int) -> torch.Tensor:
        out = torch.empty(n, dtype=dtype)
        _native.exchange_codec_decode(native, message, bytes_of(out), dtype_code(dtype))
        return out

    mixed = normal.clone()
    mixed[::40].view(integers).copy_(patterns)
    for values in (normal, mixed, patterns.view(dtype), normal[:0], normal[:1], mixed[:40]):
        message = encode(values.clone())
        assert message.numel() <= 8 + values.numel() * values.element_size()
        assert bits_of(decode(message, values.numel())) == bits_of(values)
    message = encode(mixed)
    share = {torch.float32: 0.9, torch.bfloat16: 0.8, torch.float16: 0.95}[dtype]
    assert message.numel() < share * mixed.numel() * mixed.element_size()
    for broken in (message[:0], message[:7], message[:-1], torch.cat([message, message[:1]])):
        with pytest.raises(gradwire.CorruptMessage):
            decode(broken, mixed.numel())
    message[-2 - (dtype == torch.float32) * 2 - 4 :][:4] = 255  # the place of the last listed value
    with pytest.raises(gradwire.CorruptMessage):
        decode(message, mixed.numel())


class OfSomebodyElse:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        raise NotImplementedError


@on_ranks(2)
def test_what_cannot_be_served_is_refused_by_name(rank: int, world_size: int) -> None:
    ours = Sharded(rank, mesh_of(2))
    for scheme, options, error, words in [
        ("one-bit", {}, gradwire.Unsupported, "keeps error feedback"),
        ("gcomp", {"importance": "paper"}, gradwire.Unsupported, "reads the optimizer's state"),
        ("acp-sgd", {}, gradwire.Unsupported, "cannot reduce FSDP2's shards"),
        ("plain", {"weights": "half"}, gradwire.InvalidArgument, "weights is one of"),
        ("plain", {"inside": "gcomp"}, gradwire.InvalidArgument, "the scheme is the one inside"),
        ("plain", {"bucket_mb": 3}, gradwire.InvalidArgument, "bucket_mb"),
        ("auto", {"fidelity": "precise"}, gradwire.InvalidArgument, "no fidelity is called"),
        ("auto", {"fidelity": ["one-bit"]}, gradwire.Unsupported, "keeps error feedback"),
        ("auto", {"fidelity": [3]}, gradwire.InvalidArgument, "NAME:option=value"),
        ("auto", {"budget": 2}, gradwire.InvalidArgument, "share of the time"),
    ]:
        with pytest.raises(error, match=words):
            ours.attach(scheme, **options)
    ours.net.blocks[1].set_custom_all_gather(OfSomebodyElse())
    with pytest.raises(gradwire.Unsupported, match=r"blocks\.1 has another collective already.*OfSomebodyElse"):
        ours.attach()
    ours = Sharded(rank, mesh_of(2), "", "plain")
    with pytest.raises(gradwire.Unsupported, match="close\\(\\) the attachment"):
        ours.attach()
    ours.state.close()
    for part in (*ours.net.blocks, ours.net):
        part.set_gradient_divide_factor(3.0)
    ours.attach()
    with pytest.raises(gradwire.Unsupported, match="set_force_sum_reduction_for_comms"):
        ours.take_steps(range(12))
    ours.state.close()
    dist.barrier()


def go_wrong(rank: int, world_size: int, how: str) -> None:
    is_odd = rank == 1
    scheme = "embedded-float:bits=7" if is_odd and how == "scheme" else "embedded-float"
    weights = "close" if is_odd and how == "weights" else "exact"
    ours = Sharded(rank, mesh_of(world_size), "", scheme, weights=weights, timeout_s=max(5, patience()))
    if is_odd and how == "order":
        ours.net.blocks = nn.ModuleList(list(ours.net.blocks)[::-1])
    ours.take_steps(range(3))
    if is_odd and how == "death":
        ours.net.blocks[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    if is_odd and how == "lie":
        codec = ours.net._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm._unit.codec
        counts = torch.zeros(256, dtype=torch.int64)
        codec.histogram(torch.randn(5_000), counts)
        codec.use_table(HuffmanTable.from_histogram(counts))
    ours.take_steps(range(3, 5))


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("scheme", gradwire.RankMismatch, "configuration"),
        ("weights", gradwire.RankMismatch, "configuration"),
        ("order", gradwire.RankMismatch, "bucket|layout"),
        ("death", gradwire.PeerLost, "rank 1"),
        ("lie", gradwire.CorruptMessage, "Huffman table"),
    ],
)
def test_what_goes_wrong_on_one_rank_is_named_on_all(how: str, error: type[BaseException], words: str) -> None:
    outcomes = try_ranks(go_wrong, 3, how, timeout_s=60)
    if how == "death":
        assert outcomes.pop(1).exit_code == -signal.SIGKILL
    for outcome in outcomes:
        assert isinstance(outcome.error, error), outcome
        assert re.search(words, str(outcome.error)), outcome


# ---- `auto` between the shards: what it keeps, takes, follows and refuses, by step times that a test gives
EXACT, GCOMP = "gradients=plain,weights=exact", "gradients=gcomp,weights=exact"
CLOSE = "gradients=embedded-float:bits=8,weights=close"
TimesOf = Callable[[int], dict[str, tuple[int, int]]]
# Where ours wins and where theirs does, in milliseconds: a step's, of them waiting.
OURS = {PLAIN: (100, 80), EXACT: (70, 40), GCOMP: (50, 25), CLOSE: (30, 5)}
THEIRS = {PLAIN: (22, 5), EXACT: (40, 2), GCOMP: (45, 2), CLOSE: (50, 2)}


def times(of: TimesOf, rank: int) -> Any:
    """Tells `auto` these times of its steps, a little longer on each rank."""
    real = ShardsAuto.end_watched_step

    def end(auto: ShardsAuto, step: int, took_ns: int, waited_ns: int) -> None:
        took_ms, waited_ms = of(step).get(auto.active, (40, 10))
        real(auto, step, 1_000_000 * took_ms + 1000 * rank, 1_000_000 * waited_ms)

    told = contextlib.ExitStack()
    told.enter_context(mock.patch.object(ShardsAuto, "end_watched_step", end))
    told.enter_context(mock.patch("gradwire.schemes.auto.turns.probe_transfer_us", return_value=1000))  # the link stays
    told.enter_context(mock.patch("gradwire.schemes.auto.shards.probe_link", return_value=(1e-4, 8e-4 / 2**18)))
    return told


def run_timed(rank: int, of: TimesOf, n_steps: int = 30, case: str = "", **options: Any) -> tuple[Any, Sharded]:
    with times(of, rank):
        ours = Sharded(rank, mesh_of(2), case, "auto", **options).take_steps(range(n_steps))
        stats = ours.state.stats()
    return stats, ours


@on_ranks(2)
def test_where_nothing_is_won_fsdp2_is_left_alone(rank: int, world_size: int) -> None:
    """No bits differ, whatever was tried; and what hides its communication is not even tried."""
    stats, ours = run_timed(rank, lambda step: THEIRS, weights="exact", fidelity=["plain"])
    assert stats["auto"]["scheme"] == PLAIN
    assert [one["kind"] for one in stats["auto"]["decisions"]][:2] == ["try", "reject"]
    assert ours.has_bits_of(Sharded(rank, mesh_of(2)).take_steps(range(30)))
    stats, _ = run_timed(rank, lambda step: {PLAIN: (100, 1)}, 8)
    assert [one["kind"] for one in stats["auto"]["decisions"]] == ["stay"]
    assert stats["weights_bytes_sent"] == stats["weights_original_bytes"] > 0
    assert stats["gradients_bytes_sent"] == stats["gradients_original_bytes"] > 0


@pytest.mark.parametrize(("fidelity", "best"), [("exact", GCOMP), ("close", CLOSE)])
@on_ranks(2)
def test_the_fastest_pair_of_its_level_is_taken(rank: int, world_size: int, fidelity: str, best: str) -> Any:
    stats, _ = run_timed(rank, lambda step: OURS, 60, "mixed32", fidelity=fidelity)
    assert stats["auto"]["scheme"] == best
    assert stats["scheme"] == "auto"
    assert stats["gradients_bytes_sent"] < 0.9 * stats["gradients_original_bytes"]
    return stats["auto"]["schedule"]


@on_ranks(2)
def test_it_keeps_every_bit_while_it_changes_and_follows_the_network(rank: int, world_size: int) -> None:
    """Slow, then fast: back to FSDP2's own; all the while plain gradients and exact weights are FSDP2's bits."""
    stats, ours = run_timed(rank, lambda step: OURS if step < 40 else THEIRS, 160, weights="exact", fidelity=["plain"])
    order = [name for _, name in stats["auto"]["schedule"]]
    assert order[0] == order[-1] == PLAIN, stats["auto"]["decisions"]
    assert any(one["kind"] == "switch" and one["scheme"] == EXACT for one in stats["auto"]["decisions"])
    assert ours.has_bits_of(Sharded(rank, mesh_of(2)).take_steps(range(160)))


@on_ranks(2)
def test_a_resumed_run_goes_on_with_what_was_best(rank: int, world_size: int) -> None:
    with times(lambda step: OURS, rank):
        ours = Sharded(rank, mesh_of(2))
        ours.state = gradwire.attach(ours.net, ours.optimizer, timeout_s=20)  # with the default scheme
        ours.take_steps(range(40))
        assert ours.state.stats()["scheme"] == "auto"
        saved, before = ours.state.state_dict(), ours.state.stats()["auto"]["scheme"]
        ours.state.close()
        ours.attach("auto")
        assert saved["state"]["transfer_us"] == pytest.approx(1000, abs=1)
        ours.state.load_state_dict({**saved, "state": {**saved["state"], "transfer_us": 2000}})
        assert ours.state.scheme.law.state == "baseline", "times of another link"
        ours.state.load_state_dict(saved)
        stats = ours.take_steps(range(40, 42)).state.stats()["auto"]
        with pytest.raises(gradwire.InvalidArgument, match="does not read"):
            ours.state.load_state_dict({**saved, "state": {**saved["state"], "law": {"candidates": {}}}})
        assert ours.take_steps(range(42, 49)).state.stats()["auto"]["scheme"] == GCOMP  # as if nothing had been asked
        ours.state.switch("plain")
        assert ours.take_steps(range(49, 51)).state.stats()["scheme"] == "plain"
    assert before == stats["scheme"] == GCOMP
    assert stats["schedule"][-1] == (40, GCOMP)
