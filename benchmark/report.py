"""Make `benchmark/results/` from finished runs: learning curves as CSV, a picture of them and a README with the table.

    python benchmark/report.py                     read ./runs, add to the curves that are there, write table and picture
    python benchmark/report.py --random-policy     measure the scores of uniform actions (needs EnvPool; two minutes)

The table and the picture come from the CSV files alone, so what git keeps is enough to make them again. The sections
"Notes" and "Speed" of the README are `notes.md` and `speed.md` beside it, where they exist.
"""

import argparse
import collections
import csv
import dataclasses
import json
import os
import pathlib
import shlex
import sys

import matplotlib
import numpy as np
import scipy.stats

matplotlib.use("agg")
import matplotlib.pyplot as plt

POINTS = 300  # of a curve
EPISODES = 100  # in the mean that the table reports
COLUMNS = ("global_step", "charts/episodic_return", "last_100_return")
NOT_TRAINING = {  # arguments that tell apart, name or watch runs, but do not change what they learn
    *("env_id", "seed", "num_threads", "track", "wandb_project_name", "wandb_entity"),
    *("save_model", "checkpoint_frequency", "resume", "evaluate", "capture_video"),
    *("eval_frequency", "eval_episodes", "eval_deterministic"),
}
TASKS = (
    *("Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum"),
    *("InvertedPendulum", "Pusher", "Reacher", "Swimmer", "Walker2d"),
)

# Published scores, mean and deviation over seeds, in the order of TASKS.
PUBLISHED = {
    # 1M steps, a mean without its deviation
    "PR 355, 1M": ((2965,), (5548,), (2298,), (503,), (109516,), (7591,), (967,), (-56,), (-8.4,), (28,), (2981,)),
    "PR 355, 3M": (
        *((3511, 712), (6685, 1216), (2462, 428), (611, 51), (119290, 21005), (6129, 2029)),
        *((843, 308), (-40, 14), (-6.7, 1.8), (45, 10), (3632, 931)),
    ),
    "tianshou best, 3M": (
        *((4079, 880), (7337, 1508), (3128, 413), (1360, 573), None, (9231, 270)),
        *((1000, 0), None, (-3.7, 0.3), (81, 96), (4896, 704)),
    ),
    "tianshou last, 3M": (
        *((3877, 878), (7242, 1467), (2535, 647), (1347, 454), None, (6471, 1531)),
        *((935, 152), None, (-4.5, 0.3), (81, 96), (4564, 615)),
    ),
    "CleanRL PPO, 8M": (
        *((1824, 906), (2637, 1068), (2741, 269), (583, 28), (109326, 16162), (5626, 289)),
        *((889, 35), (-30, 6), (-4.7, 1.0), (125, 22), (2873, 691)),
    ),
}
SOURCES = """\
Published: PR 355 is CleanRL's pull request 355 (v4 tasks; its 1M figures are probably points of 3M runs, while a run of
1M steps here has annealed its learning rate to zero by then). tianshou is its MuJoCo benchmark (10 seeds; v3 tasks, v2 of
Reacher and the pendulums; best is the best point of the seed mean, last the last one, of the same runs). CleanRL PPO is
its `ppo_continuous_action.py` (v4). A - is a figure that does not exist."""


class BadInput(ValueError):
    """What the user asked for cannot be done, in one line."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run: its summary and its curve, both as the CSV file holds them."""

    summary: dict
    curve: np.ndarray  # [points, 3], as COLUMNS

    @property
    def env_id(self) -> str:
        return self.summary["args"]["env_id"]

    @property
    def seed(self) -> int:
        return self.summary["args"]["seed"]

    @property
    def settings(self) -> dict:
        """What the run was told about learning, task and seed apart."""
        return {name: value for name, value in self.summary["args"].items() if name not in NOT_TRAINING}

    def score(self, step: int | None = None) -> float:
        """Mean return of the last 100 episodes at a step, by default the last one; NaN if the run did not get there."""
        steps = self.curve[:, 0]
        if step is None:
            return float(self.curve[-1, 2])
        row = np.searchsorted(steps, step, side="right") - 1
        return float(self.curve[row, 2]) if row >= 0 and steps[row] >= 0.99 * step else np.nan


# ---------------------------------------------------------------------------------------------------------------------
# Event files to curves


def read_events(directory) -> dict[int, tuple[float, float]]:
    """Per global step of a run: the number of episodes that finished, and their mean return (NaN of none).

    Where a step was logged twice, as a resumed run does, all that was logged first is forgotten.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    steps = {}
    for path in sorted(pathlib.Path(directory).glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            values = {value.tag: value.simple_value for value in event.summary.value}
            if "charts/num_episodes" in values:
                steps[event.step] = values["charts/num_episodes"], values.get("charts/episodic_return", np.nan)
    return dict(sorted(steps.items()))


def make_curve(steps: dict[int, tuple[float, float]]) -> np.ndarray:
    """At most POINTS + 1 evenly spaced rows of global step, mean return since the row before, mean of the last 100.

    The log holds means over iterations, so of the iteration where the 100 begin, its mean stands for the part needed.
    """
    if not steps:
        raise BadInput("its event file holds no charts/num_episodes")
    step = np.array(list(steps))
    count, mean = np.array(list(steps.values())).T
    episodes = np.cumsum(count)  # so far
    total = np.cumsum(np.where(count > 0, count * np.nan_to_num(mean), 0))  # of their returns
    some = np.concatenate([[True], count > 0])  # what follows interpolates between iterations with an episode
    known = np.concatenate([[0], episodes])[some], np.concatenate([[0], total])[some]
    grid = np.arange(1, POINTS + 1) * (step[-1] / POINTS)
    rows = np.unique(np.searchsorted(step, grid, side="right") - 1)
    rows = rows[(rows >= 0) & (episodes[rows] > 0)]
    before = np.concatenate([[0], episodes[rows][:-1]])
    first = np.maximum(episodes[rows] - EPISODES, 0)
    with np.errstate(invalid="ignore"):
        recent = (total[rows] - np.interp(before, *known)) / (episodes[rows] - before)
    last = (total[rows] - np.interp(first, *known)) / (episodes[rows] - first)
    return np.stack([step[rows], recent, last], axis=1)


def read_summary(path: pathlib.Path) -> dict | None:
    """A run's summary, None unless it is finished. Raises BadInput if it cannot be read."""
    try:
        summary = json.loads(path.read_text())
        return summary if summary["status"] == "finished" else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: not a run's summary ({error!r})") from None


def collect(runs: pathlib.Path, curves: pathlib.Path) -> int:
    """Turn every finished run under `runs` into a CSV file under `curves`; returns how many there were."""
    summaries = {path: read_summary(path) for path in sorted(runs.glob("*/summary.json"))}
    finished = {path: summary for path, summary in summaries.items() if summary}
    for path, summary in finished.items():
        script, *flags = shlex.split(summary["command"])
        summary["command"] = shlex.join(["python", os.path.basename(script), *flags])  # no paths of this machine
        try:
            curve = make_curve(read_events(path.parent))
        except BadInput as error:
            raise BadInput(f"{path.parent}: {error}") from None
        if not len(curve):
            print(f"{path.parent}: no episode ended in it; left out", file=sys.stderr)
            continue
        curves.mkdir(parents=True, exist_ok=True)
        with open(curves / f"{path.parent.name}.csv", "w", newline="") as file:
            file.write(f"# {json.dumps(summary)}\n")
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows([int(step), f"{recent:.6g}", f"{last:.6g}"] for step, recent, last in curve)
    return len(finished)


def load_runs(curves: pathlib.Path) -> list[Run]:
    """Every run that is kept as CSV, oldest first; of runs with equal arguments the newest only."""
    runs = {}
    for path in sorted(curves.glob("*.csv"), key=lambda path: path.stem.rpartition("__")[2]):
        try:
            with open(path) as file:
                summary = json.loads(file.readline().removeprefix("# "))
                curve = np.loadtxt(file, delimiter=",", skiprows=1, ndmin=2)
            run = Run(summary, curve)
            runs[json.dumps([run.env_id, run.seed, run.settings], sort_keys=True)] = run
        except (OSError, ValueError, KeyError) as error:
            raise BadInput(f"{path}: not a curve of this report ({error!r})") from None
    return list(runs.values())


# ---------------------------------------------------------------------------------------------------------------------
# Statistics


def seed_mean(runs: list[Run]) -> np.ndarray:
    """Rows of step, mean and deviation over runs of the last-100 mean, at the steps that all the runs have."""
    steps = sorted(set.intersection(*(set(run.curve[:, 0]) for run in runs)))
    scores = np.array([[dict(run.curve[:, [0, 2]])[step] for step in steps] for run in runs])
    return np.stack([steps, scores.mean(0), scores.std(0)], axis=1) if steps else np.zeros((0, 3))


def base_name(env_id: str) -> str:
    """Hopper-v4 -> Hopper"""
    return env_id.rpartition("-v")[0]


def published(column: str, env_id: str) -> tuple | None:
    """A published score, (mean, deviation) or (mean,)."""
    name = base_name(env_id)
    return PUBLISHED[column][TASKS.index(name)] if name in TASKS else None


def normalized_scores(runs: list[Run], random: dict[str, float]) -> np.ndarray:
    """(score - random policy) / (pull request's 3M score - random policy), of the runs whose tasks have both."""
    runs = [run for run in runs if run.env_id in random and published("PR 355, 3M", run.env_id)]
    low = np.array([random[run.env_id] for run in runs])
    high = np.array([published("PR 355, 3M", run.env_id)[0] for run in runs])
    return (np.array([run.score() for run in runs]) - low) / (high - low)


def interquartile_mean(scores: np.ndarray) -> tuple[float, float, float]:
    """Mean of the middle half of the scores, and the ends of its 95 % bootstrap interval (NaN of a single score)."""

    def statistic(scores, axis=-1):
        return scipy.stats.trim_mean(scores, 0.25, axis=axis)

    if len(scores) < 2:
        return float(statistic(scores)), np.nan, np.nan
    generator = np.random.default_rng(0)
    result = scipy.stats.bootstrap((scores,), statistic, n_resamples=10_000, method="percentile", rng=generator)
    return float(statistic(scores)), *map(float, result.confidence_interval)


# ---------------------------------------------------------------------------------------------------------------------
# The scores of uniform actions


def returns_of_random_policy(env_id: str, num_envs: int = 16, episodes_each: int = 8) -> list[float]:
    """Returns of `num_envs * episodes_each` episodes; equally many of each environment, lest short ones prevail."""
    import envpool

    pool = envpool.make(env_id, env_type="gymnasium", num_envs=num_envs, num_threads=1, seed=0)
    generator, low, high = np.random.default_rng(0), pool.action_space.low, pool.action_space.high
    returns, running = [[] for _ in range(num_envs)], np.zeros(num_envs)
    pool.reset()
    while min(map(len, returns)) < episodes_each:
        actions = generator.uniform(low, high, (num_envs, *low.shape)).astype(pool.action_space.dtype)
        _, reward, terminated, truncated, info = pool.step(actions)
        running = np.where(info["elapsed_step"] == 0, 0, running + reward)  # a step at 0 only reset
        for i in np.flatnonzero(terminated | truncated):
            returns[i].append(float(running[i]))
    return [score for scores in returns for score in scores[:episodes_each]]


def measure_random_policy(path: pathlib.Path) -> None:
    import importlib.metadata

    scores = {}
    for task in TASKS:
        returns = returns_of_random_policy(f"{task}-v4")
        scores[f"{task}-v4"] = {"mean": np.mean(returns), "std": np.std(returns), "episodes": len(returns)}
        print(f"{task}-v4: {np.mean(returns):.5g} ± {np.std(returns):.3g}", flush=True)
    command = "python benchmark/report.py --random-policy"
    content = {"command": command, "envpool": importlib.metadata.version("envpool"), "scores": scores}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def load_random_policy(path: pathlib.Path) -> dict[str, float]:
    if not path.exists():
        return {}
    try:
        return {env_id: score["mean"] for env_id, score in json.loads(path.read_text())["scores"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: not scores of a random policy ({error!r})") from None


# ---------------------------------------------------------------------------------------------------------------------
# Table and picture


def show(mean: float | None, deviation: float | None = None) -> str:
    """123 ± 4, with a decimal where the figures are small; - for what does not exist."""
    if mean is None or np.isnan(mean):
        return "-"
    digits = 1 if abs(mean) < 20 else 0
    mean = round(mean, digits) + 0.0  # never -0.0
    return f"{mean:.{digits}f}" + ("" if deviation is None or np.isnan(deviation) else f" ± {deviation:.{digits}f}")


def show_scores(scores: list[float]) -> str:
    """Mean over seeds, with the deviation if there is more than one."""
    scores = [score for score in scores if not np.isnan(score)]
    return show(np.mean(scores), np.std(scores) if len(scores) > 1 else None) if scores else "-"


def group_by(runs: list[Run], key) -> dict:
    groups = collections.defaultdict(list)
    for run in runs:
        groups[key(run)].append(run)
    return dict(sorted(groups.items()))


def name_settings(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs by the settings that they share, named by what tells these apart."""
    groups = group_by(runs, lambda run: json.dumps(run.settings, sort_keys=True)).values()
    settings = [group[0].settings for group in groups]
    varied = {name for one in settings for name in one if any(other.get(name) != one[name] for other in settings)}
    named = {}
    for one, group in zip(settings, groups, strict=True):
        parts = [f"{one['total_timesteps']:,} steps"]
        parts += [f"{name}={one[name]}" for name in one if name in varied - {"total_timesteps"}]
        named[", ".join(parts)] = group
    return named


def write_rows(header: list[str], rows: list[list[str]]) -> list[str]:
    """A markdown table, without the columns that hold nothing but -."""
    keep = [i for i in range(len(header)) if any(row[i] != "-" for row in rows)]
    table = [header, ["---" if i == 0 else "---:" for i in range(len(header))], *rows]
    return ["| " + " | ".join(row[i] for i in keep) + " |" for row in table]


def make_table(runs: list[Run]) -> list[str]:
    """A row for each task, the published scores beside the measured ones."""
    measured = ["task", "seeds", "at 1M", "at 3M", "last", "best point of the mean", "minutes", "SPS"]
    rows = []
    for env_id, of_task in group_by(runs, lambda run: run.env_id).items():
        mean = seed_mean(of_task)
        best = mean[mean[:, 1].argmax()] if len(mean) else [np.nan] * 3
        at = {step: [run.score(step) for run in of_task] for step in (1_000_000, 3_000_000)}
        final = [run.score() for run in of_task]
        rows.append(
            [
                env_id,
                str(len(of_task)),
                *map(show_scores, at.values()),
                "-" if final in at.values() else show_scores(final),
                f"{show(best[1], best[2] if len(of_task) > 1 else None)} at {best[0] / 1e6:.2f}M",
                f"{np.mean([run.summary['wall_time'] for run in of_task]) / 60:.1f}",
                "-" if None in (sps := [run.summary["SPS"] for run in of_task]) else f"{np.mean(sps):,.0f}",
                *(show(*(published(column, env_id) or (None,))) for column in PUBLISHED),
            ]
        )
    return write_rows(measured + list(PUBLISHED), rows)


def make_section(name: str, runs: list[Run], random: dict[str, float]) -> list[str]:
    """All that the README says of the runs of one setting."""
    most_seeds = max(len(group) for group in group_by(runs, lambda run: run.env_id).values())
    lines = [f"## {name}" + (", one seed" if most_seeds == 1 else ""), "", *make_table(runs), ""]
    scores = normalized_scores(runs, random)
    if len(scores):
        middle, low, high = interquartile_mean(scores)
        interval = "" if np.isnan(low) else f", 95 % bootstrap interval {low:.2f} to {high:.2f}"
        lines += [f"Interquartile mean of the normalized score: **{middle:.2f}**{interval} ({len(scores)} runs).", ""]
    commands = {shlex.join(strip_flags(run.summary["command"])): None for run in runs}
    facts = {
        "Commands (`--env-id`, `--seed` and `--num-threads` apart)": [f"`{command}`" for command in commands],
        "Commits": {str(run.summary["commit"])[:10] for run in runs},
        "Versions": {", ".join(f"{k} {v}" for k, v in run.summary["versions"].items()) for run in runs},
        "Machines": {run.summary["machine"] for run in runs},
    }
    return [*lines, *(f"- {fact}: {'; '.join(sorted(values))}" for fact, values in facts.items()), ""]


def strip_flags(command: str) -> list[str]:
    """A command without what differs between the runs of a sweep."""
    words, kept = iter(shlex.split(command)), []
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in ("--env-id", "--seed", "--num-threads"):
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept


def write_readme(path: pathlib.Path, runs: list[Run], random: dict[str, float]) -> None:
    lines = [
        "# Results",
        "",
        "Made by `python benchmark/report.py` from the curves in `curves/`; edit `notes.md`, not this file. Scores are means",
        "of the last 100 training episodes, sampled actions, then mean ± standard deviation over seeds.",
        "",
        "![Learning curves](curves.png)",
        "",
    ]
    for name, group in name_settings(runs).items():
        lines += make_section(name, group, random)
    lines += [SOURCES, ""]
    if random:
        lines += [
            "Normalized score: (last score - random policy) / (PR 355's 3M score - random policy). Its interquartile mean",
            "leaves out the lowest and the highest quarter of all runs, whatever the task; the bootstrap draws from all.",
            f"Random policy, uniform actions: {', '.join(f'{name} {show(score)}' for name, score in random.items())}.",
            "",
        ]
    for title in ("Notes", "Speed"):
        section = path.parent / f"{title.lower()}.md"
        if section.exists():
            lines += [f"## {title}", "", section.read_text().strip(), ""]
    path.write_text("\n".join(lines))


def draw(path: pathlib.Path, runs: list[Run]) -> None:
    """One picture, two panels a row: the seed mean of each setting, one deviation shaded, references dotted."""
    tasks = group_by(runs, lambda run: run.env_id)
    num_rows = -(-len(tasks) // 2)
    plt.rcParams.update({"font.size": 12, "axes.grid": True, "grid.alpha": 0.3})
    figure, axes = plt.subplots(num_rows, 2, figsize=(7, 2.6 * num_rows + 1), squeeze=False, layout="constrained")
    settings = list(name_settings(runs).items())
    for axis, env_id in zip(axes.flat, tasks, strict=False):
        for i, (name, group) in enumerate(settings):
            of_task = [run for run in group if run.env_id == env_id]
            if of_task:
                step, mean, deviation = seed_mean(of_task).T
                axis.plot(step, mean, color=f"C{i}", label=name)
                axis.fill_between(step, mean - deviation, mean + deviation, color=f"C{i}", alpha=0.25, linewidth=0)
        for color, column in (("black", "PR 355, 3M"), ("tab:red", "tianshou best, 3M")):
            if reference := published(column, env_id):
                axis.axhline(reference[0], color=color, linestyle=":", linewidth=2, label=column)
        axis.set_title(env_id)
        axis.xaxis.set_major_formatter(
            lambda step, _: f"{step / 1e6:g}M" if step >= 1e5 else f"{step / 1e3:g}k" if step else "0"
        )
        axis.xaxis.set_major_locator(plt.MaxNLocator(4))
    for axis in axes.flat[len(tasks) :]:
        axis.remove()
    labels = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels, loc="outside upper center", ncols=1 if len(settings) > 2 else 2)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# ---------------------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """The command line; returns its exit status."""
    results = pathlib.Path(__file__).parent / "results"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"report.py: {message}\n")  # without the usage
    parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs"), help="what training wrote (default: runs)")
    parser.add_argument("--results", type=pathlib.Path, default=results, help="where to write (default: beside this file)")
    parser.add_argument("--random-policy", action="store_true", help="measure the scores of uniform actions, nothing else")
    args = parser.parse_args(argv)
    random_policy = args.results / "random_policy.json"
    try:
        if args.random_policy:
            measure_random_policy(random_policy)
            return 0
        num_new = collect(args.runs, args.results / "curves")
        runs = load_runs(args.results / "curves")
        if not runs:
            raise BadInput(f"{args.runs}: no finished run there, and no curve in {args.results / 'curves'}")
        draw(args.results / "curves.png", runs)
        write_readme(args.results / "README.md", runs, load_random_policy(random_policy))
    except (BadInput, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    print(f"{num_new} finished runs read, {len(runs)} in {args.results / 'README.md'} and {args.results / 'curves.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
