"""What the README says runs, and what it lists is complete."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import ppo_continuous_action_envpool_xla_jax_scan as ppo
from compiled import collect_rollout
from conftest import ROOT
from fake import bandit_observe, bandit_reward, make_fake, task
from runs import SCRIPT, read_summary, run

README = (ROOT / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.splitlines()]
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
TRAINING = [command for command in COMMANDS if "python ppo_" in command and "MODEL" not in command]
ON_A_MODEL = [command for command in COMMANDS if "MODEL" in command and "publish" not in command]
SWEEPS = [command for command in COMMANDS if command.startswith("./benchmark.sh")]
ELSEWHERE = {  # what runs them, since a test cannot
    "pip install -r tests/requirements.txt && pytest": ".ci/run",
    "uv run ppo_continuous_action_envpool_xla_jax_scan.py --env-id HalfCheetah-v4": "test_script_metadata",
    "pip install -r benchmark/requirements.txt && python benchmark/report.py": "test_benchmark.py",
    "pip install -r benchmark/requirements-peers.txt && python benchmark/speed.py": "by hand: peers are not installed",
    "pip install -r extras/requirements.txt && python extras/publish.py MODEL --repo Hopper-v4-ppo": "test_publish.py",
    "pip install -r tests/requirements-peers.txt && pytest -m peers -n 0 -s tests/test_peers.py": "by hand: as above",
    "python benchmark/tasks.py --env-ids Pendulum-v1 CartPole-v1": "test_benchmark.py",
    "python tests/mutants/run.py adam log_std": "by hand: it runs the tests",
    "pip install pre-commit && pre-commit run --all-files": "by hand: it fetches ruff",
}


def shell(command, cwd):
    """Run a README command as it stands, with this Python as `python` and the repository's files beside it."""
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git"):
            (cwd / path.name).symlink_to(path)
    (cwd / "bin").mkdir()
    (cwd / "bin" / "python").symlink_to(sys.executable)
    env = os.environ | {"PATH": f"{cwd / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, shell=True, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def test_every_command_is_run_by_a_test_or_named_here():
    assert set(COMMANDS) == set(TRAINING) | set(ON_A_MODEL) | set(SWEEPS) | set(ELSEWHERE)
    assert len(TRAINING) >= 6 and len(ON_A_MODEL) == 4 and len(SWEEPS) == 2


@pytest.mark.skipif(not shutil.which("patch"), reason="needs patch")
def test_every_mutant_applies_and_is_in_the_table_with_the_test_that_catches_it(tmp_path):
    patches = sorted((ROOT / "tests" / "mutants").glob("*.patch"))
    for path in patches:
        command = ["patch", "-s", "-i", path, "-o", tmp_path / "script", SCRIPT]
        applied = subprocess.run(command, capture_output=True, text=True)
        assert applied.returncode == 0, f"{path.name}: {applied.stdout}"
    rows = r"^\| (\d+_\w+) \| .* \| (test_\w+\.py)::(test_\w+)(?:\[.*\])? \|$"
    table = re.findall(rows, (ROOT / "tests" / "mutants" / "README.md").read_text(), re.M)
    assert sorted(name for name, *_ in table) == [path.stem for path in patches] and f"{len(patches)} patches" in README
    for name, file, test in table:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), name


@pytest.mark.parametrize("command", TRAINING)
def test_training_command_runs(command, tmp_path):
    command = command.removeprefix("pip install -r requirements.txt && ")
    ended = shell(command if "--help" in command else command + " --total-timesteps 4096 --eval-episodes 1", tmp_path)
    assert ended.returncode == 0, ended.stderr
    if "--help" not in command:
        assert read_summary(tmp_path)["status"] == "finished" and "finished: return" in ended.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of a short run on Gymnasium's HalfCheetah-v5, its episodes cut to what a film needs."""
    folder = tmp_path_factory.mktemp("model")
    flags = "--env-id HalfCheetah-v5 --env-kwargs max_episode_steps=50 --total-timesteps 4096 --eval-episodes 1"
    ended = run(folder, *flags.split())
    assert ended.returncode == 0, ended.stderr
    (path,) = folder.glob("runs/*/*.cleanrl_model")
    return str(path)


@pytest.mark.parametrize("command", ON_A_MODEL)
def test_command_on_a_model_runs(command, model, tmp_path):
    copy = tmp_path / "a run" / "MODEL"
    copy.parent.mkdir()
    copy.write_bytes(Path(model).read_bytes())
    command = command.removeprefix('pip install "imageio[ffmpeg]" && ').replace("MODEL", f"'{copy}'")
    ended = shell(command.replace("6000000", "8192"), tmp_path)
    assert ended.returncode == 0, ended.stderr
    if "--resume" in command:
        assert json.loads((copy.parent / "summary.json").read_text())["global_step"] == 8192
    else:
        result = json.loads(ended.stdout.splitlines()[-1])
        assert (result["episodes"], result["deterministic"]) == ((100, False) if "100" in command else (1, True))
    if "--capture-video" in command:
        assert "libegl-mesa0" in ended.stderr or list(tmp_path.glob("videos/a run/step-4096.mp4"))


def test_policy_example_drives_gymnasium(model, capsys):
    exec(PYTHON_BLOCKS[1].replace("MODEL", model), {})
    assert re.fullmatch(r"-?[\d.]+", capsys.readouterr().out.strip())


@pytest.mark.parametrize("command", SWEEPS)
def test_sweep_command_plans_its_runs(command, tmp_path):
    ended = shell(command.replace("./benchmark.sh", "./benchmark.sh --dry-run"), tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("--env-id") == (33 if command == "./benchmark.sh" else 10)


def test_training_from_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(PYTHON_BLOCKS[0], {})
    assert re.fullmatch(r"finished [\d.]+", capsys.readouterr().out.splitlines()[-1])


def test_wrapper_example_trains_and_tells_the_time():
    scope = {"__name__": "example"}
    exec(PYTHON_BLOCKS[2], scope)
    wrapper, obs = scope["VectorEnvTimeAwareObs"](jnp.zeros(0), limit=4).reset(jnp.ones((2, 1), jnp.float32))
    np.testing.assert_array_equal(obs, [[1, 0], [1, 0]])
    args = ppo.Args(num_envs=4, num_steps=8, num_minibatches=2, update_epochs=1, total_timesteps=32)
    env, handle, obs = make_fake(4, bandit_observe, bandit_reward, 4, False)
    wrappers = (*ppo.make_wrappers(args, task(1)), wrapper)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "make_wrappers", lambda *_: wrappers)
        state = ppo.make_state(args, task(1), handle, obs)
    _, rollout = collect_rollout(env, state, args)
    np.testing.assert_allclose(rollout.obs[:, 0, 1], np.array([0, 1, 2, 3, 4, 0, 1, 2]) / 4)
    state, report = ppo.train_iteration(state, env, args)
    assert state.iteration == 1 and not any(report.faults.values())


def test_every_flag_is_listed():
    for name in ppo.Args.__dataclass_fields__:
        assert f"`--{name.replace('_', '-')}`" in README


def test_every_metric_is_listed():
    source = SCRIPT.read_text()
    names = set(re.findall(r'"((?:charts|losses|eval)/\w+)"', source))
    assert len(names) >= 19
    assert names == set(re.findall(r"`((?:charts|losses|eval)/\w+)`", README))


def test_all_core_and_continuous_details_are_listed():
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \|", README, re.M)]
    assert numbers == [*range(1, 14), *range(1, 10)]


def test_links_within_the_repository_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def requirements(name="requirements.txt"):
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [line for line in lines if line]


def test_script_metadata_equals_the_requirements():
    block = re.search(r"^# /// script\n(.*?)^# ///$", SCRIPT.read_text(), re.M | re.S)[1]
    metadata = tomllib.loads("".join(line.removeprefix("#").removeprefix(" ") for line in block.splitlines(True)))
    assert metadata == {"requires-python": ">=3.11", "dependencies": requirements()}


def test_every_requirement_is_imported_or_needed_and_has_bounds():
    names = [re.match(r"[\w-]+", requirement)[0] for requirement in requirements()]
    for name in names:
        importlib.import_module(name)
    assert names == "jax jaxlib flax optax envpool numpy tyro tensorboard wandb rich".split()
    assert all(re.fullmatch(r"[\w-]+>=[\d.]+,<\d+", requirement) for requirement in requirements())


def test_ci_runs_exactly_the_readmes_test_command_last():
    last = (ROOT / ".ci" / "run").read_text().strip().splitlines()[-1]
    assert last.replace("pip install -q", "pip install") == "pip install -r tests/requirements.txt && pytest"


def test_results_were_made_by_a_committed_script():
    # Each published curve names the commit of the script that made it.
    for path in (ROOT / "benchmark" / "results" / "curves").glob("*.csv"):
        assert re.search(r'"commit": "[0-9a-f]{40}"', path.read_text().splitlines()[0]), path
