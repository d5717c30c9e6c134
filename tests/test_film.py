"""Films of evaluations: what they show and at what pace, and that a rendering fault loses no run."""

import importlib.util
import itertools
import json
import subprocess

import gymnasium
import numpy as np
import pytest

import ppo_continuous_action_envpool_xla_jax_scan as ppo
from conftest import ROOT
from runs import TINY, command, read_scalars, read_summary, run, run_directories

FILMED = [*TINY, *"--capture-video --env-kwargs max_episode_steps=50 --eval-episodes 2".split()]


def read_film(path):
    import imageio

    with imageio.get_reader(path) as reader:
        return np.stack(list(reader.iter_data())), reader.get_meta_data()["fps"]


@pytest.mark.filterwarnings("ignore:os.fork")  # of the reader here, which JAX watches
def test_an_evaluation_is_filmed_step_by_step_at_the_tasks_pace_and_tracked(tmp_path):
    ended = run(tmp_path, *FILMED, "--track", WANDB_MODE="offline")
    assert ended.returncode == 0, ended.stderr
    if "libegl-mesa0" in ended.stderr:
        pytest.skip(ended.stderr)
    path = tmp_path / "videos" / run_directories(tmp_path)[0].name / "step-512.mp4"
    assert list(path.parent.iterdir()) == [path] and f"filmed: {path.relative_to(tmp_path)}" in ended.stdout
    frames, fps = read_film(path)
    assert fps == 20 and frames.shape == (50, 480, 480, 3)
    assert all(frame.std() > 10 for frame in frames)  # none is blank
    assert all((a != b).any() for a, b in itertools.pairwise(frames))
    (tracked,) = tmp_path.glob("wandb/offline-run-*/files/media/videos/*.mp4")
    film = path.read_bytes()
    assert tracked.read_bytes() == film

    (model,) = tmp_path.glob("runs/*/*.cleanrl_model")
    small_files = ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash"]  # of 8 kB; ffmpeg keeps quiet about it
    evaluation = [*small_files, *command("--evaluate", str(model), "--capture-video")]
    ended = subprocess.run(evaluation, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0 and json.loads(ended.stdout.splitlines()[-1])["episodes"] == 2
    assert "not filmed: OSError: the film is not whole" in ended.stderr and "GL" not in ended.stderr
    assert list(path.parent.iterdir()) == [path] and path.read_bytes() == film


def test_without_opengl_a_run_finishes_and_one_line_names_the_package(tmp_path):
    ended = run(tmp_path, *FILMED, __EGL_VENDOR_LIBRARY_FILENAMES=str(tmp_path / "none"))
    (line,) = [line for line in ended.stderr.splitlines() if "not filmed" in line]
    assert line.startswith("videos/HalfCheetah-v4__") and line.endswith("apt install libegl-mesa0 libgl1-mesa-dri")
    assert ended.returncode == 0 and read_summary(tmp_path)["status"] == "finished"
    assert read_scalars(tmp_path)["eval/episodic_return"][0][0] == 512
    assert not list(tmp_path.glob("videos/*/*"))
    (model,) = tmp_path.glob("runs/*/*.cleanrl_model")
    (tmp_path / "videos").rename(tmp_path / "elsewhere")
    (tmp_path / "videos").write_text("in the way")
    evaluated = run(tmp_path, "--evaluate", str(model), "--capture-video")
    assert evaluated.returncode == 0 and "not filmed: " in evaluated.stderr and len(evaluated.stderr.splitlines()) == 1
    assert json.loads(evaluated.stdout.splitlines()[-1])["episodes"] == 2


@pytest.mark.slow
def test_a_program_without_a_guard_is_not_run_again_by_its_film(tmp_path):
    program = tmp_path / "program.py"
    arguments = "num_envs=4, num_steps=16, num_minibatches=4, total_timesteps=64, eval_episodes=1, capture_video=True"
    program.write_text(f"import {ppo.__name__} as ppo\nppo.train(ppo.Args({arguments}, env_id='Hopper-v4'))")
    ended = run(tmp_path, script=program, PYTHONPATH=str(ROOT))
    assert ended.returncode == 0 and len(run_directories(tmp_path)) == 1
    assert "libegl-mesa0" in ended.stderr or list(tmp_path.glob("videos/*/step-64.mp4"))


def test_a_film_that_is_not_whole_or_whose_process_is_killed_leaves_one_line_and_no_file(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    path = "videos/run/step-1.mp4"

    def film(stderr, status):
        ended = subprocess.CompletedProcess([], status, "", stderr)
        (tmp_path / "videos/run").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{path}.tmp.mp4").write_text("half")
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
        ppo.film(path, ppo.Args(), 1, [np.zeros(6, np.float32)])
        assert not list((tmp_path / "videos/run").iterdir())
        return capfd.readouterr().err

    assert film("Traceback\nOSError: is the disk full?\n", 1) == f"{path}: not filmed: OSError: is the disk full?\n"
    assert film("", -9) == f"{path}: not filmed: its process ended with -9\n"


def test_films_need_imageio_and_say_so_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ppo.check_camera()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ppo.BadInput, match=r"capture_video=True: needs imageio; pip install 'imageio\[ffmpeg\]'"):
        ppo.train(ppo.Args(capture_video=True))
    assert not list(tmp_path.iterdir())


def test_an_environment_depends_on_its_own_seed_alone_so_that_a_filmed_episode_is_the_evaluated_one():
    many, one = (ppo.make_pool("Hopper-v4", len(seeds), seeds) for seeds in ([5, 6, 7], [5]))
    assert (many.reset()[0][0] == one.reset()[0][0]).all()
    for action in np.random.default_rng(0).uniform(-1, 1, (60, 3, 3)):
        (obs, reward, *ends, _), (filmed_obs, filmed_reward, *filmed_ends, _) = many.step(action), one.step(action[:1])
        assert (obs[0] == filmed_obs[0]).all() and reward[0] == filmed_reward[0]
        assert [end[0] for end in ends] == [end[0] for end in filmed_ends]


@pytest.mark.parametrize("task", "Ant HalfCheetah Hopper Humanoid Pusher Swimmer Walker2d InvertedPendulum".split())
def test_frame_rates_are_gymnasiums(task):
    import envpool

    expected = gymnasium.make(f"{task}-v5").unwrapped.metadata["render_fps"]
    for version in ("v4", "v5"):
        config = envpool.make_spec(f"{task}-{version}").config
        assert round(ppo.frame_rate(config, f"{task}-{version}")) == expected
    assert ppo.frame_rate(envpool.make_spec(f"{task}-v4", frame_skip=1).config, f"{task}-v4") > expected


@pytest.mark.parametrize(
    ("env_id", "fps"),
    [("BallInCupCatch-v1", 50), ("HumanoidCMUStand-v1", 50), ("CheetahRun-v1", 100), ("Go1Getup-v1", 50), ("Pendulum-v1", 30)],
)
def test_frame_rates_of_other_suites(env_id, fps):
    import envpool

    assert ppo.frame_rate(envpool.make_spec(env_id).config, env_id) == pytest.approx(fps)
