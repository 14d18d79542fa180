"""How tests start ranks."""

from __future__ import annotations

import socket
from unittest import mock

import ranks


def name_itself(rank: int, world_size: int) -> int:
    return rank


def test_ranks_start_again_where_another_program_has_taken_their_port() -> None:
    with socket.socket() as taken:
        taken.bind(("", ranks.find_free_port()))
        taken.listen()
        ports = [taken.getsockname()[1], ranks.find_free_port()]
        with mock.patch.object(ranks, "find_free_port", side_effect=ports) as found:
            assert ranks.run_ranks(name_itself, 2) == [0, 1]
        assert found.call_count == 2
