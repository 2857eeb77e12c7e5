#!/usr/bin/env bash
# Starts a run on several hosts by hand: type the same line on each of them, in a folder that they share, or in one of
# each.
#
#   launch/torchrun.sh HEAD:PORT NODES PROCESSES key=value ...
#   launch/torchrun.sh 10.0.0.1:29400 2 8 name=deeper model.layers=96 trainer.steps=1000
#   launch/torchrun.sh 10.0.0.1:29400 1:4 8 name=deeper trainer.steps=1000    elastic: one host to four
#
# HEAD is any one of the hosts, by an address or a name that all others reach; PORT one that is free there. NODES is how
# many hosts there are, PROCESSES how many ranks each starts: one for each of its devices. Settings are those of
# `parallax train`; a name makes it known where results go (runs/NAME), and the same lines again go on from there.
# Ranks listen on other ports, too: see docs/clusters.md for firewalls.
#
# NODES=MIN:MAX is elastic: when a rank or a host is lost, or a host joins by this line, all ranks start again on the
# hosts that are there, plan for them, and go on from the last checkpoint. HEAD must stay: while it is gone, or cut off,
# nobody goes on, and the others wait for it. A host that is unfit (other versions, too little memory) is refused with
# code 2, and the others go on without it.
#
# Environment:
#   RESTARTS    how often all ranks are started again after a failure (default: 0; of an elastic run 100)
#   JOIN        seconds within which the hosts must have come (default: 300)
#   PYTHON      interpreter that has Parallax (default: the checkout's .venv, otherwise python3)
#   OMP_NUM_THREADS   threads of each rank (default: the cores shared out among them)
#   GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME   the network card to talk over, where a host has several
#
# SIGTERM, SIGINT and SIGHUP go to this host's torchrun, which stops its ranks, and with them all others, which save first
# (those of an elastic run then go on without this host); SIGUSR1 goes to the ranks alone, which save and end well. The
# exit code is torchrun's, but 2 where the ranks refused the settings.
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
# Whether the meeting place is here, and under which address others reach this host.
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
    # Without these a lost host is noticed after fifteen seconds, and others are waited for another thirty.
    conf+=,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5
    # A host that is unfit is done without, where so many others are left and it is not the head.
    export PARALLAX_LEAST_HOSTS=$least PARALLAX_AT_HEAD=$at_head
fi

cores=$(getconf _NPROCESSORS_ONLN)
threads=$((cores / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
again=60 # seconds within which a HEAD that was there must be back
# Otherwise a host that joins is told of no store of the ranks, or of another one than the others.
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

# A second, in no process that could be left over.
pause() {
    read -rt 1 _ <> <(:) || true
}

# Until somebody listens at HEAD again.
await_head() {
    local end=$((SECONDS + again))
    until head_answers; do
        if ((asked || SECONDS > end)); then
            say "nobody has answered at $endpoint for $again s: start the line there, too, or open the way to it"
            return 1
        fi
        pause
    done
}

# Says for whom torchrun waits, which does so in silence, and ends it where the meeting place is gone, of which it would
# only learn from a connection that times out after minutes.
look_on() {
    local idle=0 gone=0 met=0
    while pause && [[ -d /proc/$torchrun ]]; do
        if [[ -n $(cat "/proc/$torchrun/task/"*/children 2>/dev/null) ]]; then
            idle=0 gone=0 met=1
            continue
        fi
        if ((++idle % 15 == 0)); then
            say "waiting at $endpoint until ${nodes/:/ to } hosts have come: the same line is to be typed on each"
        fi
        if ((at_head || idle < 5)); then
            continue
        fi
        if head_answers; then
            gone=0 met=1
        elif ((met && ++gone == 4)); then
            say "nobody answers at $endpoint any more"
            kill -KILL "$torchrun" || true
        fi
    done
}

# shellcheck disable=SC2329 # by the trap
tell_ranks() {
    local ranks
    asked=1
    read -ra ranks < <(cat "/proc/$torchrun/task/"*/children) || true
    if ((${#ranks[@]})); then
        kill -USR1 "${ranks[@]}" || true
    else
        kill -TERM "$torchrun" || true # there is nobody who could save
    fi
}

# shellcheck disable=SC2329 # by the trap
end_run() {
    asked=1
    kill -TERM "$torchrun" 2>/dev/null || true
}

# Whether torchrun was let start all ranks as often as allowed, or the ranks have said that no start mends it.
has_given_up() {
    [[ -n $(find "$logs" -name "attempt_$restarts" -o -name refused) ]]
}

logs=$(mktemp -d "${TMPDIR:-/tmp}/parallax.XXXXXX")
onlooker=
trap 'kill $onlooker 2>/dev/null || true; rm -rf "$logs"' EXIT
asked=0
for ((starts = 0; starts <= restarts; starts++)); do
    (
        trap '' USR1 # torchrun would die of it; the ranks heed it again
        exec "$python" -m torch.distributed.run \
            --nnodes="$nodes" --nproc-per-node="$processes" --max-restarts="$restarts" --monitor-interval=0.1 \
            --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id=parallax --rdzv-conf="$conf" "${meeting[@]}" \
            --log-dir="$logs" -m parallax train "$@"
    ) &
    torchrun=$!
    trap end_run TERM INT HUP
    trap tell_ranks USR1
    look_on &
    onlooker=$!

    # A signal ends `wait` before torchrun has ended: wait again.
    while kill -0 "$torchrun" 2>/dev/null; do
        wait "$torchrun" || true
    done
    wait "$torchrun" && code=0 || code=$?
    { kill "$onlooker" && wait "$onlooker"; } 2>/dev/null || true
    if ((code == 0 || asked || restarts == 0 || at_head)) || has_given_up; then
        break
    fi
    say "torchrun has ended with code $code; going back to $endpoint"
    await_head || break
done
if [[ -n $(find "$logs" -name refused) ]]; then
    code=2
fi
exit "$code"
