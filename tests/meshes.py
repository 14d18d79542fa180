"""The native engine's connections, between ranks that are threads of one process."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gradwire import _native

SECRET = bytes(range(16))
FACTS = (1, 2, 3, 4)


@contextlib.contextmanager
def meshes(
    world_size: int = 2,
    timeout_s: float = 10,
    host: str = "127.0.0.1",
    secrets: tuple[bytes, ...] = (),
    n_connections: int = 0,
) -> Iterator[list[_native.Mesh]]:
    made = [_native.Mesh(rank, world_size, [host], timeout_s, n_connections, "") for rank in range(world_size)]
    for mesh, secret in zip(made, secrets or (SECRET,) * world_size, strict=True):
        mesh.join([mesh.endpoints for mesh in made], secret)
    try:
        yield made
    finally:
        for mesh in made:
            mesh.shut()


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returns or raises, all of them running at the same time."""

    def attempt(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(attempt, calls))
