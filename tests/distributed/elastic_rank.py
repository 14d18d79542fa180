"""One rank that comes and goes: told what to do by JSON in its arguments, says by lines of JSON what it sees."""

import json
import os
import sys
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torch import nn

import gradwire
from gradwire.doors.local_sgd import OUTER


def say(**facts: Any) -> None:
    os.write(1, (json.dumps(facts) + "\n").encode())


def main(
    lighthouse: str,
    name: int,
    scheme: str = "plain",
    n_rounds: int = 12,
    fragments: int = 1,
    width: int = 24,
    waits: dict[str, str] | None = None,
    leaves_at: int = -1,
    dies_at: int = -1,
    dies_in_exchange: bool = False,
    quorum_timeout_s: float = 60,
    round_s: float = 0.0,
) -> None:
    """Train until `n_rounds` exchanges are done, or leave or die in the round after so many. `waits`: by a number of
    exchanges, the file without which no other follows."""
    torch.set_num_threads(1)
    torch.manual_seed(name)
    net = nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.Linear(width, 5))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=gradwire.Members(), load_state_dict=None, state_dict=None, min_replica_size=2, use_async_quorum=False, rank=0,
        world_size=1, store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=lighthouse, replica_id=f"r{name}",
        hostname="127.0.0.1", timeout=timedelta(seconds=30), quorum_timeout=timedelta(seconds=quorum_timeout_s),
    )  # fmt: skip
    given: list[float] = []  # of the first weight, in the last exchange
    reduce = gradwire.Reducer.all_reduce

    def look(reducer: gradwire.Reducer, tensors: dict[str, torch.Tensor]) -> Any:
        given[:] = [float(tensors["0.weight"][0, 0])] if "0.weight" in tensors else []
        work = reduce(reducer, tensors)
        if manager.current_step() >= dies_at >= 0 and dies_in_exchange:  # a fragment in which nothing lies has none
            os._exit(9)
        return work

    gradwire.Reducer.all_reduce = look  # type: ignore[assignment,method-assign]
    say(name=name, starts=True)
    outer = OUTER["nesterov" if fragments > 1 else "average"]
    loop = gradwire.LocalSgd(net, optimizer, scheme, 4, outer, manager, fragments=fragments, timeout_s=30)
    say(name=name, came=manager.current_step())
    draw = torch.Generator().manual_seed(name)
    weight = net[0].weight
    while (step := manager.current_step()) < n_rounds:
        if step == dies_at and not dies_in_exchange:
            os._exit(9)
        if step == leaves_at:
            break
        while (flag := (waits or {}).get(str(step))) and not Path(flag).exists():
            time.sleep(0.01)
        time.sleep(round_s)
        start = float(weight.detach()[0, 0])
        while manager.current_step() == step:
            x = torch.randn(8, 16, generator=draw)
            nn.functional.cross_entropy(net(x), x[:, :5].argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        bits = zlib.crc32(b"".join(anchor.detach().numpy().tobytes() for anchor in loop._anchors.values()))
        end = float(weight.detach()[0, 0])
        # The exchange that was done, which is a later one if others had done `step` without this rank.
        done = manager.current_step() - 1
        say(name=name, step=done, n=manager.num_participants(), start=start, given=given, end=end, bits=bits)
    loop.close()
    manager.shutdown(wait=False)
    say(name=name, done=manager.current_step())
    os._exit(0)


if __name__ == "__main__":
    try:
        main(**json.loads(sys.argv[1]))
    except gradwire.GradwireError as error:
        say(name=json.loads(sys.argv[1])["name"], error=type(error).__name__, words=str(error))
        os._exit(3)
