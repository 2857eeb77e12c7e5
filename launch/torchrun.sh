#!/usr/bin/env bash
# Starts a run on several hosts by hand: type the same line on each of them, in a folder that they share, or in one of
# each.
#
#   launch/torchrun.sh HEAD:PORT NODES PROCESSES key=value ...
#   launch/torchrun.sh 10.0.0.1:29400 2 8 name=deeper model.layers=96 cluster.device_memory=auto
#
# HEAD is any one of the hosts, by an address or a name that all others reach; PORT one that is free there. NODES is how
# many hosts there are, PROCESSES how many ranks each starts: one for each of its devices. Settings are those of
# `parallax train`; a name makes it known where results go (runs/NAME), and the same lines again go on from there.
# Ranks listen on other ports, too: see docs/clusters.md for firewalls.
#
# Environment:
#   RESTARTS    how often all ranks are started again after a failure (default: 0)
#   PYTHON      interpreter that has Parallax (default: the checkout's .venv, otherwise python3)
#   OMP_NUM_THREADS   threads of each rank (default: the cores shared out among them)
#   GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME   the network card to talk over, where a host has several
#
# SIGTERM, SIGINT and SIGHUP go to this host's torchrun, which stops its ranks, and with them all others; SIGUSR1 goes to
# the ranks alone, which save and end well. The exit code is torchrun's.
set -euo pipefail

if (($# < 3)); then
    echo "usage: torchrun.sh HEAD:PORT NODES PROCESSES key=value ..." >&2
    exit 2
fi
endpoint=$1 nodes=$2 processes=$3
shift 3
for count in "$nodes" "$processes"; do
    if [[ ! $count =~ ^[1-9][0-9]*$ ]]; then
        echo "torchrun.sh: $count: accepted are whole numbers from 1, first of hosts, then of ranks on each" >&2
        exit 2
    fi
done

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} && -x $root/.venv/bin/python ]]; then
    python=$root/.venv/bin/python
fi
if ! "$python" -c 'import sys, importlib.util; sys.exit(importlib.util.find_spec("parallax") is None)'; then
    echo "torchrun.sh: $python cannot import parallax: run 'make train' once, or set PYTHON" >&2
    exit 2
fi
# Whether the meeting place is here, and under which address others reach this host.
found=$("$python" -m parallax.machine.rendezvous "$endpoint")
mapfile -t meeting <<<"$found"

cores=$(getconf _NPROCESSORS_ONLN)
threads=$((cores / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
# Otherwise restarted ranks find the keys of those before them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# shellcheck disable=SC2329 # by the trap
tell_ranks() {
    local ranks
    read -ra ranks < <(cat "/proc/$torchrun/task/"*/children) || true
    kill -USR1 "${ranks[@]}" || true
}

logs=$(mktemp -d "${TMPDIR:-/tmp}/parallax.XXXXXX")
trap 'rm -rf "$logs"' EXIT
(
    trap '' USR1 # torchrun would die of it; the ranks heed it again
    exec "$python" -m torch.distributed.run \
        --nnodes="$nodes" --nproc-per-node="$processes" --max-restarts="${RESTARTS:-0}" --monitor-interval=0.1 \
        --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id=parallax "${meeting[@]}" --log-dir="$logs" \
        -m parallax train "$@"
) &
torchrun=$!
trap 'kill -TERM "$torchrun" 2>/dev/null || true' TERM INT HUP
trap tell_ranks USR1

# A signal ends `wait` before torchrun has ended: wait again.
while kill -0 "$torchrun" 2>/dev/null; do
    wait "$torchrun" || true
done
wait "$torchrun" && code=0 || code=$?
exit "$code"
