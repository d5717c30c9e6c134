"""SIGKILL at any moment of a save: the file at the path is whole, and a run goes on from it."""

import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import ppo_continuous_action_envpool_xla_jax_scan as ppo
from fake import task
from runs import TINY, command, run

ARGS = ppo.Args(num_envs=4, num_steps=16, num_minibatches=4)
KILLS, INSIDE = 200, 20  # at least so many, and so many of them inside a save
ENDLESS = [*TINY, "--env-id", "Hopper-v4", "--checkpoint-frequency", "1", "--total-timesteps", "100000000"]


def fork_and_kill(path):
    """For each delay on stdin, kill a child that saves the models on stdin without end; print the signal that it died of.

    The models are NumPy's, so that JAX starts no backend here: it would warn of the fork, which loses its threads.
    """
    ppo.versions = functools.cache(ppo.versions)  # slower than writing the file
    models = pickle.load(sys.stdin.buffer)
    for delay in sys.stdin.buffer:
        child = os.fork()
        while child == 0:
            for model in models:
                ppo.save_model(path, model)
        time.sleep(float(delay))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        print(os.WTERMSIG(status), flush=True)


def forking(path):
    """A process that does that. Python may count NumPy's threads, which a child does without, and warn."""
    flags = ["-W", "ignore::DeprecationWarning", __file__, path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen([sys.executable, *flags], env=env, **pipes)


def test_two_hundred_kills_of_a_saving_process_leave_one_of_its_two_models_whole(tmp_path):
    state = jax.device_get(ppo.make_state(ARGS, task(11)))
    negated = state.agent.replace(params=jax.tree.map(np.negative, state.agent.params))
    states = state.replace(iteration=np.int32(1)), state.replace(iteration=np.int32(2), agent=negated)
    models = [ppo.Model(ARGS, task(11), state) for state in states]
    path, tmp, contents = tmp_path / "model", tmp_path / "model.tmp", []
    for model in models:
        ppo.save_model(str(path), model)
        contents.append(path.read_bytes())
    draw = np.random.default_rng(1)
    kills, inside, partial, found = 0, 0, 0, set()
    with forking(str(path)) as forker:
        forker.stdin.write(pickle.dumps(models))
        while kills < KILLS or (inside < INSIDE and kills < 10 * KILLS):  # where a disk is fast, few land inside
            forker.stdin.write(b"%f\n" % draw.uniform(0, 0.03))
            forker.stdin.flush()
            assert int(forker.stdout.readline()) == signal.SIGKILL
            iteration = int(ppo.load_model(str(path)).state.iteration)
            assert path.read_bytes() == contents[iteration - 1]
            found.add(iteration)
            kills += 1
            if tmp.exists():
                inside += 1
                partial += tmp.stat().st_size < min(map(len, contents))
                tmp.unlink()
        _, err = forker.communicate()
    print(f"{kills} kills, {inside} inside a save, {partial} of these before all was written")
    assert forker.returncode == 0 and err == b"" and inside >= INSIDE and found == {1, 2}


@pytest.fixture
def endless(tmp_path):
    """A run that saves after every iteration and has saved once, and its model file."""
    with open(tmp_path / "output", "w") as output:
        process = subprocess.Popen(command(*ENDLESS), cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT)
    try:
        while not (paths := list(tmp_path.glob("runs/*/*.cleanrl_model"))):
            assert process.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.01)
        yield process, paths[0]
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 10))])
def test_a_killed_run_leaves_a_whole_model(seed, endless):
    process, path = endless
    time.sleep(np.random.default_rng(seed).uniform(0, 1))
    process.kill()
    assert process.wait() == -signal.SIGKILL
    model = ppo.load_model(str(path))
    assert model.state.iteration >= 1 and model.args.env_id == "Hopper-v4"
    print(f"iteration {model.state.iteration}, inside a save: {os.path.exists(f'{path}.tmp')}")


def test_a_run_killed_inside_a_save_resumes_and_its_unfinished_file_goes(endless, tmp_path):
    process, path = endless
    tmp = path.with_name(path.name + ".tmp")
    deadline = time.monotonic() + 20
    while True:
        assert time.monotonic() < deadline
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if tmp.exists():
            break
        process.send_signal(signal.SIGCONT)
        time.sleep(0.001)
    process.kill()
    process.wait()
    iteration = int(ppo.load_model(str(path)).state.iteration)
    assert tmp.exists() and not (path.parent / "summary.json").exists()
    ended = run(tmp_path, "--resume", str(path), "--total-timesteps", str(64 * (iteration + 1)), "--eval-episodes", "1")
    assert ended.returncode == 0 and ended.stderr == "", ended.stderr
    assert ppo.load_model(str(path)).state.iteration == iteration + 1 and not tmp.exists()
    assert json.loads((path.parent / "summary.json").read_text())["global_step"] == 64 * (iteration + 1)


if __name__ == "__main__":
    fork_and_kill(sys.argv[1])
