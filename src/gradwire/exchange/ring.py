"""Ring all-reduce of messages: N-1 hops that decode, add and encode, then N-1 hops that forward bytes verbatim.

Hop h < N-1 (reduce-scatter): send part rank-h, receive part rank-h-1, add this rank's share: so hop h+1 sends it.
After them this rank owns the sum of part rank+1. Its final message goes round in the other N-1 hops (all-gather); the
owner adopts the decoding of its own message, so that all ranks hold the same bits.
"""

from __future__ import annotations

import torch

from gradwire.codecs import Codec
from gradwire.exchange.chunk_codec import ChunkCodec, Importance
from gradwire.exchange.frames import FrameReceiver, FrameSender
from gradwire.exchange.parts import CHUNK_ELEMENTS, Parts
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator
from gradwire.wire.facts import Facts

# Messages that may be on their way while this rank works: chunk k+1 is encoded while k travels while k-1 is decoded.
_MESSAGES_AHEAD = 2


def ring_mean(
    communicator: Communicator,
    codec: Codec,
    buffer: torch.Tensor,
    facts: Facts,
    record: BucketRecord,
    importance: Importance | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
    left_out: torch.Tensor | None = None,
) -> None:
    """Replace `buffer` (n,) by the mean over the ranks, each message through `codec`; runs on the lane.

    Args:
        importance: asked for a chunk's importance bytes when it is encoded or decoded.
        left_out: (n,) for error feedback: what this rank's encodings lost. N x result + the sum of all ranks'
            left_out = the sum of their gradients.
    Raises: PeerLost, RankMismatch, and whatever the codec raises.
    Cost: sends 2 (N-1)/N of the encoded buffer; every element is encoded once.
    """
    world, rank = communicator.world_size, communicator.rank
    if world == 1 or buffer.numel() == 0:
        return
    parts = Parts(buffer, world, chunk_elements)
    chunks = ChunkCodec(communicator, codec, buffer, parts, importance, record, left_out)
    n_chunks = parts.n_chunks
    n_messages = 2 * (world - 1) * n_chunks
    first_gathered = (world - 1) * n_chunks
    # One outgoing message for every chunk of a part: what arrives in hop h leaves again in hop h+1, at the same chunk.
    outbox = communicator.scratch("ring outbox", n_chunks * chunks.max_message_bytes).view(n_chunks, -1)
    outbox_bytes = [0] * n_chunks

    tag, largest = communicator.next_stream(), chunks.max_message_bytes
    ahead = min(_MESSAGES_AHEAD, n_chunks - 1)
    sender = FrameSender(communicator, (rank + 1) % world, tag, facts, largest, ahead, record)
    receiver = FrameReceiver(communicator, (rank - 1) % world, tag, facts, largest, ahead, n_messages, record)

    def write(number: int) -> None:
        hop, chunk = divmod(number, n_chunks)
        if hop == 0:
            outbox_bytes[chunk] = chunks.encode_own(rank, chunk, outbox[chunk])
        sender.write(outbox[chunk, : outbox_bytes[chunk]])

    def read(number: int) -> None:
        hop, chunk = divmod(number, n_chunks)
        part = (rank - 1 - hop) % world  # both phases go on in the same order round the ring
        message = receiver.read()
        if number < first_gathered:
            total = chunks.decode_plus_own(message, part, chunk)
            outbox_bytes[chunk] = chunks.encode(total, part, chunk, outbox[chunk])
            if hop == world - 2:
                chunks.adopt_mean(outbox[chunk, : outbox_bytes[chunk]], part, chunk)
        else:
            if hop < 2 * (world - 1) - 1:
                outbox[chunk, : message.numel()].copy_(message)
                outbox_bytes[chunk] = message.numel()
            chunks.adopt_mean(message, part, chunk)

    for number in range(n_messages + ahead):
        if number < n_messages:
            write(number)
        if number >= ahead:
            read(number - ahead)
    sender.finish()
