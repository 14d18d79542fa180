"""What `gradwire netlab check` runs in each rank: `probe.py SECONDS REPEATS RATE_BPS`.

Times Gloo's all_reduce of a tensor that should take SECONDS at the rate; rank 0 prints one JSON line.
"""

from __future__ import annotations

import datetime
import json
import sys
import time

import torch
import torch.distributed as dist


def main() -> None:
    """Measure: each rank sends and receives 2 (N - 1) / N of the tensor (ring all-reduce)."""
    seconds, repeats, rate_bps = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60 + 20 * seconds))
    world_size = dist.get_world_size()
    crossing = 2 * (world_size - 1) / world_size
    n_elements = max(1 << 16, int(rate_bps / 8 * seconds / crossing / 4))
    tensor = torch.ones(n_elements)
    dist.all_reduce(tensor[: max(1 << 16, n_elements // 4)])  # connections, windows, memory
    times_s = []
    for _ in range(repeats):
        tensor.fill_(1)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        times_s.append(time.perf_counter() - start)
        assert tensor[0] == world_size
        assert tensor[-1] == world_size
    if dist.get_rank() == 0:
        rates = [4 * n_elements * crossing * 8 / elapsed_s for elapsed_s in times_s]
        print(json.dumps({"payload_bytes": 4 * n_elements, "rates_bps": rates}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules must not stand before installed ones of the same name
    main()
