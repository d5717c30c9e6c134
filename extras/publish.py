"""Publish a trained agent at the Hugging Face Hub: model file, script, TensorBoard log, film, and a card with its score.

    python extras/publish.py runs/RUN/NAME.cleanrl_model --repo Hopper-v4-ppo
    python extras/publish.py runs/RUN/NAME.cleanrl_model --repo my-team/Hopper-v4-ppo --private

The token, which must be one that may write, is that of `hf auth login` or the variable HF_TOKEN. One commit holds all.
Publishing again replaces model, log and film. Nothing is written on this machine. HF_ENDPOINT names another Hub.
"""

import argparse
import dataclasses
import json
import pathlib
import shlex
import sys
from typing import Any

import huggingface_hub as hub
from flax import serialization
from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ppo_continuous_action_envpool_xla_jax_scan as ppo  # noqa: E402

SCRIPT = pathlib.Path(ppo.__file__)
NOT_HYPERPARAMETERS = ppo.FREE_ON_RESUME - {"total_timesteps"}  # they watch or keep a run
CARD = """\
---
{metadata}
---

# PPO for {env_id}

Trained with `{script}` for {steps:,} steps of EnvPool's {env_id}. Evaluated on {actions} actions (episodes: {episodes}), it
returned **{mean:.2f} ± {std:.2f}** ({min:.2f} to {max:.2f}) in {length:.0f} steps on average. Fetch and evaluate it:

```bash
pip install huggingface_hub
hf download {repo} --local-dir {folder}
cd {folder}
pip install -r requirements.txt
python {script} --evaluate {file}
```

| hyperparameters, versions | |
|-|-|
{rows}
"""


def read_summary(path: pathlib.Path) -> dict[str, Any]:
    """The summary of a run; empty where the run has left none."""
    try:
        return dict(json.loads(path.read_bytes())) if path.exists() else {}
    except (ValueError, TypeError):
        raise ppo.BadInput(f"{path}: not a run's summary, or not all of one") from None


def score(model: ppo.Model, summary: dict[str, Any]) -> dict[str, Any]:
    """The evaluation at the end of training if the file is of then, else a new one."""
    steps = int(model.state.iteration) * model.args.batch_size
    if summary.get("status") == "finished" and summary.get("global_step") == steps and summary.get("evaluation"):
        return summary["evaluation"]
    return ppo.evaluate(model, model.args.eval_episodes, model.args.eval_deterministic)


def find_files(path: pathlib.Path) -> dict[str, pathlib.Path]:
    """What to publish beside the card, by its name at the Hub, which shows a film of the name `replay.mp4`."""
    run = path.resolve().parent
    files = [path, SCRIPT, ROOT / "requirements.txt", ROOT / "LICENSE", *run.glob("events.out.tfevents.*")]
    films = sorted((run.parent.parent / "videos" / run.name).glob("*.mp4"), key=lambda film: film.stat().st_mtime)
    return {file.name: file for file in files} | ({"replay.mp4": films[-1]} if films else {})


def make_card(repo: str, file: str, model: ppo.Model, evaluation: dict[str, Any], versions: dict[str, str]) -> str:
    """The model card: metadata for the Hub, text for people."""
    args, task = model.args, "reinforcement-learning"
    result = hub.EvalResult(
        **dict(task_type=task, task_name=task, dataset_type=args.env_id, dataset_name=args.env_id),
        **dict(metric_type="mean_reward", metric_name="mean_reward"),
        metric_value=f"{evaluation['mean']:.2f} +/- {evaluation['std']:.2f}",
    )
    tags = [args.env_id, "deep-reinforcement-learning", task, "ppo", "jax", "envpool"]
    about = dict(library_name="cleanrl", pipeline_tag=task, tags=tags, model_name="PPO", eval_results=[result])
    rows = {key: value for key, value in dataclasses.asdict(args).items() if key not in NOT_HYPERPARAMETERS} | versions
    return CARD.format(
        **evaluation,
        metadata=hub.ModelCardData(**about).to_yaml(),
        **dict(repo=repo, folder=repo.split("/")[-1], file=shlex.quote(file), script=SCRIPT.name),
        steps=int(model.state.iteration) * args.batch_size,
        actions="mean" if evaluation["deterministic"] else "sampled",
        rows="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
    )


def publish(path: pathlib.Path, repo: str, private: bool) -> str:
    """Publish a model file and what belongs to it, and return the address. Raises `BadInput`, whatever the fault."""
    try:
        validate_repo_id(repo)
    except ValueError as error:
        raise ppo.BadInput(f"repo={repo}: {error}") from None
    if not hub.get_token():
        raise ppo.BadInput("no token of the Hugging Face Hub: run `hf auth login`, or set HF_TOKEN")
    model = ppo.load_model(str(path))
    summary = read_summary(path.resolve().parent / "summary.json")
    contents = {name: file.read_bytes() for name, file in find_files(path).items()}  # a run that goes on rewrites its files
    saved = serialization.msgpack_restore(serialization.msgpack_restore(contents[path.name])["payload"])
    versions = saved["versions"] | {"commit": summary.get("commit") or "unknown"}
    evaluation = score(model, summary)
    try:
        api = hub.HfApi()
        address = api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.model_info(address.repo_id).private:
            raise ValueError("it exists already and is public")
        contents["README.md"] = make_card(address.repo_id, path.name, model, evaluation, versions).encode()
        old = [name for name in api.list_repo_files(address.repo_id) if name not in contents]
        old = [name for name in old if name.endswith((".cleanrl_model", ".mp4")) or ".tfevents." in name]
        operations = [hub.CommitOperationAdd(name, content) for name, content in contents.items()]
        operations += [hub.CommitOperationDelete(name) for name in old]
        api.create_commit(address.repo_id, operations, commit_message=f"PPO for {model.args.env_id}")
    except Exception as error:  # of HTTP, of storage, of the client: their classes change from version to version
        refused = getattr(getattr(error, "response", None), "status_code", None) in (401, 403)
        reason = f"{'the token may not write there; ' if refused else ''}{' '.join(str(error).split())}"
        raise ppo.BadInput(f"repo={repo}: not published at {constants.ENDPOINT}: {reason}") from None
    return str(address)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"publish.py: {message}\n")  # without the usage
    parser.add_argument("file", type=pathlib.Path, metavar="FILE", help="the model file, in its run's directory")
    parser.add_argument("--repo", required=True, help="the repository's name at the Hub; without an owner's, yours")
    parser.add_argument("--private", action="store_true", help="show it to nobody else (default: to all)")
    args = parser.parse_args(argv)
    disable_progress_bars()
    try:
        print(f"published at {publish(args.file, args.repo, args.private)}")
    except (ppo.BadInput, OSError) as error:
        print(f"publish.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
