"""Train every task that EnvPool offers for two iterations and an evaluation, each in a process of its own.

    python benchmark/tasks.py                    try those that benchmark/results/tasks.csv lacks, and print the table
    python benchmark/tasks.py --env-ids Hopper-v4 CheetahRun-v1     try these again

A task trains, or is refused with the script's one line, or fails, as when its simulator ends the process. Four
environments, one thread, and little optimization by XLA, which compiles much faster so. It can be stopped and started
again; all of it takes an hour on two cores.
"""

import argparse
import collections
import csv
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import envpool  # noqa: E402
import jax  # noqa: E402
from envpool.registration import registry  # noqa: E402

import ppo_continuous_action_envpool_xla_jax_scan as ppo  # noqa: E402

COLUMNS = ("env_id", "suite", "outcome", "detail")
SETTINGS = dict(num_envs=4, num_threads=1, num_minibatches=2, total_timesteps=2 * 4 * 32, eval_episodes=1)
OUT_OF_SCOPE = {
    "its actions are": "no vector of bounded continuous actions",
    "it observes": "no vector, matrix or flat dict of them to observe",
    "cannot make it here": "EnvPool lacks a library (Qt 5) or a scenario",
}


def attempt(env_id: str, folder: str) -> None:
    """Train in `folder`, in a forked process, and leave there what became of it."""
    os.chdir(folder)
    log = os.open("log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1), os.dup2(log, 2)
    try:
        outcome, detail = "trains", ppo.train(ppo.Args(env_id=env_id, **SETTINGS))["status"]
        assert detail == "finished", detail
    except ppo.BadInput as error:
        outcome, detail = "refused", str(error)
    except Exception as error:
        outcome, detail = "fails", f"{type(error).__name__}: {ppo.first_line(error)}"
    detail = detail.replace(os.path.dirname(envpool.__file__), "envpool")  # no paths of this machine
    pathlib.Path("outcome").write_text(f"{outcome}\n{detail}")


def outcome_of(process, folder: str) -> tuple[str, str]:
    try:
        return tuple(pathlib.Path(folder, "outcome").read_text().split("\n", 1))
    except OSError:
        last_words = pathlib.Path(folder, "log").read_text(errors="replace").strip().splitlines()[-1:] or ["nothing said"]
        return "fails", f"its process ended with {process.exitcode}: {last_words[0]}"


def walk(env_ids: list[str], workers: int, limit: float):
    """Yield id, outcome and detail of each task as it ends; one that takes longer than `limit` seconds is killed."""
    fork, todo, running = multiprocessing.get_context("fork"), collections.deque(env_ids), {}
    while todo or running:
        while todo and len(running) < workers:
            env_id, folder = todo.popleft(), tempfile.TemporaryDirectory()
            process = fork.Process(target=attempt, args=(env_id, folder.name))
            process.start()
            running[env_id] = process, folder, time.time()
        time.sleep(0.05)
        for env_id, (process, folder, start) in list(running.items()):
            if process.is_alive() and time.time() - start < limit:
                continue
            late = process.is_alive()
            process.kill()
            process.join()
            yield env_id, *(("fails", f"killed after {limit:.0f} s") if late else outcome_of(process, folder.name))
            folder.cleanup()
            del running[env_id]


def suite_of(env_id: str) -> str:
    return registry.specs[env_id][0].removeprefix("envpool.").removeprefix("mujoco.")


def table(rows: list[dict[str, str]]) -> str:
    """Counts by suite, in Markdown."""
    lines = ["| suite | ids | in scope | train | the others |", "|-|-|-|-|-|"]
    for suite in sorted({row["suite"] for row in rows}):
        ours, reasons = [row for row in rows if row["suite"] == suite], collections.Counter()
        for row in ours:
            if row["outcome"] != "trains":
                known = [reason for words, reason in OUT_OF_SCOPE.items() if words in row["detail"]]
                reasons[known[0] if known else row["detail"]] += 1
        scope = len(ours) - sum(reasons[reason] for reason in OUT_OF_SCOPE.values())
        trains = sum(row["outcome"] == "trains" for row in ours)
        others = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common())
        lines.append(f"| {suite} | {len(ours)} | {scope} | {trains} | {others} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", default=ROOT / "benchmark" / "results" / "tasks.csv", type=pathlib.Path)
    parser.add_argument("--env-ids", nargs="+", default=None, help="the tasks to try again (default: all that lack a result)")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--limit", type=float, default=300, help="seconds for one task")
    args = parser.parse_args()
    if args.workers < 1:
        parser.error(f"--workers {args.workers}: must be at least 1")
    if unknown := set(args.env_ids or ()) - set(envpool.list_all_envs()):
        parser.error(f"--env-ids {' '.join(sorted(unknown))}: EnvPool has no such task")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # read when a child first compiles
    compiled = tempfile.TemporaryDirectory()  # of tasks of the same sizes, and of those with two names
    jax.config.update("jax_compilation_cache_dir", compiled.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    found = {}
    if args.results.exists():
        with open(args.results, newline="") as file:
            found = {row["env_id"]: row for row in csv.DictReader(file)}
    env_ids = args.env_ids or [env_id for env_id in envpool.list_all_envs() if env_id not in found]
    for number, (env_id, outcome, detail) in enumerate(walk(env_ids, args.workers, args.limit), 1):
        found[env_id] = dict(zip(COLUMNS, (env_id, suite_of(env_id), outcome, detail), strict=True))
        print(f"{number}/{len(env_ids)} {env_id}: {outcome}" + (f", {detail}" if outcome != "trains" else ""), file=sys.stderr)
        partial = args.results.with_suffix(".tmp")
        with open(partial, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(found[key] for key in sorted(found))
        partial.replace(args.results)
    print(table(list(found.values())))
    return int(any(row["outcome"] == "fails" for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
