"""The sweep, the report and the speed table. Most sweeps here are of a stand-in for the training script, for speed."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmark"))

import report  # noqa: E402
import speed  # noqa: E402

from runs import TINY  # noqa: E402

SCRIPT = "ppo_continuous_action_envpool_xla_jax_scan.py"

# Fails-v4 fails, Waits-v4 waits for a file named `go` or a signal, and all leave what the training script leaves.
STAND_IN = """
import dataclasses, json, os, pathlib, signal, sys, time, tyro
@dataclasses.dataclass(frozen=True)
class Args:
    env_id: str = "Hopper-v4"
    exp_name: str = "stand_in"
    seed: int = 1
    num_threads: int = 0
    total_timesteps: int = 100
def main():
    args, received = tyro.cli(Args), []
    if args.env_id == "Fails-v4":
        print("error: this one fails")
        return 1
    signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    run = pathlib.Path("runs", f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns()}")
    run.mkdir(parents=True)
    print(run.name, flush=True)
    patience = time.time() + 60
    while args.env_id == "Waits-v4" and not pathlib.Path("go").exists() and not received and time.time() < patience:
        time.sleep(0.02)
    print(f"step {args.total_timesteps:,}  return 1.0")
    summary = {"status": "stopped" if received else "finished", "args": dataclasses.asdict(args)}
    summary |= {"cores": list(os.sched_getaffinity(0)), "XLA_FLAGS": os.environ["XLA_FLAGS"], "tags": os.environ["WANDB_TAGS"]}
    (run / "summary.json").write_text(json.dumps(summary))
    return 143 if received else 0
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.fixture
def stand_in(tmp_path):
    """The sweep beside a stand-in for the training script, and an empty folder to run it in."""
    (tmp_path / "code").mkdir()
    (tmp_path / "cwd").mkdir()
    shutil.copy(ROOT / "benchmark.sh", tmp_path / "code")
    (tmp_path / "code" / SCRIPT).write_text(STAND_IN)
    return tmp_path / "code" / "benchmark.sh", tmp_path / "cwd"


def start(sweep, cwd, *flags, **env):
    env = {key: value for key, value in os.environ.items() if key not in ("WANDB_TAGS", "XLA_FLAGS")} | env
    env |= {"PYTHON": sys.executable, "COLUMNS": "200"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = ["env", "--default-signal=INT", "bash", str(sweep), *flags]  # even where pytest runs in the background
    return subprocess.Popen(command, cwd=cwd, env=env, start_new_session=True, **pipes)


def run(sweep, cwd, *flags, **env):
    """(exit status, standard output, standard error) of a sweep."""
    process = start(sweep, cwd, *flags, **env)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def summaries(cwd):
    return [json.loads(path.read_text()) for path in sorted(cwd.glob("runs/*/summary.json"))]


def directories(cwd):
    return sorted(path.name for path in cwd.glob("runs/*__*"))


def wait_for(condition):
    deadline = time.time() + 30
    while not condition():
        assert time.time() < deadline, "waited in vain"
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------------------------------------
# benchmark.sh


def test_help_names_every_option():
    status, out, err = run(ROOT / "benchmark.sh", "/", "--help")
    assert (status, err) == (0, "")
    for option in ("--env-ids", "--num-seeds", "--start-seed", "--workers", "--dry-run", "--help", "PYTHON", "WANDB_TAGS"):
        assert option in out


def test_dry_run_prints_eleven_tasks_times_three_seeds_and_writes_nothing(tmp_path):
    status, out, err = run(ROOT / "benchmark.sh", tmp_path, "--dry-run")
    commands = [line for line in out.splitlines() if SCRIPT in line]
    assert (status, err, len(commands), len(set(commands))) == (0, "", 33, 33)
    assert commands[0].endswith("--env-id Ant-v4 --seed 1 --num-threads 1")
    assert commands[-1].endswith("--env-id Walker2d-v4 --seed 3 --num-threads 1")
    assert list(tmp_path.iterdir()) == []


def test_options_choose_tasks_seeds_and_flags_of_the_script(stand_in):
    flags = ["--env-ids", "A-v4", "B-v4", "--num-seeds=2", "--start-seed", "5", "--dry-run", "--", "--total-timesteps", "7"]
    _, out, _ = run(*stand_in, *flags)
    tails = [line.partition("--env-id ")[2] for line in out.splitlines() if SCRIPT in line]
    one_core = "--num-threads 1 --total-timesteps 7"
    assert tails == [f"{task} --seed {seed} {one_core}" for seed in (5, 6) for task in ("A-v4", "B-v4")]


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--episodes", "3"], "--episodes: no such option"),
        (["Hopper-v4"], "Hopper-v4: no such option"),
        (["--workers", "0"], "--workers 0: must be a whole number, at least 1"),
        (["--num-seeds", "two"], "--num-seeds two: must be"),
        (["--start-seed"], "--start-seed: needs a value"),
        (["--env-ids", "--dry-run"], "--env-ids: needs a value"),
        (["--", "--seed", "3"], "--seed: give"),
        (["--", "--env-id=Hopper-v5"], "--env-id"),
    ],
)
def test_bad_options_end_with_one_line_and_status_2(stand_in, flags, words):
    status, out, err = run(*stand_in, *flags)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("benchmark.sh: ") and words in err
    assert list(stand_in[1].iterdir()) == []


def test_flags_that_the_script_refuses_are_refused_before_any_run(tmp_path):
    status, _, err = run(ROOT / "benchmark.sh", tmp_path, "--", "--num-envs", "0")
    assert status == 2 and "num_envs=0: must be at least 1" in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_failed_run_is_named_with_its_log_and_the_others_finish(stand_in):
    status, out, err = run(*stand_in, "--env-ids", "A-v4", "Fails-v4", "B-v4", "--num-seeds", "1", "--workers", "1")
    assert status == 1
    assert [summary["args"]["env_id"] for summary in summaries(stand_in[1])] == ["A-v4", "B-v4"]
    (log,) = stand_in[1].glob("runs/logs/Fails-v4__1__*.log")
    assert err.splitlines() == [f"failed: {log.stem}: see runs/logs/{log.name}"]
    assert log.read_text() == "error: this one fails\n"
    assert "2 done, 0 running, 1 failed of 3" in out


def test_each_run_is_confined_to_one_core_and_tagged(stand_in):
    (stand_in[1] / "go").touch()
    flags = ["--env-ids", "A-v4", "B-v4", "--num-seeds", "2", "--workers", "2"]
    assert run(*stand_in, *flags, WANDB_TAGS="mine", XLA_FLAGS="--xla_dump_to=x")[0] == 0
    made = summaries(stand_in[1])
    assert len(made) == 4 and all(len(summary["cores"]) == 1 for summary in made)
    assert {summary["XLA_FLAGS"].split()[0] for summary in made} == {"--xla_dump_to=x"}
    assert all("intra_op_parallelism_threads=1" in summary["XLA_FLAGS"] for summary in made)
    assert {summary["tags"] for summary in made} == {"mine"}  # the stand-in lies in no repository


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_workers_have_different_cores(stand_in):
    sweep = start(*stand_in, "--env-ids", "Waits-v4", "--num-seeds", "2", "--workers", "2")
    wait_for(lambda: len(directories(stand_in[1])) == 2)
    (stand_in[1] / "go").touch()
    sweep.communicate(timeout=60)
    first, second = summaries(stand_in[1])
    assert first["cores"] != second["cores"]


def test_finished_runs_are_skipped_until_an_argument_changes(stand_in):
    flags = ["--env-ids", "A-v4", "--num-seeds", "2"]
    status, out, err = run(*stand_in, *flags)
    first = directories(stand_in[1])
    assert (status, len(first)) == (0, 2), out + err
    status, out, err = run(*stand_in, *flags)
    assert (status, directories(stand_in[1])) == (0, first) and "2 of them finished already" in out, out + err
    assert run(*stand_in, *flags, "--dry-run")[1].count("# finished: ") == 2
    run(*stand_in, *flags, "--", "--total-timesteps", "200")
    assert len(directories(stand_in[1])) == 4 and set(first) < set(directories(stand_in[1]))


def test_a_changed_default_of_the_script_is_a_changed_argument(stand_in):
    flags = ["--env-ids", "A-v4", "--num-seeds", "1"]
    run(*stand_in, *flags)
    script = stand_in[0].parent / SCRIPT
    script.write_text(script.read_text().replace("total_timesteps: int = 100", "total_timesteps: int = 101"))
    run(*stand_in, *flags)
    assert [summary["args"]["total_timesteps"] for summary in summaries(stand_in[1])] == [100, 101]


def test_after_ctrl_c_the_same_command_goes_on_without_duplicates(stand_in):
    flags = ["--env-ids", "A-v4", "Waits-v4", "--num-seeds", "2", "--workers", "1"]
    sweep = start(*stand_in, *flags)
    wait_for(lambda: any(name.startswith("Waits") for name in directories(stand_in[1])))
    os.killpg(sweep.pid, signal.SIGINT)  # what a terminal does
    out, err = sweep.communicate(timeout=60)
    assert (sweep.returncode, err) == (130, "") and "stopped: Waits-v4__1__" in out
    assert [summary["status"] for summary in summaries(stand_in[1])] == ["finished", "stopped"]
    finished = directories(stand_in[1])[0]

    (stand_in[1] / "go").touch()
    assert run(*stand_in, *flags)[0] == 0
    made = [(summary["args"]["env_id"], summary["args"]["seed"], summary["status"]) for summary in summaries(stand_in[1])]
    assert made == [(task, seed, "finished") for task in ("A-v4", "Waits-v4") for seed in (1, 2)]
    assert len(directories(stand_in[1])) == 4 and finished in directories(stand_in[1])


def test_runs_whose_worker_is_killed_do_not_count_as_finished(stand_in):
    sweep = start(*stand_in, "--env-ids", "Waits-v4", "--num-seeds", "2", "--workers", "1")
    wait_for(lambda: directories(stand_in[1]))
    subprocess.run(["pkill", "-KILL", "-s", str(sweep.pid), "-f", "^bash -c run_one"], check=True)
    _, err = sweep.communicate(timeout=60)
    (stand_in[1] / "go").touch()  # for the run that lost its worker
    assert sweep.returncode == 1 and "2 runs not finished, since a worker was killed" in err


def test_a_killed_sweep_leaves_no_duplicate_either(stand_in):
    flags = ["--env-ids", "Waits-v4", "--num-seeds", "2", "--workers", "1"]
    killed = start(*stand_in, *flags)
    wait_for(lambda: directories(stand_in[1]))
    killed.kill()  # its first run goes on
    killed.wait()
    again = start(*stand_in, *flags)
    assert "waiting for the runs of another sweep" in again.stdout.readline()
    (stand_in[1] / "go").touch()
    out, _ = again.communicate(timeout=60)
    assert again.returncode == 0 and "2 runs, 1 of them finished already" in out
    assert (
        [summary["status"] for summary in summaries(stand_in[1])]
        == ["finished"] * 2
        == ["finished"] * len(directories(stand_in[1]))
    )


# ---------------------------------------------------------------------------------------------------------------------
# The real script through the sweep, tracked offline, and the report of it


def read_wandb(path):
    """The records of an offline run: LevelDB's log format after a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, position, record, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # no room for a header at the end of a block
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(wandb_internal_pb2.Record.FromString(record))
            record = b""
    return records


def test_a_tracked_sweep_gives_openrlbenchmark_and_the_report_what_they_read(tmp_path):
    flags = ["--env-ids", "InvertedPendulum-v4", "--num-seeds", "1", "--", "--track", *TINY]
    env = {"WANDB_MODE": "offline", "WANDB_TAGS": "mine"}
    status, out, err = run(ROOT / "benchmark.sh", tmp_path, *flags, **env)
    assert (status, err) == (0, ""), out
    (summary,) = summaries(tmp_path)
    assert summary["status"] == "finished" and summary["args"]["num_threads"] == 1

    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = read_wandb(path)
    (tracked,) = [record.run for record in records if record.HasField("run")]
    config = {item.key: json.loads(item.value_json) for item in tracked.config.update}
    assert (config["env_id"], config["seed"], config["exp_name"]) == ("InvertedPendulum-v4", 1, SCRIPT.removesuffix(".py"))
    described = subprocess.run(
        ["git", "-C", ROOT, "describe", "--tags", "--always", "--dirty"], capture_output=True, text=True
    )
    assert list(tracked.tags) == ["mine", *described.stdout.split()]
    history = [
        {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    rows = [row for row in history if "charts/episodic_return" in row]
    assert rows and all("global_step" in row and "_runtime" in row for row in rows)
    assert [row["global_step"] for row in history] == list(range(64, 513, 64))

    assert report.main(["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]) == 0
    assert "| InvertedPendulum-v4 | 1 |" in (tmp_path / "results" / "README.md").read_text()
    (run_made,) = report.load_runs(tmp_path / "results" / "curves")
    assert run_made.score() == pytest.approx(summary["mean_return"], rel=0.05)


# ---------------------------------------------------------------------------------------------------------------------
# report.py


def write_events(directory, rows):
    """Rows of (step, number of episodes, their mean return or None) as the script logs them, one event a row."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(directory))
    for step, count, mean in rows:
        tags = {"charts/num_episodes": count} | ({} if mean is None else {"charts/episodic_return": mean})
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
        writer.add_event(Event(wall_time=1.0, step=step, summary=Summary(value=values)))
    writer.close()


def make_run(cwd, rows, env_id="Hopper-v4", seed=1, status="finished", time=1000, total_timesteps=1_000_000, **args):
    directory = cwd / "runs" / f"{env_id}__ppo__{seed}__{time}"
    directory.mkdir(parents=True)
    write_events(directory, rows)
    args |= {"env_id": env_id, "seed": seed, "exp_name": "ppo", "total_timesteps": total_timesteps, "track": False}
    summary = {"status": status, "args": args, "commit": "abcdef0123456789", "versions": {"jax": "1.2"}, "machine": "a box"}
    summary |= {"command": f"/home/me/{SCRIPT} --env-id {env_id} --seed {seed} --anneal-lr", "wall_time": 90.0, "SPS": 1234.4}
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def make_report(cwd):
    """The exit status of the report of what lies below `cwd`, and its README."""
    status = report.main(["--runs", str(cwd / "runs"), "--results", str(cwd / "results")])
    readme = cwd / "results" / "README.md"
    return status, readme.read_text() if readme.exists() else ""


def last_100(rows):
    return report.make_curve({step: (count, np.nan if mean is None else mean) for step, count, mean in rows})[:, 2].tolist()


def test_the_last_100_episodes_count_each_once():
    assert last_100([(1, 50, 0), (2, 50, 10), (3, 50, 20), (4, 50, 40)]) == [0, 5, 15, 30]


def test_iterations_weigh_as_many_episodes_as_ended_in_them():
    assert last_100([(1, 10, 0), (2, 30, 8)]) == [0, 6]  # fewer than 100: all of them
    assert last_100([(1, 80, 10), (2, 60, 20)]) == pytest.approx([10, 16])  # 40 of the 80
    assert last_100([(1, 300, 5), (2, 0, None), (3, 1, 105)]) == pytest.approx([5, 5, 6])


def test_a_curve_begins_with_the_first_finished_episode_and_keeps_300_points():
    rows = [(step, int(step > 100), float(step)) for step in range(1, 6001)]
    curve = report.make_curve({step: (count, mean) for step, count, mean in rows})
    assert 290 < len(curve) <= 300 and curve[0, 0] > 100 and curve[-1].tolist() == [6000, 5990.5, 5950.5]


def test_of_a_step_logged_twice_the_last_counts(tmp_path):
    write_events(tmp_path, [(64, 1, 1.0), (128, 2, 7.0), (192, 3, 9.0)])
    assert report.read_events(tmp_path) == {64: (1, 1), 128: (2, 7), 192: (3, 9)}
    time.sleep(1.1)  # a new file's name holds the second
    write_events(tmp_path, [(128, 1, 5.0), (192, 0, None)])
    steps = report.read_events(tmp_path)
    assert (steps[64], steps[128]) == ((1, 1), (1, 5)) and steps[192][0] == 0 and np.isnan(steps[192][1])


def test_the_table_holds_mean_and_deviation_over_seeds_and_the_best_point(tmp_path):
    make_run(tmp_path, [(500_000, 100, 300), (999_424, 100, 100)], seed=1)
    make_run(tmp_path, [(500_000, 100, 500), (999_424, 100, 200)], seed=2)
    make_run(tmp_path, [(999_424, 100, 9999)], seed=3, status="stopped")
    status, readme = make_report(tmp_path)
    (row,) = [line for line in readme.splitlines() if line.startswith("| Hopper-v4")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert status == 0
    assert cells[:6] == ["Hopper-v4", "2", "150 ± 50", "400 ± 100 at 0.50M", "1.5", "1,234"]  # no 3M: no such column
    assert cells[6:] == ["2298", "2462 ± 428", "3128 ± 413", "2535 ± 647", "2741 ± 269"]
    assert "abcdef0123;" not in readme and "abcdef0123" in readme and "a box" in readme and "jax 1.2" in readme
    assert f"`python {SCRIPT} --anneal-lr`" in readme and "/home/me" not in readme
    assert (tmp_path / "results" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_git_needs_to_keep_the_curves_only(tmp_path):
    make_run(tmp_path, [(1000, 100, 5), (2000, 100, 7)])
    _, readme = make_report(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "results" / "README.md").unlink()
    assert make_report(tmp_path) == (0, readme)
    (curve,) = (tmp_path / "results" / "curves").iterdir()
    assert curve.read_text().splitlines()[1:] == ["global_step,charts/episodic_return,last_100_return", "1000,5,5", "2000,7,7"]


def test_a_run_made_again_replaces_the_older_one(tmp_path):
    make_run(tmp_path, [(1000, 100, 5)], time=1000, num_threads=1)
    make_run(tmp_path, [(1000, 100, 7)], time=1001, num_threads=2)
    make_report(tmp_path)
    (run_made,) = report.load_runs(tmp_path / "results" / "curves")
    assert run_made.score() == 7


def test_runs_of_different_settings_are_never_averaged(tmp_path):
    make_run(tmp_path, [(1000, 100, 5)], time=1000, gamma=0.9)
    make_run(tmp_path, [(1000, 100, 7)], time=1001, gamma=0.8)
    make_run(tmp_path, [(1000, 100, 7)], time=1002, gamma=0.9, seed=2)
    named = report.name_settings(report.load_runs(tmp_path / "results" / "curves") if make_report(tmp_path) else [])
    assert {name: len(runs) for name, runs in named.items()} == {
        "1,000,000 steps, gamma=0.9": 2,
        "1,000,000 steps, gamma=0.8": 1,
    }


def test_a_score_at_a_step_needs_a_run_that_reached_it():
    curve = np.array([[990_000, 0, 3], [1_000_000, 0, 4], [1_010_000, 0, 5], [2_998_272, 0, 6]])
    run_made = report.Run({}, curve)
    assert (run_made.score(1_000_000), run_made.score(3_000_000), run_made.score()) == (4, 6, 6)
    assert np.isnan(report.Run({}, curve[:3]).score(3_000_000)) and np.isnan(report.Run({}, curve[3:]).score(1_000_000))


def test_a_run_without_a_finished_episode_is_left_out(tmp_path, capsys):
    make_run(tmp_path, [(64, 0, None)])
    assert make_report(tmp_path)[0] == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "no episode ended" in lines[0] and "no finished run" in lines[1]


def test_normalized_scores_are_0_for_chance_and_1_for_the_pull_request():
    def made(score, env_id="Hopper-v4"):
        return report.Run({"args": {"env_id": env_id}}, np.array([[1, 0, score]]))

    scores = report.normalized_scores([made(18), made(2462), made(1240), made(5, "Unknown-v1")], {"Hopper-v4": 18.0})
    assert scores.tolist() == [0, 1, 0.5]


def test_the_interquartile_mean_leaves_out_the_extremes():
    middle, low, high = report.interquartile_mean(np.array([-100.0, 1.0, 2.0, 3.0, 2.0, 3.0, 2.0, 1000.0]))
    assert middle == 2.25 and -100 < low < 2.25 < high < 1000
    assert report.interquartile_mean(np.array([0.7]))[0] == 0.7


def test_published_scores_and_random_scores_cover_the_tasks():
    assert {len(scores) for scores in report.PUBLISHED.values()} == {len(report.TASKS)} == {11}
    assert report.published("PR 355, 3M", "Swimmer-v4") == (45, 10) and report.published("PR 355, 1M", "Reacher-v4") == (-8.4,)
    assert (
        report.published("tianshou best, 3M", "Pusher-v4") is None and report.published("PR 355, 3M", "CheetahRun-v1") is None
    )
    random = report.load_random_policy(ROOT / "benchmark" / "results" / "random_policy.json")
    assert set(random) == {f"{task}-v4" for task in report.TASKS}
    assert all(random[env_id] < report.published("PR 355, 3M", env_id)[0] for env_id in random)


def test_random_scores_are_of_whole_episodes_equally_many_of_each_environment():
    returns = report.returns_of_random_policy("InvertedPendulum-v4", num_envs=4, episodes_each=5)
    assert len(returns) == 20 and all(score >= 1 and score == int(score) for score in returns)
    assert 3 < np.mean(returns) < 12  # a reward a step until the pole falls


@pytest.mark.parametrize("flags, words", [(["--runs", "/nowhere"], "no finished run"), (["--foo"], "--foo")])
def test_bad_input_of_the_report_is_one_line_and_status_2(tmp_path, flags, words):
    command = [sys.executable, ROOT / "benchmark" / "report.py", "--results", tmp_path, *flags]
    process = subprocess.run(command, capture_output=True, text=True)
    assert (process.returncode, len(process.stderr.splitlines())) == (2, 1) and words in process.stderr


@pytest.mark.parametrize("broken", ["{", "{}", "[]", "1"])
def test_a_broken_summary_is_named_and_does_not_keep_a_sweep_from_its_plan(broken, tmp_path, capsys):
    (make_run(tmp_path, [(1000, 100, 5)]) / "summary.json").write_text(broken)
    assert make_report(tmp_path)[0] == 2
    assert "summary.json: not a run's summary" in capsys.readouterr().err
    assert run(ROOT / "benchmark.sh", tmp_path, "--dry-run")[0] == 0


def test_broken_scores_of_a_random_policy_are_named(tmp_path):
    (tmp_path / "scores.json").write_text("[]")
    with pytest.raises(report.BadInput, match="not scores of a random policy"):
        report.load_random_policy(tmp_path / "scores.json")


# ---------------------------------------------------------------------------------------------------------------------
# speed.py


def test_the_speed_table_holds_medians_and_their_ratios_to_this_script():
    results = {("raw EnvPool", "A"): [10, 30, 20], ("this script", "A"): [10, 10, 100], ("SBX", "A"): []}
    table = speed.make_table(results, ["A"], ["raw EnvPool", "this script", "SBX"])
    assert table[2:] == ["| raw EnvPool | 20 (2) |", "| this script | 10 (1) |", "| SBX | - |"]


def test_a_rate_leaves_out_the_first_batch():
    durations = iter([0.5, 0.05, 0.05, 0.05])
    rate = speed.steps_per_second(lambda: time.sleep(next(durations)), 0.12)
    assert 0.6 * speed.BATCH_SIZE / 0.05 < rate <= speed.BATCH_SIZE / 0.05


def test_a_measurement_runs_in_a_process_of_its_own(capfd):
    command = ["--env-ids", "Hopper-v4", "--repeats", "1", "--seconds", "0.1", "--contenders"]
    assert speed.main([*command, "raw EnvPool"]) == 0
    (row,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("| raw EnvPool")]
    assert int(row.strip("| ").split()[-1].replace(",", "")) > 500


def test_a_contender_that_fails_gets_a_dash_and_a_line(capfd):
    assert speed.main(["--env-ids", "Nope-v4", "--repeats", "1", "--seconds", "0.1", "--contenders", "raw EnvPool"]) == 1
    captured = capfd.readouterr()
    assert "| raw EnvPool | - |" in captured.out and "raw EnvPool, Nope-v4: " in captured.err


@pytest.mark.parametrize("flags", [["--repeats", "0"], ["--seconds", "nan"], ["--contenders", "Dopamine"]])
def test_bad_input_of_the_speed_table_is_one_line_and_status_2(capsys, flags):
    with pytest.raises(SystemExit) as exit:
        speed.main(flags)
    assert exit.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_a_walk_of_tasks_tells_which_train_which_are_refused_and_why_the_others_fail(tmp_path):
    command = [sys.executable, str(ROOT / "benchmark" / "tasks.py"), "--results", str(tmp_path / "tasks.csv"), "--env-ids"]
    for env_id in ("Pendulum-v1", "CartPole-v1"):  # the second run adds to the first one's
        ended = subprocess.run([*command, env_id], capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "| classic_control | 2 | 1 | 1 | 1: no vector of bounded continuous actions |"
    rows = (tmp_path / "tasks.csv").read_text().splitlines()
    assert rows[0] == "env_id,suite,outcome,detail" and rows[2] == "Pendulum-v1,classic_control,trains,finished"
    for fault, detail in (("os._exit(3)", "its process ended with 3: nothing said"), ("time.sleep(60)", "killed after 2 s")):
        code = f"import os, tasks, time; tasks.ppo.train = lambda _: {fault}; print(list(tasks.walk(['x'], 1, 2)))"
        ended = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT / "benchmark", capture_output=True, text=True, timeout=60
        )
        assert detail in ended.stdout, ended.stderr


def test_the_readmes_table_of_tasks_is_that_of_the_walk():
    code = "import csv, tasks; print(tasks.table(list(csv.DictReader(open('results/tasks.csv')))))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "benchmark", capture_output=True, text=True, check=True)
    assert ended.stdout in (ROOT / "README.md").read_text()
