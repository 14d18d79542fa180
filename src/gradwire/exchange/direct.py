"""Direct all-reduce: all-to-all of encoded parts, decode and add at each owner, all-gather of the results verbatim.

Two hops whatever the world size, so a lossy codec rounds a value twice instead of N times, and the sum is taken by one
rank in rank order. The price: every rank talks to every other.
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

_CHUNKS_AHEAD = 2  # as in ring.py


def direct_mean(
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

    Rank r owns part r: it adds the decoded parts of all ranks, its own unencoded, in rank order.

    Args:
        importance: asked for a chunk's importance bytes when it is encoded or decoded.
        left_out: (n,) for error feedback: what this rank's encodings lost. N x result + the sum of all ranks'
            left_out = the sum of their gradients.
    Raises: PeerLost, RankMismatch, and whatever the codec raises.
    Cost: sends 2 (N-1)/N of the encoded buffer, to N-1 peers; every element is encoded once.
    """
    world, rank = communicator.world_size, communicator.rank
    if world == 1 or buffer.numel() == 0:
        return
    parts = Parts(buffer, world, chunk_elements)
    chunks = ChunkCodec(communicator, codec, buffer, parts, importance, record, left_out)
    n_chunks = parts.n_chunks
    # The owner's final messages wait here from the reduction of their chunk until the gathering begins.
    finals = communicator.scratch("direct finals", n_chunks * chunks.max_message_bytes).view(n_chunks, -1)
    final_bytes = [0] * n_chunks
    message = communicator.scratch("direct message", chunks.max_message_bytes)
    total_memory = communicator.scratch("direct total", parts.max_chunk_elements * buffer.element_size())
    total_memory = total_memory.view(buffer.dtype)

    tag, largest = communicator.next_stream(), chunks.max_message_bytes
    n_messages = 2 * n_chunks
    ahead = min(_CHUNKS_AHEAD, n_chunks - 1)
    # Each rank begins with its right neighbour, so that not all of them send to the same rank at once.
    peers = [(rank + distance) % world for distance in range(1, world)]
    senders = {peer: FrameSender(communicator, peer, tag, facts, largest, ahead, record) for peer in peers}
    receivers = {
        peer: FrameReceiver(communicator, peer, tag, facts, largest, ahead, n_messages, record) for peer in peers
    }

    def write(number: int) -> None:
        gathering, chunk = divmod(number, n_chunks)
        for peer in peers:
            if gathering:
                senders[peer].write(finals[chunk, : final_bytes[chunk]])
            else:
                n_bytes = chunks.encode_own(peer, chunk, message)
                senders[peer].write(message[:n_bytes])

    def read(number: int) -> None:
        gathering, chunk = divmod(number, n_chunks)
        if gathering:
            for peer in reversed(peers):
                chunks.adopt_mean(receivers[peer].read(), peer, chunk)
        else:
            total = reduce_chunk(chunk)
            final_bytes[chunk] = chunks.encode(total, rank, chunk, finals[chunk])
            chunks.adopt_mean(finals[chunk, : final_bytes[chunk]], rank, chunk)

    def reduce_chunk(chunk: int) -> torch.Tensor:
        own = parts.slice_of(buffer, rank, chunk)
        total = total_memory[: own.numel()].zero_()
        for source in range(world):
            if source == rank:
                total.add_(own)
            else:
                chunks.add_decoded(receivers[source].read(), total, rank, chunk)
        return total

    for number in range(n_messages + ahead):
        if number < n_messages:
            write(number)
        if number >= ahead:
            read(number - ahead)
    for sender in senders.values():
        sender.finish()
