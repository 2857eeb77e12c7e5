#!/usr/bin/env bash
# Starts a run on this host with torchrun, one process for each device.
#
#   launch/local.sh trainer.steps=1000                     arguments are those of `parallax train`
#   PROCESSES=3 launch/local.sh experiment=demo            two stages, the second with two replicas
#   CUDA_VISIBLE_DEVICES=0,1 RESTARTS=3 launch/local.sh name=long trainer.steps=1000
#
# Results go to runs/NAME in the current folder. `parallax train` alone plans before it starts its processes and
# so chooses their number itself; use this script to control torchrun's settings.
#
# Environment:
#   PROCESSES   ranks on this host (default: its CUDA devices; without any, its cores)
#   RESTARTS    how often torchrun starts all ranks again after a failure (default: 0); give the run a name, so
#               that they continue from its last checkpoint
#   PYTHON      interpreter that has Parallax (default: the checkout's .venv, otherwise python3)
#   OMP_NUM_THREADS   threads of each rank (default: the cores divided among them)
#   GLIBC_TUNABLES    malloc of CPU ranks, see docs/clusters.md
#
# Ranks rendezvous at files in a private folder: no port is opened. SIGTERM, SIGINT and SIGHUP go to torchrun, which
# stops every rank; the exit code is torchrun's.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} && -x $root/.venv/bin/python ]]; then
    python=$root/.venv/bin/python
fi
if ! "$python" -c 'import sys, importlib.util; sys.exit(importlib.util.find_spec("parallax") is None)'; then
    echo "local.sh: $python cannot import parallax: run 'make train' once, or set PYTHON" >&2
    exit 2
fi

cores=$(nproc)
processes=${PROCESSES:-$("$python" -c 'import torch; print(torch.cuda.device_count())')}
processes=${processes/#0/$cores}
if [[ ! $processes =~ ^[1-9][0-9]*$ ]]; then
    echo "local.sh: PROCESSES=$processes: accepted are whole numbers from 1" >&2
    exit 2
fi
threads=$((cores / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

meeting=$(mktemp -d "${TMPDIR:-/tmp}/parallax.XXXXXX")
trap 'rm -rf "$meeting"' EXIT
export PARALLAX_RENDEZVOUS=$meeting/ranks
# Otherwise torchrun opens a port for a store of the ranks, which rendezvous at the file.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

"$python" -m torch.distributed.run \
    --nnodes=1 --nproc-per-node="$processes" --max-restarts="${RESTARTS:-0}" --monitor-interval=0.1 \
    --rdzv-backend=c10d --rdzv-endpoint="$meeting/rendezvous" --rdzv-conf=store_type=file --rdzv-id="parallax-$$" \
    --log-dir="$meeting/logs" \
    -m parallax train "$@" &
torchrun=$!
trap 'kill -TERM "$torchrun" 2>/dev/null || true' TERM INT HUP

# A signal ends `wait` before torchrun has ended: wait again.
while kill -0 "$torchrun" 2>/dev/null; do
    wait "$torchrun" || true
done
wait "$torchrun" && code=0 || code=$?
exit "$code"
