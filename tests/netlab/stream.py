"""A rank for the tests: rank 0 receives; every other sends N_BYTES (0: without end) to it over a TCP connection."""

import os
import socket
import sys
import threading
import time

n_bytes = int(sys.argv[1])


def receive(connection: socket.socket) -> None:
    """Print how many bytes came, and the seconds from the first to the last."""
    received, start, buffer = 0, 0.0, bytearray(1 << 20)
    while n := connection.recv_into(buffer):
        start = start or time.perf_counter()
        received += n
    print(received, time.perf_counter() - start, flush=True)


address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

if os.environ["RANK"] == "0":
    listener = socket.create_server(address)
    connections = [listener.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
    print("connected", flush=True)
    threads = [threading.Thread(target=receive, args=(connection,)) for connection in connections]
    for thread in threads:
        thread.start()
else:
    while True:
        try:
            connection = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    block, left = bytes(1 << 18), n_bytes
    while n_bytes == 0 or left > 0:
        left -= connection.send(block if n_bytes == 0 else block[: min(left, len(block))])
