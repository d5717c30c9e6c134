"""Faults that really happen to a run - a full disk, a folder, server or reader that goes, NaN, an episode without end - and
what is left of it: training goes on, or one line says why not, and what was saved before stays whole."""

import http.server
import json
import os
import pty
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import struct

import ppo_continuous_action_envpool_xla_jax_scan as ppo
from runs import SCRIPT, TINY, command, read_events, read_scalars, read_summary, run, run_directories
from test_run import read_wandb

HOPPER = [*TINY, "--env-id", "Hopper-v4"]
ENDLESS = [*TINY, "--env-id", "HalfCheetah-v4", "--env-kwargs", "max_episode_steps=100000"]
SLOW = pytest.mark.slow
NO_THREAD_COMPLAINS = pytest.mark.filterwarnings("always", "error::pytest.PytestUnhandledThreadExceptionWarning")
FILM = "--capture-video --eval-episodes 1 --env-kwargs max_episode_steps=20".split()


def model_in(folder):
    (path,) = Path(folder).glob("runs/*/*.cleanrl_model")
    return path


def is_sound(model):
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(model.state))


def shell(cwd, line, *flags):
    """Run a line of bash in which "$@" is the script with these flags."""
    return subprocess.run(["bash", "-c", line, "bash", *command(*flags)], cwd=cwd, capture_output=True, text=True, timeout=300)


def before_iteration(monkeypatch, number, fault):
    """Have a function called before an iteration of training."""
    train_iteration = ppo.train_iteration

    def faulty(state, env, args):
        if state.iteration == number - 1:
            fault()
        return train_iteration(state, env, args)

    monkeypatch.setattr(ppo, "train_iteration", faulty)


@NO_THREAD_COMPLAINS
def test_files_that_cannot_grow_cost_a_run_what_it_was_to_save_a_line_for_each_and_its_status(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    limits, saved = resource.getrlimit(resource.RLIMIT_FSIZE), []

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        saved.append(model_in(tmp_path).read_bytes())

    before_iteration(monkeypatch, 3, limit)
    try:
        with pytest.warns(
            UserWarning, match="not saved"
        ) as warned:  # a first evaluation, for JAX's cache to be written before
            assert ppo.main([*HOPPER, "--checkpoint-frequency", "1", "--eval-frequency", "1"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    lost = dict.fromkeys([f"{run_directories('.')[0]}/events.out.tfevents.*", str(model_in("."))], "File too large")
    said = [str(w.message) for w in warned if "not saved" in str(w.message)]
    assert sorted(said) == [f"{path}: not saved ({why}); training goes on" for path, why in lost.items()]
    assert model_in(".").read_bytes() == saved[0] and len(list(run_directories(".")[0].iterdir())) == 3
    summary, losses = read_summary("."), read_scalars(".")["losses/loss"]
    assert summary["status"] == "finished" and summary["global_step"] == 512 and summary["not_saved"] == lost
    assert 128 <= losses[-1][0] < 512 and len(losses) == losses[-1][0] / 64
    out, err = capfd.readouterr()
    assert err == "" and out.splitlines()[-1].startswith("finished: return ")


# A disk of its own, with one page left.
ON_A_FULL_DISK = """
    exec unshare -rm bash -c '
    mkdir disk && mount -t tmpfs -o size=2m tmpfs disk && cp -r runs disk && cd disk || exit 99
    head -c 9M /dev/zero >filler 2>&- ; truncate -s -4k filler
    "$@" ; status=$? ; rm filler && cp -r . ../after ; exit $status' bash "$@"
"""


@SLOW
def test_a_full_disk_keeps_the_model_and_the_summary_that_it_has(tmp_path):
    assert run(tmp_path, *HOPPER).returncode == 0
    before = model_in(tmp_path)
    ended = shell(
        tmp_path,
        ON_A_FULL_DISK,
        *("--resume", str(before.relative_to(tmp_path)), "--total-timesteps", "2048", "--checkpoint-frequency", "1"),
        "--capture-video",
    )
    if ended.returncode == 99:
        pytest.skip(f"no disk can be mounted here: {ended.stderr}")
    said = re.findall(r"UserWarning: .*/(.*): not saved \((.*)\)", ended.stderr)
    why = "No space left on device"
    assert sorted(said) == [("events.out.tfevents.*", why), (before.name, why), ("summary.json", why)], ended.stderr
    assert ended.returncode == 1 and "Traceback" not in ended.stderr and ended.stderr.count("not filmed: ") == 1
    assert ended.stdout.splitlines()[-1].startswith("finished: return ")
    after = model_in(tmp_path / "after")
    assert after.read_bytes() == before.read_bytes() and not list((tmp_path / "after").glob("**/*.tmp*"))
    assert read_summary(tmp_path / "after") == read_summary(tmp_path)  # the first leg's
    losses = [event.step for event in read_events(after.parent).Scalars("losses/loss")]
    assert 512 <= losses[-1] < 2048 and losses == list(range(64, losses[-1] + 64, 64))


def test_a_run_that_cannot_begin_its_log_ends_with_one_line_and_status_one(tmp_path):
    ended = shell(tmp_path, 'ulimit -f 0 && exec "$@" 2>&1 | cat', *HOPPER)
    assert ended.stdout.splitlines()[-1] == "error: [Errno 27] File too large"
    assert "Traceback" not in ended.stdout and [path.stat().st_size for path in run_directories(tmp_path)[0].iterdir()] == [0]


@NO_THREAD_COMPLAINS
def test_a_run_whose_folder_is_removed_trains_to_its_end_and_says_what_it_could_not_save(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    before_iteration(monkeypatch, 3, lambda: shutil.rmtree("runs"))
    with pytest.warns(UserWarning) as warned:
        assert ppo.main([*HOPPER, "--checkpoint-frequency", "1"]) == 1
    assert sorted(str(w.message).rpartition("/")[2] for w in warned) == [
        "events.out.tfevents.*: not saved (No such file or directory); training goes on",
        "ppo_continuous_action_envpool_xla_jax_scan.cleanrl_model: not saved (No such file or directory); training goes on",
        "summary.json: not saved (No such file or directory)",
    ]
    out, err = capfd.readouterr()
    assert err == "" and "step 512" in out and out.splitlines()[-1].startswith("finished: return ")
    assert not list(tmp_path.iterdir())


class Server(http.server.BaseHTTPRequestHandler):
    """As much of W&B as a run asks for."""

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        viewer = {"id": "1", "entity": "e", "username": "u", "flags": "{}", "teams": {"edges": []}}
        project = {"id": "1", "name": "p", "entity": {"id": "1", "name": "e"}}
        bucket = {"id": "1", "name": "r", "displayName": "r", "config": "{}", "historyLineCount": 0, "project": project}
        files = {"runID": "1", "uploadHeaders": [], "files": []}
        data = {"viewer": viewer, "upsertBucket": {"bucket": bucket, "inserted": True}, "createRunFiles": files}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": data}).encode())

    do_GET = do_PUT = do_POST

    def log_message(self, *_):
        pass


def test_wandb_gone_after_the_start_costs_a_run_no_more_than_its_timeout_and_its_record_stays_here(tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = {
            "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}",
            "WANDB_MODE": "online",
            "WANDB_API_KEY": "a" * 40,
        }
        process = subprocess.Popen(
            command(*HOPPER, "--track"),
            cwd=tmp_path,
            env=os.environ | settings | {"WANDB_FINISH_TIMEOUT": "6"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for line in process.stdout:
            if line.startswith("step 64 "):
                break
        server.shutdown()
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and "finished: return" in output and "Traceback" not in output, output
    assert output.count("Timed out finishing run") == output.count("Use `wandb sync`") == 1
    assert read_summary(tmp_path)["status"] == "finished" and read_scalars(tmp_path)["losses/loss"][-1][0] == 512
    (path,) = tmp_path.glob("wandb/run-*/run-*.wandb")
    rows = [{item.nested_key[0] for item in r.history.item} for r in read_wandb(path) if r.HasField("history")]
    assert sum("losses/loss" in row for row in rows) == 8


@pytest.mark.parametrize(("asked", "seconds"), [(None, 600), ("7", 7)])
def test_a_tracked_run_waits_ten_minutes_for_wandb_or_as_the_user_says(asked, seconds, monkeypatch):
    import wandb

    monkeypatch.setattr(wandb, "init", lambda **arguments: arguments["settings"].finish_timeout)
    monkeypatch.delenv("WANDB_FINISH_TIMEOUT", raising=False)
    if asked:
        monkeypatch.setenv("WANDB_FINISH_TIMEOUT", asked)
    wandb.teardown()  # or it does not read the variable again
    assert ppo.start_wandb(ppo.Args(), "run") == seconds
    wandb.teardown()


class Poison(ppo.EnvWrapper):
    """At one step, one of the environments' numbers becomes NaN: what is sent to them, or what they answer."""

    what: str = struct.field(pytree_node=False)
    step: jax.Array
    at: int = struct.field(pytree_node=False, default=16 * 2 + 5)  # in the third iteration

    def spoil(self, what, x):
        return jnp.where((self.step == self.at) & (self.what == what), x.at[(0,) * x.ndim].set(jnp.nan), x)

    def send(self, action):
        return self.replace(step=self.step + 1), self.spoil("action", action)

    def recv(self, step):
        return self, step._replace(obs=self.spoil("observation", step.obs), reward=self.spoil("reward", step.reward))


def poisoned_optimizer(args, original=ppo.make_optimizer):
    """At the last of the third iteration's eight steps, one entry of the gradient is NaN."""

    def update(grads, state):
        return original(args).update(grads.at[0].set(jnp.where(state[1].count == 23, jnp.nan, grads[0])), state)

    return optax.GradientTransformation(original(args).init, update)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        pytest.param("action", "loss, parameter, reward", marks=SLOW),
        ("observation", "loss, observation, parameter, reward"),
        pytest.param("reward", "loss, parameter, reward", marks=SLOW),
        pytest.param("gradient", "parameter", marks=SLOW),
    ],
)
def test_nan_ends_the_run_at_its_iteration_by_name_and_the_last_model_is_sound(what, named, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    if what == "gradient":
        monkeypatch.setattr(ppo, "make_optimizer", poisoned_optimizer)
    else:
        make_wrappers = ppo.make_wrappers
        monkeypatch.setattr(ppo, "make_wrappers", lambda *a: (Poison(what, jnp.zeros((), jnp.int32)), *make_wrappers(*a)))
    flags = [*TINY, "--env-id", "HalfCheetah-v4", "--checkpoint-frequency", "1"]
    assert ppo.main(flags) == 1
    assert capfd.readouterr().err == f"error: iteration 3: not finite: {named}\n"
    model = ppo.load_model(str(model_in(tmp_path)))
    assert model.state.iteration == 2 and is_sound(model)
    assert read_summary(tmp_path)["status"] == "failed" and read_scalars(tmp_path)["losses/loss"][-1][0] == 192


@SLOW
def test_a_path_with_spaces_and_letters_of_other_alphabets_is_a_path_like_any_other(tmp_path):
    folder = tmp_path / "Ünï cödé 模型 'x' & \"y\""
    folder.mkdir()
    script = shutil.copy(SCRIPT, folder / "mein Лernen $HOME.py")
    ended = run(folder, *HOPPER, *FILM, script=script)
    assert ended.returncode == 0, ended.stderr
    model = model_in(folder)
    assert model.name == "mein Лernen $HOME.cleanrl_model" and read_summary(folder)["args"]["exp_name"] == "mein Лernen $HOME"
    assert list(folder.glob("videos/*/step-512.mp4")) or "libegl-mesa0" in ended.stderr
    for flags in (["--resume", str(model), "--total-timesteps", "576"], ["--evaluate", str(model.relative_to(folder))]):
        ended = run(folder, *flags, script=script)
        assert ended.returncode == 0 and ended.stderr.count("\n") == ended.stderr.count("not filmed"), ended.stderr
    assert read_summary(folder)["global_step"] == 576 and json.loads(ended.stdout.splitlines()[-1])["env_id"] == "Hopper-v4"


@SLOW
def test_a_home_that_cannot_be_written_is_not_needed_tracked_or_not(tmp_path):
    # Below a file that is no directory not even root can write.
    nowhere = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"), "/dev/null/home")
    ended = run(tmp_path, *HOPPER, "--track", WANDB_MODE="offline", **nowhere)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr and "not saved" not in ended.stderr, ended.stderr
    assert read_summary(tmp_path)["status"] == "finished" and ppo.load_model(str(model_in(tmp_path))).state.iteration == 8


@pytest.mark.skipif(not os.path.isdir("/sys/kernel"), reason="needs a folder that not even root can write")
def test_a_folder_that_cannot_be_written_is_bad_input(monkeypatch, capfd):
    monkeypatch.chdir("/sys/kernel")
    assert ppo.main(HOPPER) == 2
    out, err = capfd.readouterr()
    assert out == "" and re.fullmatch(r"error: runs/Hopper-v4__\S+: cannot be made here \(\w.*\)\n", err)


LOST_OUTPUT = {
    "its reader goes": '"$@" | head -1; exit ${PIPESTATUS[0]}',
    "the disk is full": 'exec "$@" >/dev/full',
    "it is closed": 'exec "$@" >&-',
}


@pytest.mark.parametrize("how", ["its reader goes", *(pytest.param(h, marks=SLOW) for h in [*LOST_OUTPUT][1:])])
def test_output_that_no_one_can_read_costs_a_run_nothing(how, tmp_path):
    ended = shell(tmp_path, LOST_OUTPUT[how], *HOPPER)
    assert ended.returncode == 0 and ended.stderr == "" and ended.stdout.count("\n") == (how == "its reader goes")
    summary = read_summary(tmp_path)
    assert summary["status"] == "finished" and summary["evaluation"] and summary["not_saved"] == {}
    assert ppo.load_model(str(model_in(tmp_path))).state.iteration == 8


@SLOW
def test_a_terminal_that_goes_takes_only_the_progress_bar_with_it(tmp_path):
    terminal, its_other_end = pty.openpty()
    env = os.environ | {"TERM": "xterm"}
    with open(tmp_path / "error", "w") as error:
        process = subprocess.Popen(
            command(*HOPPER, "--total-timesteps", "12800"), cwd=tmp_path, stdout=its_other_end, stderr=error, env=env
        )
    os.close(its_other_end)
    shown = b""
    while b"SPS" not in shown:
        shown += os.read(terminal, 1000)
    os.close(terminal)
    assert process.wait(timeout=100) == 0 and (tmp_path / "error").read_text() == ""
    assert read_summary(tmp_path)["status"] == "finished" and model_in(tmp_path)


@SLOW
def test_ctrl_c_that_ends_who_reads_the_output_too_saves_the_agent(tmp_path):
    line = 'exec 9< <(exec "$@" --total-timesteps 100000000 2>&1); grep -m 1 ^step <&9; exec 9<&-; kill -INT $!; wait $!'
    ended = shell(tmp_path, line, *HOPPER)
    assert ended.returncode == 130 and read_summary(tmp_path)["reason"] == "SIGINT"
    assert ppo.load_model(str(model_in(tmp_path))).state.iteration * 64 == read_summary(tmp_path)["global_step"]


@pytest.mark.parametrize(
    ("flags", "number", "seen", "expected"),
    [
        (ENDLESS, signal.SIGINT, "runs/*/*.cleanrl_model", ("finished", 512)),
        pytest.param(
            [*ENDLESS, "--eval-frequency", "2", "--checkpoint-frequency", "2"],
            signal.SIGTERM,
            "runs/*/*.cleanrl_model",
            ("stopped", 128),
            marks=SLOW,
        ),
        pytest.param([*TINY, *FILM[:3]], signal.SIGINT, "videos/*/*.tmp.mp4", ("finished", 512), marks=SLOW),
    ],
    ids=["the last evaluation", "an evaluation on the way", "a film"],
)
def test_a_signal_ends_an_evaluation_or_a_film_that_would_take_hours(flags, number, seen, expected, tmp_path):
    process = subprocess.Popen(command(*flags), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while process.poll() is None and not list(tmp_path.glob(seen)):
        time.sleep(0.01)
    time.sleep(1)
    if process.poll() is not None and "libegl-mesa0" in (output := process.stdout.read()):
        pytest.skip(output)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    summary = read_summary(tmp_path)
    assert process.returncode == 128 + number and "Traceback" not in output, output
    assert (summary["status"], summary["global_step"]) == expected and summary["reason"] == number.name
    assert summary["evaluation"] is None and "return - over the last 0 episodes" in output
    assert ppo.load_model(str(model_in(tmp_path))).state.iteration * 64 == expected[1]
    assert not list(tmp_path.glob("videos/*/*"))


@pytest.mark.parametrize("num_envs", [1, pytest.param(4096, marks=SLOW)])
def test_one_environment_and_four_thousand_train_save_and_evaluate(num_envs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = f"--num-envs {num_envs} --num-steps 4 --num-minibatches 4 --update-epochs 1 --eval-episodes 1 --env-id Hopper-v4"
    assert ppo.main([*flags.split(), "--total-timesteps", str(num_envs * 4 * 3)]) == 0
    model = ppo.load_model(str(model_in(tmp_path)))
    assert model.state.iteration == 3 and is_sound(model) and len(model.state.wrappers[0].episode_return) == num_envs


@SLOW
def test_memory_is_flat_over_two_thousand_iterations(tmp_path, monkeypatch):
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    sizes = []
    monkeypatch.chdir(tmp_path)
    for number in (200, 2000):
        before_iteration(monkeypatch, number, lambda: sizes.append(resident()))
    assert ppo.main([*HOPPER, "--total-timesteps", str(64 * 2000), "--checkpoint-frequency", "50"]) == 0
    print(f"{sizes[0]} pages, then {sizes[1]}")
    assert sizes[1] < 1.05 * sizes[0]
