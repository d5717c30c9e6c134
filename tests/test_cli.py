"""The command line: help, bad input, signals, and a run that can be repeated."""

import os
import signal
import subprocess
import sys
import time

import pytest

import ppo_continuous_action_envpool_xla_jax_scan as ppo
from conftest import ROOT
from runs import TINY, command, read_scalars, read_summary, run, run_directories


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("num_envs", 0, "num_envs=0: must be at least 1"),
        ("num_steps", -1, "num_steps=-1: must be at least 1"),
        ("num_minibatches", 0, "num_minibatches=0: must be at least 1"),
        ("update_epochs", 0, "update_epochs=0: must be at least 1"),
        ("total_timesteps", -5, "total_timesteps=-5: must be at least 1"),
        ("total_timesteps", 2047, "total_timesteps=2047: must be at least one batch, num_envs * num_steps = 2048"),
        ("num_minibatches", 31, "num_minibatches=31: must divide the batch, num_envs * num_steps = 2048"),
        ("num_minibatches", 4096, "num_minibatches=4096: must divide the batch"),
        ("gamma", 1.01, "gamma=1.01: must lie in [0, 1]"),
        ("gamma", float("nan"), "gamma=nan: must lie in [0, 1]"),
        ("gae_lambda", -0.1, "gae_lambda=-0.1: must lie in [0, 1]"),
        ("learning_rate", -1e-3, "learning_rate=-0.001: must be finite and at least 0"),
        ("learning_rate", float("inf"), "learning_rate=inf: must be finite"),
        ("clip_coef", float("nan"), "clip_coef=nan: must be finite"),
        ("ent_coef", -1.0, "ent_coef=-1.0: must be finite and at least 0"),
        ("vf_coef", -1.0, "vf_coef=-1.0: must be finite and at least 0"),
        ("max_grad_norm", -1.0, "max_grad_norm=-1.0: must be finite and at least 0"),
        ("target_kl", -1.0, "target_kl=-1.0: must be finite and at least 0"),
        ("seed", -1, "seed=-1: must lie in [0, 2**31 - 1]"),
        ("seed", 2**31, "seed=2147483648: must lie in"),
        ("num_threads", -1, "num_threads=-1: must lie in [0, num_envs=64]"),
        ("num_threads", 65, "num_threads=65: must lie in [0, num_envs=64]"),
        ("env_kwargs", ("max_episode_steps",), "env_kwargs=max_episode_steps: must be key=value"),
        ("env_kwargs", ("max_episode_steps=0",), "env_kwargs=max_episode_steps=0: must be at least 1"),
        ("env_kwargs", ("frame_skip=-1",), "env_kwargs=frame_skip=-1: must be at least 1"),
        ("env_kwargs", ("frame_skip=0.5",), "env_kwargs=frame_skip=0.5: must be at least 1 and whole"),
        ("env_kwargs", ("frame_skip=True",), "env_kwargs=frame_skip=True: must be at least 1 and whole"),
        ("env_kwargs", ("a=1", "a=2"), "env_kwargs=a=2: a is given twice"),
        ("max_grad_norm", 0.0, "max_grad_norm=0: must be above 0"),
        (
            "total_timesteps",
            10**30,
            "total_timesteps=1000000000000000000000000000000: must be less than 2**31 batches of 2048",
        ),
        ("exp_name", "two\nlines", "exp_name='two\\nlines': must be printable"),
        ("exp_name", "\udcff", "exp_name='\\udcff': must be printable"),
        ("eval_episodes", 0, "eval_episodes=0: must be at least 1"),
        ("eval_frequency", -1, "eval_frequency=-1: must be at least 0"),
        ("checkpoint_frequency", -1, "checkpoint_frequency=-1: must be at least 0"),
    ],
)
def test_bad_arguments_are_named_with_what_would_do(flag, value, message):
    with pytest.raises(ppo.BadInput) as error:
        ppo.Args(**{flag: value})
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-minibatches", "31"], "num_minibatches=31"),
        (["--learning-rate", "fast"], "fast"),
        (["--no-such-flag"], "no-such-flag"),
        (["--env-id", "Hoper-v4"], "Hopper-v4"),
        (["--env-id", "CartPole-v1"], "Discrete"),
        (["--env-kwargs", "colour=1"], "colour"),
        (["--env-kwargs", "xml_file=none.xml"], "xml_file"),
        (["--env-kwargs", "frame_stack=0"], "frame_stack"),
        (["--exp-name", "x" * 300], "too long"),
    ],
)
def test_bad_input_ends_in_process_with_status_two_and_writes_nothing(flags, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    try:
        status = ppo.main(flags)
    except SystemExit as end:  # tyro's way
        status = end.code
    err = capfd.readouterr().err
    assert status == 2 and message in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_runs_that_cannot_be_written_end_with_status_two(tmp_path):
    (tmp_path / "runs").write_text("a file in the way")
    ended = run(tmp_path, *TINY)
    assert ended.returncode == 2 and "runs/" in ended.stderr and "Traceback" not in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_tracking_without_a_login_names_the_offline_mode(tmp_path):
    ended = run(tmp_path, "--track", *TINY, HOME=str(tmp_path / "home"), WANDB_MODE="online", WANDB_API_KEY="")
    assert ended.returncode == 2 and "WANDB_MODE=offline" in ended.stderr and "Traceback" not in ended.stderr
    assert not (tmp_path / "runs").exists() and not (tmp_path / "wandb").exists()


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as end:
        ppo.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0
    for name in ppo.Args.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in text
    assert "--no-track" in text and "num_envs" not in text
    assert text.count("(default:") == len(ppo.Args.__dataclass_fields__)


def test_defaults_are_those_of_the_design():
    args = ppo.Args()
    assert (args.env_id, args.total_timesteps, args.num_envs, args.num_steps) == ("HalfCheetah-v4", 3_000_000, 64, 32)
    assert (args.num_minibatches, args.update_epochs, args.learning_rate, args.anneal_lr) == (32, 10, 3e-4, True)
    assert (args.gamma, args.gae_lambda, args.clip_coef, args.norm_adv, args.clip_vloss) == (0.99, 0.95, 0.2, False, False)
    assert (args.ent_coef, args.vf_coef, args.max_grad_norm, args.target_kl) == (0.0, 0.25, 0.5, None)
    assert (args.norm_obs, args.norm_return, args.recompute_advantage, args.norm_reward) == (True, True, True, False)
    assert args.batch_size == 2048 and args.num_iterations == 1464


def test_importing_changes_nothing_but_x64(tmp_path):
    code = (
        "import jax, os, signal, threading, warnings\n"
        "before = (dict(os.environ), signal.getsignal(signal.SIGINT), threading.active_count(), warnings.filters[:])\n"
        "x64 = jax.config.jax_enable_x64\n"
        "settings = {name: jax.config._read(name) for name in jax.config.values}\n"
        "import ppo_continuous_action_envpool_xla_jax_scan as ppo\n"
        "after = {name: jax.config._read(name) for name in jax.config.values}\n"
        "assert {name for name in after if after[name] != settings.get(name, after[name])} == {'jax_enable_x64'}\n"
        "assert not x64 and jax.config.jax_enable_x64\n"
        "assert before[:3] == (dict(os.environ), signal.getsignal(signal.SIGINT), threading.active_count())\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "import sys; assert 'envpool' not in sys.modules and 'wandb' not in sys.modules\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.returncode == 0 and ended.stdout + ended.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_two_runs_of_one_seed_log_identical_scalars_and_no_warning(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        env = {"PYTHONWARNINGS": "error:::__main__", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}  # compiled as for users
        ended = run(tmp_path / name, *TINY, "--env-id", "Hopper-v4", **env)
        assert ended.returncode == 0 and ended.stderr == ""
    first, second = ({k: v for k, v in read_scalars(tmp_path / name).items() if "SPS" not in k} for name in ("a", "b"))
    assert first == second and len(first["losses/loss"]) == 8
    assert run_directories(tmp_path / "a")[0].name.startswith("Hopper-v4__ppo_continuous_action_envpool_xla_jax_scan__1__")


def interrupted(cwd, number, insist=False):
    """Start a run that would take long, send a signal after its first iteration, and return it ended, with its output.

    Python handles signals between two calls into JAX; those that come together count as one. Who insists sends them until
    the run has ended.
    """
    process = subprocess.Popen(
        command("--total-timesteps", "100000000"), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for line in process.stdout:
        if line.startswith("step"):
            break
    process.send_signal(number)
    while insist and process.poll() is None:
        time.sleep(0.002)
        process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_after_its_iteration_with_a_summary(number, status, tmp_path):
    returncode, output = interrupted(tmp_path, number)
    assert returncode == status and "Traceback" not in output and "stopped: return" in output
    summary = read_summary(tmp_path)
    assert summary["status"] == "stopped" and summary["reason"] == number.name
    losses = read_scalars(tmp_path)["losses/loss"]
    assert losses[-1][0] == summary["global_step"] == 2048 * len(losses)


def test_a_second_signal_ends_at_once(tmp_path):
    returncode, _ = interrupted(tmp_path, signal.SIGINT, insist=True)
    assert returncode == -signal.SIGINT


def test_main_returns_the_status_of_a_finished_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ppo.main(TINY) == 0
    assert read_summary(tmp_path)["status"] == "finished"


def test_a_run_that_meets_a_nan_fails_by_name_with_its_log_complete(tmp_path, monkeypatch, capfd):
    # A learning rate this large sends the parameters to infinity within an iteration or two.
    monkeypatch.chdir(tmp_path)
    assert ppo.main([*TINY, "--learning-rate", "1e38", "--no-anneal-lr"]) == 1
    err = capfd.readouterr().err
    summary = read_summary(tmp_path)
    iteration = summary["global_step"] // 64
    assert f"error: iteration {iteration}: not finite: " in err and "parameter" in err and "Traceback" not in err
    assert summary["status"] == "failed" and f"iteration {iteration}" in summary["reason"]
    assert read_scalars(tmp_path)["charts/learning_rate"][-1][0] == summary["global_step"]
