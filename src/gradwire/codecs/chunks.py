"""The largest values of every chunk, in about 14 bits each: places in 12, values in 2 (SparseLoCo, arXiv 2508.15706).

Of each 4,096 values equally many travel, so a message's length is known and no place needs more bits. A value is its sign and
one of two magnitudes, the means of its chunk's larger and smaller ones; what that loses stays behind. In torch's own
operations, which are the same on any device. docs/format.md#gathered-messages
"""

import torch
from torch import Tensor

CHUNK = 4096
_GROUP, _GROUP_BYTES, _WORD_BITS = 4, 7, 14  # so many words in so many bytes
_HEAD_BYTES = 3  # the larger magnitude in bfloat16, and the smaller one in 255ths of it


def n_bytes(n_values: int, k: int) -> int:
    """Bytes of a message of k of each chunk's values, filled up to whole int32."""
    return -(-n_values // CHUNK) * (_HEAD_BYTES + _GROUP_BYTES * -(-k // _GROUP)) + 3 & ~3


def take_chunks(values: Tensor, k: int, beside: Tensor | None = None) -> Tensor:
    """Take the k largest magnitudes of every chunk out of `values` (n,) float32, where what is not sent of them stays.
    `beside` (n,) float32 becomes zero at the same places. Returns the message, (m,) int32, in which zeros are
    nothing."""
    n = values.numel()
    rows = torch.nn.functional.pad(values, (0, -n % CHUNK)).view(-1, CHUNK)
    places = rows.abs().topk(k, dim=1).indices
    is_zero = rows.gather(1, places) == 0
    order = torch.where(is_zero, CHUNK, places).argsort(1)
    places = torch.where(is_zero, 0, places).gather(1, order)  # ascending; zeros' places no longer do
    taken = rows.gather(1, places)
    sizes, counts = taken.abs(), (~is_zero).gather(1, order)
    sizes = sizes * counts
    n_used = counts.sum(1, keepdim=True).clamp_(min=1)
    is_large = counts & (sizes * n_used >= sizes.sum(1, keepdim=True))
    large = sizes.mul(is_large).sum(1, keepdim=True) / is_large.sum(1, keepdim=True).clamp_(min=1)
    n_small = n_used - is_large.sum(1, keepdim=True)
    small = sizes.mul(~is_large).sum(1, keepdim=True) / n_small.clamp_(min=1)
    head = large.bfloat16()
    ratio = (small / head.float().clamp_(min=torch.finfo(torch.float32).tiny)).mul_(255).round_().clamp_(0, 255)
    sent = _magnitudes(head, ratio.to(torch.uint8), is_large).copysign(taken) * counts
    flat = places + torch.arange(0, rows.numel(), CHUNK, dtype=torch.int64, device=values.device)[:, None]
    inside = torch.where(counts, flat, n).view(-1)  # of zeros: beyond the end
    values.sub_(_spread(inside, sent, n))
    if beside is not None:
        beside.mul_(1 - _spread(inside, torch.ones_like(sent), n))
    words = (places << 2) | ((taken < 0).long() << 1) | is_large
    return _packed(words, head, ratio.to(torch.uint8))


def add_chunks(message: Tensor, k: int, sums: Tensor) -> None:
    """Add what `take_chunks` has sent to `sums` (n,) float32."""
    n = sums.numel()
    places, signs, is_large, head, ratio = _unpacked(message, -(-n // CHUNK), k)
    before = torch.nn.functional.pad(places[:, :-1], (1, 0), value=-1)
    counts = places > before
    flat = places + torch.arange(0, CHUNK * len(places), CHUNK, dtype=torch.int64, device=sums.device)[:, None]
    values = torch.where(signs, -1.0, 1.0) * _magnitudes(head, ratio, is_large)
    sums.add_(_spread(torch.where(counts & (flat < n), flat, n).view(-1), values, n))


def _magnitudes(head: Tensor, ratio: Tensor, is_large: Tensor) -> Tensor:
    large = head.float()
    return torch.where(is_large, large, large * (ratio.float() / 255))


def _spread(places: Tensor, values: Tensor, n: int) -> Tensor:
    """(n,) float32 of `values` at their places, each named once, and zeros; what is at place n is dropped."""
    spread = torch.zeros(n + 1, dtype=torch.float32, device=values.device)
    spread[places] = values.reshape(-1)
    return spread[:n]


def _packed(words: Tensor, head: Tensor, ratio: Tensor) -> Tensor:
    groups = torch.nn.functional.pad(words, (0, -words.shape[1] % _GROUP)).view(len(words), -1, _GROUP)
    shifts = torch.arange(0, _GROUP * _WORD_BITS, _WORD_BITS, dtype=torch.int64, device=words.device)
    joined = (groups << shifts).sum(2).view(torch.uint8).view(len(words), -1, 8)[..., :_GROUP_BYTES]
    message = torch.cat([head.view(torch.uint8).view(len(words), 2), ratio, joined.reshape(len(words), -1)], 1).view(-1)
    return torch.nn.functional.pad(message, (0, -message.numel() % 4)).view(torch.int32)


def _unpacked(message: Tensor, n_chunks: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Places, signs and sizes (n_chunks, k); the larger magnitude and the ratio (n_chunks, 1)."""
    n_groups = -(-k // _GROUP)
    raw = message.view(torch.uint8)[: n_chunks * (_HEAD_BYTES + _GROUP_BYTES * n_groups)].view(n_chunks, -1)
    wide = torch.nn.functional.pad(raw[:, _HEAD_BYTES:].reshape(n_chunks, n_groups, _GROUP_BYTES), (0, 1))
    joined = wide.view(-1).view(torch.int64)
    shifts = torch.arange(0, _GROUP * _WORD_BITS, _WORD_BITS, dtype=torch.int64, device=message.device)
    words = (joined[:, None] >> shifts).view(n_chunks, -1)[:, :k] & ((1 << _WORD_BITS) - 1)
    head = raw[:, :2].reshape(-1).view(torch.bfloat16)[:, None]
    return words >> 2, (words >> 1 & 1).bool(), (words & 1).bool(), head, raw[:, 2:3]
