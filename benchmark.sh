#!/usr/bin/env bash
# Train on tasks x seeds, each run confined to a core of its own. `./benchmark.sh --help` tells the rest.
set -euo pipefail

help() {
    cat <<'HELP'
usage: ./benchmark.sh [options] [-- flags of the training script]

Train on every task with every seed, as many runs at once as there are workers, one core for each.
Runs land in ./runs of the current directory, their logs in ./runs/logs. Started again, the sweep skips
what is finished with the same arguments (its summary.json says so) and trains what is not anew: the
directory of an attempt of its own that did not finish is removed first.

options:
  --env-ids ID...   the tasks (default: the eleven MuJoCo tasks, -v4)
  --num-seeds N     the number of seeds (default: 3)
  --start-seed N    the first seed (default: 1)
  --workers N       the number of runs at once (default: the number of cores)
  --dry-run         print the commands, run nothing
  --help            show this help

environment:
  PYTHON            the Python that has requirements.txt (default: python)
  WANDB_TAGS        tags of tracked runs; `git describe` is added to them
  XLA_FLAGS         kept; what confines XLA to one core is added to it

examples:
  ./benchmark.sh
  ./benchmark.sh --env-ids Hopper-v4 Ant-v4 --num-seeds 5 -- --track --total-timesteps 1000000

exit status: 0 all runs are finished, 1 some failed, 2 bad input, 129, 130 or 143 stopped by a signal
HELP
}

die() {
    echo "benchmark.sh: $*" >&2
    exit 2
}

check_number() { # NAME VALUE LEAST
    [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ && $2 -ge $3 ]] || die "$1 $2: must be a whole number, at least $3"
}

# ---------------------------------------------------------------------------------------------------------------------
# Options

env_ids=({Ant,HalfCheetah,Hopper,Humanoid,HumanoidStandup,InvertedDoublePendulum}-v4
    {InvertedPendulum,Pusher,Reacher,Swimmer,Walker2d}-v4)
num_seeds=3 start_seed=1 workers=$(nproc) dry_run=

while (($#)); do
    [[ $1 == --*=* ]] && set -- "${1%%=*}" "${1#*=}" "${@:2}"
    case $1 in
        --num-seeds | --start-seed | --workers | --env-ids)
            [[ $# -gt 1 && $2 != --* ]] || die "$1: needs a value; see --help" ;;&
        --env-ids)
            env_ids=()
            while [[ $# -gt 1 && $2 != --* ]]; do env_ids+=("$2") && shift; done ;;
        --num-seeds) check_number "$1" "$2" 1 && num_seeds=$2 && shift ;;
        --start-seed) check_number "$1" "$2" 0 && start_seed=$2 && shift ;;
        --workers) check_number "$1" "$2" 1 && workers=$2 && shift ;;
        --dry-run) dry_run=yes ;;
        --help | -h) help && exit ;;
        --) break ;;
        *) die "$1: no such option; see --help" ;;
    esac
    shift
done
shift $(($# > 0)) # the --; what is left are flags of the script

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
script=$root/ppo_continuous_action_envpool_xla_jax_scan.py
export PYTHON=${PYTHON:-python}
command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON: no such program"
tag=$(git -C "$root" describe --tags --always --dirty 2>/dev/null || true)
export WANDB_TAGS=${WANDB_TAGS:-}${WANDB_TAGS:+${tag:+,}}$tag
export XLA_FLAGS="${XLA_FLAGS:+$XLA_FLAGS }--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

# ---------------------------------------------------------------------------------------------------------------------
# Plan: one line a run: its name, what to do, what an earlier attempt left, its steps, its command; tabs between them.
# The script itself says what arguments a command line means, so that a changed default counts as a change.

plan() { # SCRIPT START_SEED NUM_SEEDS NUM_TASKS TASK... FLAG...
    "$PYTHON" - "$@" <<'PLAN'
import contextlib, dataclasses, hashlib, importlib, json, os, pathlib, re, shlex, sys  # noqa: E401

script, start_seed, num_seeds, num_tasks, *rest = sys.argv[1:]
tasks, flags = rest[: int(num_tasks)], rest[int(num_tasks) :]
sys.path.insert(0, str(pathlib.Path(script).parent))
try:
    import tyro

    Args = importlib.import_module(pathlib.Path(script).stem).Args
except ImportError as error:
    print(f"benchmark.sh: PYTHON={os.environ['PYTHON']}: {error}; install requirements.txt", file=sys.stderr)
    sys.exit(2)

finished = []
for path in pathlib.Path("runs").glob("*/summary.json"):
    with contextlib.suppress(ValueError, OSError, KeyError, TypeError):
        summary = json.loads(path.read_text())
        finished += [summary["args"]] if summary["status"] == "finished" else []

plan = {}
for seed in range(int(start_seed), int(start_seed) + int(num_seeds)):
    for task in tasks:
        line = ["--env-id", task, "--seed", str(seed), "--num-threads", "1", *flags]
        with contextlib.redirect_stdout(sys.stderr):
            args = json.loads(json.dumps(dataclasses.asdict(tyro.cli(Args, args=line, prog="benchmark.sh --"))))
        if (args["env_id"], args["seed"]) != (task, seed):
            print("benchmark.sh: --env-id, --seed: give --env-ids, --start-seed, --num-seeds before the --", file=sys.stderr)
            sys.exit(2)
        digest = hashlib.sha256(json.dumps(args, sort_keys=True).encode()).hexdigest()[:8]
        name = re.sub(r"[^\w.-]", "-", f"{task}__{seed}__{digest}")
        log = pathlib.Path("runs/logs", name + ".log")
        run_name = re.escape(f"{task}__{args['exp_name']}__{seed}__".replace("/", "-")) + r"\d+"
        leftover = re.search(f"^{run_name}$", log.read_text(errors="replace"), re.M) if log.exists() else None
        what, found = "finished" if args in finished else "todo", leftover[0] if leftover else "-"
        command = shlex.join([os.environ["PYTHON"], script, *line])
        plan[name] = (name, what, found, str(args["total_timesteps"]), command)
for row in plan.values():
    print(*row, sep="\t")
PLAN
}

state=$(mktemp -d) # the plan, and a file a run: NAME.running, then NAME.done, NAME.failed or NAME.stopped
export state
trap 'rm -rf "$state"' EXIT
make_plan() { plan "$script" "$start_seed" "$num_seeds" "${#env_ids[@]}" "${env_ids[@]}" "$@" >"$state/plan" || exit 2; }
make_plan "$@"

if [[ $dry_run ]]; then
    printf 'export WANDB_TAGS=%q XLA_FLAGS=%q\n' "$WANDB_TAGS" "$XLA_FLAGS"
    awk -F '\t' '{ print ($2 == "finished" ? "# finished: " : "") $5 }' "$state/plan"
    exit
fi

mkdir -p runs/logs 2>/dev/null || die "runs/logs: cannot be made here"
exec 9>runs/logs/.lock # held until the last run ends, even if this shell is killed
flock -n 9 || { echo "waiting for the runs of another sweep in this directory" && flock 9 && make_plan "$@"; }

# ---------------------------------------------------------------------------------------------------------------------
# Run

run_one() { # LINE of the plan: train, on the core of this worker's slot
    local name leftover command core pin='' code=0 end='done'
    IFS=$'\t' read -r name _ leftover _ command <<<"$1"
    [[ -e $state/stop ]] || ! kill -0 "$main" 2>/dev/null && return
    [[ $leftover == - ]] || rm -rf "runs/$leftover"
    read -ra core <<<"$cores"
    ((${#core[@]})) && pin="taskset -c ${core[slot % ${#core[@]}]}"
    $pin bash -c "exec $command" >"runs/logs/$name.log" 2>&1 </dev/null 9>&- &
    echo $! >"$state/$name.running"
    [[ -e $state/stop ]] && kill -TERM $! # it came in between
    wait $! || code=$?
    ((code == 0)) || end=failed
    ((code == 0)) || [[ ! -e $state/stop ]] || end=stopped
    mv "$state/$name.running" "$state/$name.$end"
    echo "$end: $name: $(tail -n 1 "runs/logs/$name.log")"
    progress
}

count() { # END: how many runs of this sweep ended so, or are running
    find "$state" -name "*.$1" | wc -l
}

progress() { # the time left supposes that all tasks are equally fast
    local ran=("$state"/*.done "$state"/*.running) logs=() file todo steps left='time left unknown'
    for file in "${ran[@]}"; do [[ -e $file ]] && file=${file##*/} && logs+=("runs/logs/${file%.*}.log"); done
    todo=$(((num_todo - $(count failed)) * steps_each))
    steps=$(awk '$1 == "step" { gsub(",", "", $2); last[FILENAME] = $2 }
        END { for (name in last) sum += last[name]; print sum + 0 }' /dev/null "${logs[@]}")
    ((steps == 0)) || left="about $((((todo - steps) * ($(date +%s) - start) / steps + 59) / 60)) min left"
    echo "$(count "done") done, $(count running) running, $(count failed) failed of $num_todo, $left"
}
export -f run_one count progress

awk -F '\t' '$2 == "todo"' "$state/plan" >"$state/todo"
num_runs=$(wc -l <"$state/plan") num_todo=$(wc -l <"$state/todo")
steps_each=$(head -n 1 "$state/plan" | cut -f 4) # the same for all: the flags are
cores=$(command -v taskset >/dev/null && "$PYTHON" -c 'import os; print(*sorted(os.sched_getaffinity(0)))' || true)
start=$(date +%s) main=$$
export num_todo steps_each cores start main
echo "$num_runs runs, $((num_runs - num_todo)) of them finished already; $workers at once"

stop() { # SIGNAL STATUS: no new run starts, those that run save what they have and end; twice ends them at once
    stopped=$2
    touch "$state/stop"
    echo "$1: waiting for the runs to end"
    cat "$state"/*.running 2>/dev/null | xargs -r kill -TERM 2>/dev/null || true
}
stopped=
trap 'stop SIGHUP 129' HUP
trap 'stop SIGINT 130' INT
trap 'stop SIGTERM 143' TERM

set -m # jobs get process groups of their own, so that Ctrl-C reaches only this shell, which passes it on
tr '\n' '\0' <"$state/todo" | xargs -0 -r -n 1 -P "$workers" --process-slot-var=slot bash -c 'run_one "$1"' run_one &
job=$!
while sleep 60 && kill -0 $job 2>/dev/null; do progress; done 9>&- &
ticker=$!
while kill -0 $job 2>/dev/null; do wait $job || true; done
{ kill -- -$ticker && wait $ticker; } 2>/dev/null || true
set +m

[[ -z $stopped ]] || { echo "stopped; the same command goes on"; exit "$stopped"; }
for file in "$state"/*.failed; do
    [[ -e $file ]] && name=$(basename "$file" .failed) && echo "failed: $name: see runs/logs/$name.log" >&2
done
lost=$((num_todo - $(count "done") - $(count failed)))
((lost == 0)) || echo "$lost runs not finished, since a worker was killed; the same command goes on" >&2
(($(count failed) + lost == 0)) || exit 1
echo "all runs are finished; next: $PYTHON $root/benchmark/report.py"
