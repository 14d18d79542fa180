"""A rank: sums N values through the switch that its environment names; prints one JSON line on how it went."""

import json
import os
import sys

import numpy as np

from gradwire import _native
from gradwire.errors import PeerLost

n, rank, world_size = int(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = os.environ["GRADWIRE_SWITCH"]
host, port = address.split(":")
client = _native.SwitchClient(host, int(port), 11, rank, world_size, 64)
client.join(60.0)
first = np.ones(256, np.int32)
client.reduce(first, 1, 60.0)
values = np.arange(n, dtype=np.int32) * (rank + 1)
if n > 1_000_000:
    print(json.dumps({"rank": rank, "joined": True}), flush=True)
try:
    client.reduce(values, 1, 60.0)
except PeerLost as error:
    print(json.dumps({"rank": rank, "PeerLost": str(error)}), flush=True)
    sys.exit(0)
client.leave()
wanted = np.arange(n, dtype=np.int32) * np.int32(world_size * (world_size + 1) // 2)
print(json.dumps({"rank": rank, "is_exact": bool(np.array_equal(values, wanted)), "address": address}), flush=True)
