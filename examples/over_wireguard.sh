#!/usr/bin/env bash
# Two hosts joined by WireGuard, as network namespaces of this machine: an all-reduce over the bare line, and inside the tunnel.
#     sudo examples/over_wireguard.sh [RATE, such as 1gbit]
# needs wireguard-tools and wireguard-go (where the kernel has WireGuard: `ip link add wg0 type wireguard` instead), and a
# python with gradwire (PYTHON=.venv/bin/python). On real hosts: the two `wg set`, an address each, and GRADWIRE_SOCKET_IFNAME.
set -euo pipefail
umask 077
cd "$(dirname "$0")/.."
RATE=${1:-} PYTHON=${PYTHON:-.venv/bin/python} KEYS=$(mktemp -d)
cleanup() {
  for host in 0 1; do
    ip netns pids "gw$host" 2> /dev/null | xargs -r kill 2> /dev/null || true
    ip netns del "gw$host" 2> /dev/null || true
  done
  rm -rf "$KEYS"
}
trap cleanup EXIT

ip link add gwa type veth peer name gwb
for host in 0 1; do
  ip netns add "gw$host"
  end=$([ "$host" = 0 ] && echo gwa || echo gwb)
  ip link set "$end" netns "gw$host" name line
  ip -n "gw$host" link set lo up
  ip -n "gw$host" address add "10.9.0.$((host + 1))/24" dev line
  ip -n "gw$host" link set line up
  if [ -n "$RATE" ]; then ip netns exec "gw$host" tc qdisc add dev line root tbf rate "$RATE" burst 256k latency 50ms; fi
  wg genkey > "$KEYS/$host"
done
for host in 0 1; do
  other=$((1 - host))
  WG_PROCESS_FOREGROUND=1 ip netns exec "gw$host" wireguard-go -f "wg$host" > /dev/null 2>&1 &
  for _ in $(seq 100); do ip -n "gw$host" link show "wg$host" > /dev/null 2>&1 && break || sleep 0.1; done
  ip netns exec "gw$host" wg set "wg$host" listen-port 51820 private-key "$KEYS/$host" \
    peer "$(wg pubkey < "$KEYS/$other")" allowed-ips "10.10.0.$((other + 1))/32" endpoint "10.9.0.$((other + 1)):51820"
  ip -n "gw$host" address add "10.10.0.$((host + 1))/24" dev "wg$host"
  ip -n "gw$host" link set "wg$host" up
done

cat > "$KEYS/measure.py" << 'PYTHON'
import os, statistics, sys, time
import torch, torch.distributed as dist
import gradwire

torch.set_num_threads(1)
dist.init_process_group("gloo")
values = torch.randn(6_250_000, generator=torch.Generator().manual_seed(dist.get_rank())) * 1e-3
for name in ("DDP's own", "gcomp:importance=uniform,bits=12", "embedded-float:bits=5"):
    times = []
    for _ in range(9):
        buffer = values.clone()
        dist.barrier()
        begun = time.perf_counter()
        if name == "DDP's own":
            dist.all_reduce(buffer)
        else:
            gradwire.all_reduce(buffer, scheme=name)
        times.append(time.perf_counter() - begun)
    if dist.get_rank() == 0:
        print(f"{sys.argv[1]:10} {name:34} {1e3 * statistics.median(times[2:]):7.0f} ms for 25 MB", flush=True)
dist.destroy_process_group()
PYTHON
for turn in 1 2; do
  for way in line wg; do
    net=$([ "$way" = line ] && echo 9 || echo 10)
    for host in 0 1; do
      name=$([ "$way" = line ] && echo line || echo "wg$host")
      ip netns exec "gw$host" env RANK="$host" WORLD_SIZE=2 MASTER_ADDR="10.$net.0.1" MASTER_PORT=$((29500 + turn)) \
        GLOO_SOCKET_IFNAME="$name" GRADWIRE_SOCKET_IFNAME="$name" "$PYTHON" "$KEYS/measure.py" "$way" &
      pids[host]=$!
    done
    wait "${pids[0]}" "${pids[1]}"
  done
done
