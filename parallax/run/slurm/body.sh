# ---- What follows is the same in every script: it needs name, processes, python and the array settings.
#
# One torchrun on each node starts the node's ranks, which join on the first node. After SIGUSR1 (before the time limit,
# or by `scancel --signal=USR1 JOB`) the ranks save and end; the job is then queued again, and the same run resumes from
# its last checkpoint. If a node is lost, Slurm queues the job again without a signal to the ranks.

say() {
    echo "slurm: $*" >&2
}

# The address under which Slurm reaches a node: a node's name need not be a host name, and may resolve to loopback.
address_of() {
    scontrol --oneliner show node "$1" | sed -n 's/.*[[:space:]]NodeAddr=\([^[:space:]]*\).*/\1/p'
}

# On each node: its torchrun. Arguments: the head's address and port, processes, interpreter; the rest is for Parallax.
on_node() {
    # Slurm sends signals to every process of the step. Torchrun would die of USR1, which the ranks heed all the same;
    # of the others this shell would die, and with it the step, while the ranks still save.
    trap '' USR1
    trap : TERM INT HUP
    local head=$1 port=$2 processes=$3 python=$4 address threads
    shift 4
    address=$(address_of "$SLURMD_NODENAME")
    threads=$(($(nproc) / processes))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
    # The ranks have a store of their own, which ends with them.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    logs=$(mktemp -d "${TMPDIR:-/tmp}/parallax.XXXXXX")
    trap 'rm -rf "$logs"' EXIT # no local variable: the function is over then
    "$python" -m torch.distributed.run \
        --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$processes" --max-restarts=0 --monitor-interval=0.1 \
        --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \
        --rdzv-conf="is_host=$((SLURM_NODEID == 0))" --local-addr="$address" --log-dir="$logs" \
        -m parallax train "$@"
}

newest_checkpoint() {
    local folder # checkpoint.directory, as the run has it
    folder=$(sed -n '/^checkpoint:/,/^[^ ]/s/^  directory: //p' "$directory/config.yaml" 2>/dev/null || true)
    if [[ -z $folder || $folder == auto ]]; then
        folder=$directory/checkpoints
    else
        folder=${folder/#\~/$HOME}/$name
    fi
    if [[ -d $folder ]]; then
        find "$folder" -maxdepth 1 -name 'step-*' | sort | tail -n 1
    fi
}

directory=runs/$name
mkdir -p "$directory"
head=$(address_of "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)")
port=${PORT:-$((20000 + SLURM_JOB_ID % 10000))}
before=$(newest_checkpoint)
touch "$directory/.started"
say "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)): $directory on $SLURM_JOB_NODELIST, meeting at $head:$port"

tell_ranks() {
    scancel --signal=USR1 "$SLURM_JOB_ID" || true
}

# With --signal=B:… Slurm signals this shell alone.
stop_requested=0
trap 'stop_requested=1; tell_ranks' USR1
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} --kill-on-bad-exit=1 \
    bash -c "$(declare -f address_of on_node); on_node \"\$@\"" torchrun \
    "$head" "$port" "$processes" "$python" "name=$name" ${settings[@]+"${settings[@]}"} &
step=$!
# A signal ends `wait` before srun has ended: wait again. Ranks that were just starting have missed it, so it is sent
# again every ten seconds; other ranks ignore the repetition.
seconds=0
while kill -0 "$step" 2>/dev/null; do
    if ((stop_requested == 0)); then
        wait "$step" || true
    else
        sleep 1
        ((++seconds % 10)) || tell_ranks
    fi
done
wait "$step" && code=0 || code=$?

if ((code != 0)); then
    say "$directory ended with code $code"
    exit "$code"
fi
if [[ ! $directory/summary.json -nt $directory/.started ]]; then
    # A run that was complete already keeps its summary.
    ((stop_requested == 0)) && grep -q '"ended": "steps"' "$directory/summary.json" 2>/dev/null && exit 0
    say "$directory was requested to end before its first step; it is not started again: allow more time (--time)"
    exit 1
fi
if ! grep -q '"ended": "stopped"' "$directory/summary.json"; then
    exit 0
fi
if [[ $(newest_checkpoint) == "$before" ]]; then
    say "$directory was requested to end and has made no step since it was started; it is not started again"
    exit 1
fi
say "$directory is queued again and resumes from $(newest_checkpoint)"
scontrol requeue "$SLURM_JOB_ID"
