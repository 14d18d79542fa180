"""A datagram that is not exactly a packet is foreign: nothing of it is used, and the switch goes on."""

import random
import socket

import numpy as np

from gradwire import _native
from gradwire.errors import GradwireError
from switch_cases import ADD, Serving, assert_reduced, clients

GOOD, FOREIGN, OTHER_VERSION = 0, 1, 2


def check(datagram: bytes) -> int:
    return _native.switch_check_packet(np.frombuffer(datagram, np.uint8))


def catch_packets() -> tuple[bytes, bytes]:
    """A packet without values and one with, as a client and a switch make them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
        ear.bind(("127.0.0.1", 0))
        client = _native.SwitchClient("127.0.0.1", ear.getsockname()[1], 3, 0, 1, 4)
        try:
            client.join(0.01)
        except GradwireError:
            join = ear.recv(4096)
    with Serving() as serving, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as rank:
        rank.settimeout(5)
        rank.sendto(join, ("127.0.0.1", serving.port))
        welcome = bytearray(rank.recv(4096))
        welcome[5], welcome[6] = 4, ADD  # values, to add
        header = bytes(welcome[:36])
        payload = np.arange(256, dtype=np.int32).tobytes()
        checksum = _native.crc32c(np.frombuffer(payload, np.uint8), _native.crc32c(np.frombuffer(header, np.uint8)))
        values = header + checksum.to_bytes(4, "little") + payload
        rank.sendto(values, ("127.0.0.1", serving.port))
        result = rank.recv(4096)
    assert result[40:] == payload  # one worker's sum is its own values
    return join, result


def test_every_truncated_flipped_or_lengthened_packet_is_foreign() -> None:
    for packet in catch_packets():
        assert check(packet) == GOOD
        for n_bytes in range(len(packet)):
            assert check(packet[:n_bytes]) == FOREIGN
        assert check(packet + b"\0") == FOREIGN
        for bit in range(8 * len(packet)):
            flipped = bytearray(packet)
            flipped[bit // 8] ^= 1 << (bit % 8)
            wanted = OTHER_VERSION if bit // 8 == 4 else FOREIGN
            assert check(bytes(flipped)) == wanted


def test_random_datagrams_are_foreign_and_the_switch_goes_on() -> None:
    numbers = random.Random(0)
    sizes = [*range(64), 40, 1063, 1064, 1065, 2128, 65_507]
    with Serving() as serving, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for size in sizes:
            for datagram in (numbers.randbytes(size), (b"GWSW\x01" + numbers.randbytes(size))[:size]):
                assert check(datagram) == FOREIGN
                stranger.sendto(datagram, ("127.0.0.1", serving.port))
        with clients(serving.port, 2) as workers:
            assert_reduced(workers, 1000, ADD, seed=0)
        assert serving.counters()["foreign"] > len(sizes)
