#!/usr/bin/env bash
# Two hosts joined by WireGuard, as network namespaces of this machine: an all-reduce over the bare line, and inside the tunnel.
#     sudo examples/over_wireguard.sh [RATE, such as 1gbit]
# needs wireguard-tools and wireguard-go (where the kernel has WireGuard: `ip link add wg0 type wireguard` instead), and a
# python with gradwire (PYTHON=.venv/bin/python). On real hosts: the two `wg set`, an address each, and GRADWIRE_SOCKET_IFNAME.
set -euo pipefail
umask 077
cd "$(dirname "$0")/.."
if [ "$(id -u)" != 0 ] || ! command -v wg wireguard-go ip > /dev/null; then
  echo "run this as root, with wireguard-tools, wireguard-go and iproute2 installed (Debian: apt-get install them)" >&2
  exit 2
fi
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
  ip netns exec "gw$host" wireguard-go -f "wg$host" > /dev/null 2>&1 &
  for _ in $(seq 100); do ip -n "gw$host" link show "wg$host" > /dev/null 2>&1 && break || sleep 0.1; done
  ip netns exec "gw$host" wg set "wg$host" listen-port 51820 private-key "$KEYS/$host" \
    peer "$(wg pubkey < "$KEYS/$other")" allowed-ips "10.10.0.$((other + 1))/32" endpoint "10.9.0.$((other + 1)):51820"
  ip -n "gw$host" address add "10.10.0.$((host + 1))/24" dev "wg$host"
  ip -n "gw$host" link set "wg$host" up
done

for turn in 1 2; do
  for way in line wg; do
    [ "$way" = line ] && echo "== over the line" || echo "== in the tunnel"
    net=$([ "$way" = line ] && echo 9 || echo 10)
    for host in 0 1; do
      name=$([ "$way" = line ] && echo line || echo "wg$host")
      ip netns exec "gw$host" env RANK="$host" WORLD_SIZE=2 MASTER_ADDR="10.$net.0.1" MASTER_PORT=$((29500 + turn)) \
        GLOO_SOCKET_IFNAME="$name" GRADWIRE_SOCKET_IFNAME="$name" "$PYTHON" -m gradwire bench allreduce \
        --n-bytes 25000000 --scheme ddp gcomp:importance=uniform,bits=12 embedded-float:bits=5 &
      pids[host]=$!
    done
    wait "${pids[0]}" "${pids[1]}"
  done
done
