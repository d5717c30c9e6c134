"""Saved agents: the file, what is refused, resuming, evaluating, and use elsewhere."""

import dataclasses
import json
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

import ppo_continuous_action_envpool_xla_jax_scan as ppo
from conftest import ROOT
from fake import bandit_observe, bandit_reward, make_fake, task
from runs import TINY, read_events, read_scalars, run, run_directories

ARGS = ppo.Args(num_envs=8, num_steps=8, num_minibatches=4, update_epochs=2, total_timesteps=64 * 20, norm_reward=True)


def start(args=ARGS):
    env, handle, obs = make_fake(args.num_envs, bandit_observe, bandit_reward, 3, True)
    return env, ppo.make_state(args, task(1), handle, obs)


def iterate(env, state, number):
    for _ in range(number):
        state, _ = ppo.train_iteration(state, env, ARGS)
    return state


def leaves_equal(a, b):
    """Equal in structure, dtype and every bit."""
    pairs = zip(jax.tree.leaves_with_path(a), jax.tree.leaves_with_path(b), strict=True)
    return all(p == q and x.dtype == y.dtype and bool((x == y).all()) for (p, x), (q, y) in pairs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model file of ten iterations, and the state that it holds."""
    path = str(tmp_path_factory.mktemp("saved") / "agent.cleanrl_model")
    env, state = start()
    state = iterate(env, state, 10)
    ppo.save_model(path, ppo.Model(ARGS, task(1), state))
    return path, env, state


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a tiny finished run on Hopper-v4, its model file and its process's output."""
    folder = tmp_path_factory.mktemp("trained")
    ended = run(folder, *TINY, *"--env-id Hopper-v4 --checkpoint-frequency 3 --eval-frequency 4 --eval-episodes 10".split())
    assert ended.returncode == 0, ended.stderr
    (path,) = folder.glob("runs/*/*.cleanrl_model")
    return folder, str(path), ended.stdout


def test_every_array_survives_the_file_with_its_dtype(saved):
    path, _, state = saved
    model = ppo.load_model(path)
    assert model.args == ARGS and model.task.obs_shapes == {"": (1,)}
    np.testing.assert_array_equal([model.task.low, model.task.high], [[-1], [1]])
    assert leaves_equal(model.state, state.replace(handle=None, obs=None))


def test_ten_iterations_saved_loaded_and_ten_more_equal_twenty(saved):
    path, env, state = saved
    through = iterate(env, state, 10)
    loaded = ppo.load_model(path).state.replace(handle=state.handle, obs=state.obs)
    assert leaves_equal(iterate(env, loaded, 10), through)
    assert through.iteration == 20


def test_args_with_environment_options_survive_the_file(tmp_path):
    args = dataclasses.replace(ARGS, env_kwargs=("a=1", "b=x"), target_kl=0.5)
    path = str(tmp_path / "model")
    ppo.save_model(path, ppo.Model(args, task(1), start(args)[1]))
    assert ppo.load_model(path).args == args


class Runs:
    """What a pickle of a stranger could do."""

    def __reduce__(self):
        return (open, ("ran", "w"))


def rewrite(path, change):
    """Change the payload of a model file, and its checksum with it."""
    record = serialization.msgpack_restore(path.read_bytes())
    saved = serialization.msgpack_restore(record["payload"])
    change(saved)
    payload = serialization.msgpack_serialize(saved)
    record |= {"payload": payload, "sha256": ppo.hashlib.sha256(payload).hexdigest()}
    path.write_bytes(serialization.msgpack_serialize(record))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def renumber(path):
    record = serialization.msgpack_restore(path.read_bytes())
    path.write_bytes(serialization.msgpack_serialize(record | {"format": 2}))


FAULTS = {
    "missing": (lambda path: path.unlink(), "cannot be read (No such file or directory)"),
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "cannot be read (Is a directory)"),
    "empty": (lambda path: path.write_bytes(b""), "not a model file"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "not a model file"),
    "bit-flipped": (flip, "damaged, its checksum does not match"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps(Runs())), "not a model file"),
    "text": (lambda path: path.write_text("a model"), "not a model file"),
    "newer format": (renumber, "a model file of format 2; this script reads format 1"),
    "unknown argument": (lambda path: rewrite(path, lambda saved: saved["args"].update(colour=1)), "its content is not this"),
    "bad argument": (lambda path: rewrite(path, lambda saved: saved["args"].update(gamma=7.0)), "gamma=7.0: must lie in"),
    "other observations": (lambda path: rewrite(path, lambda saved: saved["task"].update(obs_shapes={"": [2]})), "float"),
    "other environments": (
        lambda path: rewrite(path, lambda saved: saved["args"].update(num_envs=16)),
        "float32[8], not float32[16]",
    ),
    "a missing array": (
        lambda path: rewrite(path, lambda saved: saved["state"].pop("key")),
        "its content is not this script's",
    ),
    "another dtype": (
        lambda path: rewrite(path, lambda saved: saved["state"].update(iteration=np.float32(3))),
        ".iteration is float32[], not int32[]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_is_no_sound_model_is_refused_in_one_line(fault, saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model"
    path.write_bytes(Path(saved[0]).read_bytes())
    change, message = FAULTS[fault]
    change(path)
    with pytest.raises(ppo.BadInput) as error:
        ppo.load_model(str(path))
    assert str(error.value).startswith(f"{path}: ") and message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()


def test_a_file_whose_payload_is_no_bytes_is_refused(tmp_path):
    path = tmp_path / "model"
    path.write_bytes(serialization.msgpack_serialize({"format": 1, "sha256": "", "payload": 5}))
    with pytest.raises(ppo.BadInput, match="not a model file"):
        ppo.load_model(str(path))


@pytest.mark.parametrize("flag", ["--evaluate", "--resume"])
def test_a_bad_file_ends_the_command_with_status_two(flag, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert ppo.main([flag, "none"]) == 2
    assert capfd.readouterr().err == "error: none: cannot be read (No such file or directory)\n"
    assert list(tmp_path.iterdir()) == []


def test_resume_and_evaluate_exclude_each_other():
    with pytest.raises(ppo.BadInput, match="only one of them"):
        ppo.Args(resume="a", evaluate="b")


def test_evaluating_films_only_when_asked_and_ends_by_ctrl_c_with_its_status(saved, tmp_path, monkeypatch):
    path = str(tmp_path / "model")
    args, sizes, state = ppo.load_model(saved[0])
    ppo.save_model(path, ppo.Model(dataclasses.replace(args, capture_video=True), sizes, state))
    assert not ppo.parse_args(["--evaluate", path]).capture_video
    assert ppo.parse_args(["--evaluate", path, "--capture-video"]).capture_video
    assert ppo.parse_args(["--resume", path, "--total-timesteps", "2000"]).capture_video

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ppo, "evaluate", interrupt)
    assert ppo.main(["--evaluate", path]) == 130


def test_a_resumed_run_keeps_its_arguments_and_takes_new_limits(saved):
    model = ppo.load_model(saved[0])
    more = dataclasses.replace(ARGS, resume=saved[0], total_timesteps=64 * 40, track=True, eval_frequency=3, save_model=False)
    assert ppo.check_resumed(more, model) is None
    for name, value in {"gamma": 0.5, "seed": 2, "env_id": "Hopper-v4", "num_envs": 16, "num_threads": 1}.items():
        with pytest.raises(ppo.BadInput, match=f"{name}={value}: the saved run has"):
            ppo.check_resumed(dataclasses.replace(more, **{name: value}), model)
    with pytest.raises(ppo.BadInput, match="has trained 640 already"):
        ppo.check_resumed(dataclasses.replace(ARGS, resume=saved[0], total_timesteps=640), model)


def test_resume_goes_on_in_the_same_directory_with_the_saved_arguments(trained, tmp_path, monkeypatch, capsys):
    folder, path, _ = trained
    copy = tmp_path / "runs" / run_directories(folder)[0].name
    copy.parent.mkdir()
    subprocess.run(["cp", "-r", str(run_directories(folder)[0]), str(copy)], check=True)
    model = copy / path.rpartition("/")[2]
    monkeypatch.chdir(tmp_path)
    calls, environment_seeds = [], ppo.environment_seeds
    monkeypatch.setattr(ppo, "environment_seeds", lambda *a, **kw: calls.append(kw) or environment_seeds(*a, **kw))
    assert ppo.main(["--resume", str(model), "--total-timesteps", "768"]) == 0
    assert calls[0] == {"stream": 0, "iteration": 8}  # other environments than those that the first leg began with
    assert "resumed at step 512; EnvPool cannot save simulators, so episodes start anew" in capsys.readouterr().out
    scalars = read_scalars(tmp_path)
    assert [step for step, _ in scalars["losses/loss"]] == [64 * k for k in range(1, 13)]
    np.testing.assert_allclose(
        [rate for _, rate in scalars["charts/learning_rate"]][8:], 3e-4 * (1 - np.arange(8, 12) / 12), rtol=1e-6
    )
    summary = json.loads((copy / "summary.json").read_text())
    assert summary["global_step"] == 768 and summary["args"]["env_id"] == "Hopper-v4" and summary["args"]["num_envs"] == 4
    loaded = ppo.load_model(str(model))
    assert loaded.state.iteration == 12 and loaded.args.total_timesteps == 768
    assert loaded.state.wrappers[3].rms.count == 768 + 4 + 4  # two legs, each with four first observations


def test_resumed_runs_meet_fresh_environments():
    assert not set(ppo.environment_seeds(64, 1, 0, 0)) & set(ppo.environment_seeds(64, 1, 0, 8))


def test_evaluation_in_a_fresh_process_repeats_the_one_after_training(trained):
    folder, path, _ = trained
    ended = run(folder, "--evaluate", path)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    assert list(result) == ["env_id", "mean", "std", "min", "max", "episodes", "length", "deterministic"]
    assert result == json.loads((run_directories(folder)[0] / "summary.json").read_text())["evaluation"]
    assert result["env_id"] == "Hopper-v4" and result["episodes"] == 10 and result["deterministic"] is True
    assert result["min"] <= result["mean"] <= result["max"] and "mean" in ended.stdout.splitlines()[1]
    assert len(run_directories(folder)) == 1
    evaluations = read_scalars(folder)["eval/episodic_return"]
    assert [step for step, _ in evaluations] == [256, 512]
    assert evaluations[-1][1] == pytest.approx(result["mean"], rel=1e-6)


def test_sampled_actions_score_differently_and_flags_change_the_evaluation(trained):
    model = ppo.load_model(trained[1])
    mean, sampled = (ppo.evaluate(model, 6, deterministic) for deterministic in (True, False))
    assert mean["mean"] != sampled["mean"] and sampled["deterministic"] is False and mean["episodes"] == 6
    assert ppo.evaluate(model, 6, True) == mean


def test_an_evaluation_is_the_policy_stepped_by_hand_for_the_first_episodes_of_each_environment(monkeypatch):
    args, rng = ppo.Args(env_id="Hopper-v4", num_envs=4), np.random.default_rng(1)
    pool = ppo.make_pool("Hopper-v4", 4, seeds := ppo.environment_seeds(4, args.seed, 1, 0))
    state = ppo.make_state(args, task := ppo.make_task(pool))
    params = jax.tree.map(lambda p: p + np.float32(rng.normal(0, 0.3, p.shape)), state.agent.params)
    state = state.replace(agent=state.agent.replace(params=params))
    policy = ppo.Policy(task, state.agent, ppo.freeze(state.wrappers))
    (obs, _), running, returns = pool.reset(), np.zeros(4), [[] for _ in range(4)]
    while min(map(len, returns)) < 4:
        obs, reward, terminated, truncated, info = pool.step(policy(obs).astype(np.float64))
        running = np.where(info["elapsed_step"] == 0, 0, running + reward)
        for i in np.flatnonzero(terminated | truncated):
            returns[i].append((running[i], info["elapsed_step"][i]))
    assert max(map(len, returns)) > 4  # one environment was faster than another
    expected, lengths = np.array([of_env[:4] for of_env in returns]).reshape(-1, 2).T
    films = []
    monkeypatch.setattr(ppo, "film", lambda *film: films.append(film))
    found = ppo.evaluate(ppo.Model(args, task, state), 16, True, "path.mp4")
    np.testing.assert_allclose([found["mean"], found["std"]], [expected.mean(), expected.std()], rtol=1e-4)
    assert found["length"] == lengths.mean()
    ((path, _, seed, actions),) = films  # the first episode of the first environment
    assert (path, seed, len(actions)) == ("path.mp4", seeds[0], lengths[0])


def test_an_episode_that_its_task_never_ends_counts_as_far_as_the_limit():
    args = ppo.Args(env_id="LaneKeeping-v0", num_envs=2)  # EnvPool's: 200 steps an episode, but it goes on
    task = ppo.make_task(ppo.make_pool(args.env_id, 2, [1, 2]))
    assert ppo.evaluate(ppo.Model(args, task, ppo.make_state(args, task)), 2, True)["length"] == 200


def test_a_signal_in_the_last_step_of_an_evaluation_keeps_its_score_but_is_not_kept_waiting_by_a_film(monkeypatch):
    args = ppo.Args(env_id="LaneKeeping-v0", num_envs=1)
    task = ppo.make_task(ppo.make_pool(args.env_id, 1, [1]))
    stop, receive_step, steps = ppo.StopSignal(), ppo.receive_step, []

    def receive_a_signal_too(state, answer):
        steps.append(answer)
        stop.received = signal.SIGINT if len(steps) == 200 else None
        return receive_step(state, answer)

    monkeypatch.setattr(ppo, "receive_step", receive_a_signal_too)
    monkeypatch.setattr(ppo, "film", lambda *film: pytest.fail("filmed"))
    found = ppo.evaluate(ppo.Model(args, task, ppo.make_state(args, task)), 1, True, "path.mp4", stop)
    assert found["length"] == len(steps) == 200


def test_evaluation_moves_neither_statistics_nor_parameters(trained):
    before, after = (ppo.load_model(trained[1]) for _ in range(2))
    ppo.evaluate(after, 2, True)
    assert leaves_equal(before.state, after.state)
    wrappers = ppo.freeze(after.state.wrappers)
    moved, _ = ppo.fold(wrappers, "reset", 100 * jnp.ones((3, 11), jnp.float32))
    assert leaves_equal(moved[3].rms, wrappers[3].rms) and wrappers[3].learn is False


def test_evaluating_and_saving_on_the_way_do_not_move_training_by_a_bit(trained, tmp_path):
    ended = run(tmp_path, *TINY, "--env-id", "Hopper-v4", "--no-save-model")
    assert ended.returncode == 0 and not list(tmp_path.glob("runs/*/*.cleanrl_model"))
    with_, without = (
        {k: v for k, v in read_scalars(f).items() if k[:4] != "eval" and "SPS" not in k} for f in (trained[0], tmp_path)
    )
    assert with_ == without


def test_a_task_of_other_sizes_is_refused(trained):
    args, sizes, state = ppo.load_model(trained[1])
    with pytest.raises(ppo.BadInput, match="sizes here are not those"):
        ppo.evaluate(ppo.Model(dataclasses.replace(args, env_id="HalfCheetah-v4"), sizes, state), 2, True)


def test_a_full_disk_while_saving_warns_and_keeps_the_old_file(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = ppo.load_model(saved[0])
    with ppo.RunLog(ARGS, ppo.make_run_directory(ARGS), ppo.StopSignal()) as log:
        log.start()
        log.save(model)
        before = Path(log.model_path).read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(ppo.os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.warns(UserWarning, match="not saved \\(No space left on device\\); training goes on"):
                log.save(model)
        assert Path(log.model_path).read_bytes() == before
        assert not list(tmp_path.glob("runs/*/*.tmp"))


def test_write_atomically_keeps_the_old_file_when_writing_fails(tmp_path, monkeypatch):
    path = str(tmp_path / "file")
    ppo.write_atomically(path, b"old")
    monkeypatch.setattr(ppo.os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        ppo.write_atomically(path, b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    monkeypatch.undo()
    ppo.write_atomically(path, b"new")
    assert (tmp_path / "file").read_bytes() == b"new" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_is_due_at_the_end_and_every_so_many_iterations():
    assert [k for k in range(1, 21) if ppo.is_due(k, 0, ARGS)] == [20]
    assert [k for k in range(1, 21) if ppo.is_due(k, 6, ARGS)] == [6, 12, 18, 20]


def test_load_agent_acts_on_one_or_many_in_the_tasks_bounds_without_envpool(trained):
    code = (
        "import sys, numpy as np, ppo_continuous_action_envpool_xla_jax_scan as ppo\n"
        "policy = ppo.load_agent(sys.argv[1])\n"
        "many = policy(np.random.default_rng(0).normal(size=(5, 11)))\n"
        "one = policy(np.random.default_rng(0).normal(size=(5, 11))[0])\n"
        "assert many.shape == (5, 3) and one.shape == (3,) and np.allclose(many[0], one, atol=1e-6)\n"
        "assert np.abs(policy(1e6 * np.ones(11))).max() <= 1 and isinstance(one, np.ndarray)\n"
        "assert 'envpool' not in sys.modules\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, trained[1]], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_loaded_policy_takes_the_mean_by_the_saved_statistics(trained):
    state, obs = ppo.load_model(trained[1]).state, np.random.default_rng(0).normal(size=(5, 11))
    mean, var = (np.asarray(x) for x in (state.wrappers[3].rms.mean, state.wrappers[3].rms.var))
    normalized = np.float32(np.clip((obs - mean) / np.sqrt(var + 1e-8), -10, 10))
    (action, _), _ = state.agent.network.apply(state.agent.params, normalized)
    np.testing.assert_allclose(ppo.load_agent(trained[1])(obs), np.clip(action, -1, 1), atol=1e-5)


def test_policy_refuses_observations_of_another_task_in_one_line(trained):
    policy = ppo.load_agent(trained[1])
    for obs in (np.zeros(17), np.zeros((2, 17)), np.zeros(()), {"a": np.zeros(11)}):
        with pytest.raises(ppo.BadInput, match=r"shapes .* has {'': \(11,\)}"):
            policy(obs)


def test_policy_takes_dicts_and_maps_to_the_bounds():
    sizes = ppo.Task({"height": (), "velocity": (2,)}, np.float32([-2]), np.float32([4]))
    state = ppo.make_state(dataclasses.replace(ARGS, norm_reward=False), sizes)
    agent = state.agent.replace(params=jax.tree.map(lambda p: jnp.zeros_like(p), state.agent.params))
    policy = ppo.Policy(sizes, agent, ppo.freeze(state.wrappers))
    np.testing.assert_allclose(policy({"height": 1.0, "velocity": np.ones(2)}), [1.0])  # the middle of [-2, 4]
    np.testing.assert_allclose(policy({"height": np.ones(3), "velocity": np.ones((3, 2))}), [[1.0]] * 3)


def test_act_samples_with_a_key_and_takes_the_mean_without():
    agent = start()[1].agent
    obs = jnp.zeros((20_000, 1), jnp.float32)
    mean, sample = ppo.act(agent, obs), ppo.act(agent, obs, jax.random.PRNGKey(0))
    assert (mean == mean[:1]).all() and sample.std() == pytest.approx(np.exp(-0.5), rel=0.02)


def test_tensorboard_of_a_resumed_run_is_one_directory(trained):
    assert read_events(run_directories(trained[0])[0]).Tags()["scalars"]
