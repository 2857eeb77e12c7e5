#!/usr/bin/env bash
# Starts a run on several hosts by hand: type the same line on each of them, in a shared folder or in a local one.
#
#   launch/torchrun.sh HEAD:PORT NODES PROCESSES key=value ...
#   launch/torchrun.sh 10.0.0.1:29400 2 8 name=deeper model.layers=96 trainer.steps=1000
#   launch/torchrun.sh 10.0.0.1:29400 1:4 8 name=deeper trainer.steps=1000    elastic: one host to four
#
# HEAD is any one of the hosts, by an address or a name that all others reach; PORT one that is free there. NODES is how
# many hosts there are, PROCESSES how many ranks each starts: one for each of its devices. Settings are those of
# `parallax train`; with a name, results are in runs/NAME, and the same lines resume the run.
# Ranks listen on other ports, too: see docs/clusters.md for firewalls.
#
# NODES=MIN:MAX is elastic: when a rank or a host is lost, or a host joins by this line, all ranks restart on the
# present hosts, plan for them, and resume from the last checkpoint. HEAD must stay: while it is unreachable, no host
# continues, and the others wait for it. An unfit host (other versions, too little memory) is refused with code 2, and
# the others continue without it.
#
# Environment:
#   RESTARTS    how often all ranks are restarted after a failure (default: 0; 100 for an elastic run)
#   JOIN        seconds within which all hosts must join (default: 300)
#   PYTHON      interpreter that has Parallax (default: the checkout's .venv, otherwise python3)
#   OMP_NUM_THREADS   threads of each rank (default: the cores divided among them)
#   GLIBC_TUNABLES    malloc of CPU ranks, see docs/clusters.md
#   GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME   the network card to use, if a host has several
#
# SIGTERM, SIGINT and SIGHUP go to this host's torchrun. All ranks save, and the run ends on all hosts (an elastic run
# continues on the others). SIGUSR1 goes to the ranks alone, which save and end with code 0. The exit code is
# torchrun's, or 2 if the ranks refused the settings.
set -euo pipefail

if (($# < 3)); then
    echo "usage: torchrun.sh HEAD:PORT NODES PROCESSES key=value ..." >&2
    exit 2
fi
endpoint=$1 nodes=$2 processes=$3
shift 3
least=${nodes%%:*} most=${nodes#*:} join=${JOIN:-300}
for count in "$least" "$most" "$processes" "$join"; do
    if [[ ! $count =~ ^[1-9][0-9]*$ ]]; then
        echo "torchrun.sh: $count: accepted are whole numbers from 1: hosts, ranks on each, and JOIN, in seconds" >&2
        exit 2
    fi
done
if ((least > most)); then
    echo "torchrun.sh: $nodes: accepted is MIN:MAX, the least hosts first" >&2
    exit 2
fi
restarts=${RESTARTS:-$((least == most ? 0 : 100))}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} && -x $root/.venv/bin/python ]]; then
    python=$root/.venv/bin/python
fi
if ! "$python" -c 'import sys, importlib.util; sys.exit(importlib.util.find_spec("parallax") is None)'; then
    echo "torchrun.sh: $python cannot import parallax: run 'make train' once, or set PYTHON" >&2
    exit 2
fi
# Whether HEAD is this host, and the address under which others reach this host.
found=$("$python" -m parallax.machine.rendezvous "$endpoint")
conf="join_timeout=$join,read_timeout=$join" at_head=1 meeting=()
while read -r option; do
    if [[ $option == --rdzv-conf=* ]]; then # torchrun takes one of them
        conf+=,${option#--rdzv-conf=}
    else
        meeting+=("$option")
    fi
done <<<"$found"
if [[ $conf == *is_host=0* ]]; then
    at_head=0
fi
if ((least < most)); then
    # Without these settings a lost host is noticed after fifteen seconds, and torchrun waits another thirty for others.
    conf+=,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5
    # The run continues without an unfit host if enough others are left and it is not the head.
    export PARALLAX_LEAST_HOSTS=$least PARALLAX_AT_HEAD=$at_head
fi

cores=$(getconf _NPROCESSORS_ONLN)
threads=$((cores / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
again=60 # seconds within which a lost HEAD must be back
# Otherwise torchrun gives a joining host no store of the ranks, or a wrong one.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export PARALLAX_JOIN_SECONDS=$join

say() {
    echo "torchrun.sh: $*" >&2
}

head_answers() {
    local host=${endpoint%:*}
    host=${host#[} host=${host%]}
    # shellcheck disable=SC2016 # the inner shell expands it
    timeout 2 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$host" "${endpoint##*:}" 2>/dev/null
}

# Sleep a second without a process that could be left over.
pause() {
    read -rt 1 _ <> <(:) || true
}

# Wait until HEAD answers again.
await_head() {
    local end=$((SECONDS + again))
    until head_answers; do
        if ((stop_requested || SECONDS > end)); then
            say "no answer from $endpoint for $again s: start the line there, too, or open the network to it"
            return 1
        fi
        pause
    done
}

# Print that torchrun waits for hosts, since torchrun waits silently. Kill torchrun if HEAD no longer answers: its own
# connection would time out only after minutes.
watch_torchrun() {
    local idle=0 gone=0 joined=0
    while pause && [[ -d /proc/$torchrun ]]; do
        if [[ -n $(cat "/proc/$torchrun/task/"*/children 2>/dev/null) ]]; then
            idle=0 gone=0 joined=1
            continue
        fi
        if ((++idle % 15 == 0)); then
            say "waiting at $endpoint until ${nodes/:/ to } hosts have joined: type the same line on each"
        fi
        if ((at_head || idle < 5)); then
            continue
        fi
        if head_answers; then
            gone=0 joined=1
        elif ((joined && ++gone == 4)); then
            say "no answer from $endpoint any more"
            kill -KILL "$torchrun" || true
        fi
    done
}

# shellcheck disable=SC2329 # by the trap
tell_ranks() {
    local ranks
    stop_requested=1
    read -ra ranks < <(cat "/proc/$torchrun/task/"*/children) || true
    if ((${#ranks[@]})); then
        kill -USR1 "${ranks[@]}" || true
    else
        kill -TERM "$torchrun" || true # no rank is left to save
    fi
}

# shellcheck disable=SC2329 # by the trap
end_run() {
    stop_requested=1
    kill -TERM "$torchrun" 2>/dev/null || true
}

# Whether torchrun has used all restarts, or the ranks refused in a way that no restart can mend.
has_given_up() {
    [[ -n $(find "$logs" -name "attempt_$restarts" -o -name refused) ]]
}

logs=$(mktemp -d "${TMPDIR:-/tmp}/parallax.XXXXXX")
watcher=
trap 'kill $watcher 2>/dev/null || true; rm -rf "$logs"' EXIT
stop_requested=0
for ((starts = 0; starts <= restarts; starts++)); do
    (
        trap '' USR1 # it would kill torchrun; the ranks handle it again
        exec "$python" -m torch.distributed.run \
            --nnodes="$nodes" --nproc-per-node="$processes" --max-restarts="$restarts" --monitor-interval=0.1 \
            --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id=parallax --rdzv-conf="$conf" "${meeting[@]}" \
            --log-dir="$logs" -m parallax train "$@"
    ) &
    torchrun=$!
    trap end_run TERM INT HUP
    trap tell_ranks USR1
    watch_torchrun &
    watcher=$!

    # A signal ends `wait` before torchrun has ended: wait again.
    while kill -0 "$torchrun" 2>/dev/null; do
        wait "$torchrun" || true
    done
    wait "$torchrun" && code=0 || code=$?
    { kill "$watcher" && wait "$watcher"; } 2>/dev/null || true
    if ((code == 0 || stop_requested || restarts == 0 || at_head)) || has_given_up; then
        break
    fi
    say "torchrun has ended with code $code; going back to $endpoint"
    await_head || break
done
if [[ -n $(find "$logs" -name refused) ]]; then
    code=2
fi
exit "$code"
