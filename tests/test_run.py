"""What a run leaves behind: TensorBoard's scalars and text, W&B's record, the summary, the terminal's lines."""

import ctypes
import dataclasses
import gc
import json
import os
import re
import shutil
import signal
import struct
import sys
import threading

import jax
import numpy as np
import pytest

import ppo_continuous_action_envpool_xla_jax_scan as ppo
from runs import SCRIPT, TINY, read_events, read_scalars, read_summary, run, run_directories

ARGS = ppo.Args(num_envs=4, num_steps=16, num_minibatches=4, update_epochs=2, total_timesteps=512, env_id="Hopper-v4")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run: its folder, what `train` returned and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch, open(folder / "output", "w") as output:
        patch.chdir(folder)
        patch.setattr(sys, "stdout", output)
        summary = ppo.train(ARGS)
    return folder, summary, (folder / "output").read_text()


def report(returns=(), faults=(), lengths=0.0):
    """What an iteration might report: episodes that ended with these returns."""
    ended = np.zeros((2, 4), bool)
    ended.flat[: len(returns)] = True
    episode_return = np.zeros((2, 4), np.float32)
    episode_return.flat[: len(returns)] = returns
    mean = np.mean(returns) if returns else np.nan
    metrics = {"losses/loss": np.float32(0.5)}
    means = {"charts/episodic_return": mean, "charts/avg_episodic_return": mean}
    return ppo.Report(metrics, means, {name: name in faults for name in ("reward", "loss")}, ended, episode_return)


def test_scalars_carry_the_names_and_steps_that_readers_expect(finished):
    scalars = read_scalars(finished[0])
    charts = "episodic_return episodic_length num_episodes avg_episodic_return avg_episodic_length learning_rate SPS"
    losses = "value_loss policy_loss entropy loss old_approx_kl approx_kl clipfrac explained_variance grad_norm"
    expected = {f"charts/{name}" for name in (charts + " SPS_update action_std reset_fraction").split()}
    assert scalars.keys() == expected | {f"losses/{name}" for name in losses.split()} | {"eval/episodic_return"}
    steps = [64 * k for k in range(1, 9)]
    assert [step for step, _ in scalars["losses/loss"]] == steps
    assert [step for step, _ in scalars["eval/episodic_return"]] == [512]
    assert [step for step, _ in scalars["charts/SPS"]] == [step for step, _ in scalars["charts/SPS_update"]] == steps[1:]
    finished_at = [step for step, number in scalars["charts/num_episodes"] if number > 0]
    assert [step for step, _ in scalars["charts/episodic_return"]] == finished_at


def test_hyperparameters_are_a_text_panel(finished):
    events = read_events(run_directories(finished[0])[0])
    assert events.Tags()["tensors"] == ["hyperparameters/text_summary"]
    (event,) = events.Tensors("hyperparameters/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert text.startswith("|param|value|\n|-|-|\n|exp_name|") and "|env_id|Hopper-v4|" in text
    plugin = events.SummaryMetadata("hyperparameters/text_summary").plugin_data.plugin_name
    assert plugin == "text"


def test_train_returns_the_summary_that_it_wrote(finished):
    folder, summary, _ = finished
    assert json.loads(json.dumps(summary)) == read_summary(folder)
    assert summary["status"] == "finished" and summary["reason"] is None and summary["global_step"] == 512
    assert summary["args"] == dataclasses.asdict(ARGS)
    assert summary["run_name"] == run_directories(folder)[0].name
    assert summary["versions"]["jax"] == jax.__version__ and summary["versions"] == ppo.versions()
    assert summary["SPS"] == pytest.approx(read_scalars(folder)["charts/SPS"][-1][1], rel=1e-5)
    assert summary["num_returns"] == sum(number for _, number in read_scalars(folder)["charts/num_episodes"])
    assert summary["wall_time"] > 0 and "cores" in summary["machine"] and summary["command"]


def test_piped_output_is_an_opening_some_steps_and_a_closing_line(finished):
    lines = finished[2].splitlines()
    assert lines[0].startswith("Hopper-v4__") and "jax " in lines[1] and "EnvPool threads" in lines[1] and "cpu" in lines[1]
    assert len(lines) == 2 + 8 + 1
    assert re.fullmatch(r"step 512  return [\d.]+  SPS [\d,]+", lines[-2])
    assert re.fullmatch(r"finished: return [\d.]+ over the last \d+ episodes, \d+ s, [\d,]+ SPS", lines[-1])


def test_long_runs_print_about_twenty_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with ppo.RunLog(ppo.Args(), ppo.make_run_directory(ppo.Args()), ppo.StopSignal()) as log:
        log.start()
        for _ in range(1464):
            log.record(report())
    assert sum(line.startswith("step") for line in capsys.readouterr().out.splitlines()) == 21


def test_summary_averages_the_last_hundred_episodes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ppo.RunLog(ARGS, ppo.make_run_directory(ARGS), ppo.StopSignal()) as log:
        log.start()
        for first in range(0, 160, 8):
            log.record(report(tuple(range(first, first + 8))))
    assert log.summary["mean_return"] == np.mean(range(60, 160)) and log.summary["num_returns"] == 100
    assert log.summary["status"] == "stopped"  # twenty iterations are not the eight that were asked for


def test_a_run_without_a_finished_episode_has_no_score(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ppo.RunLog(ARGS, ppo.make_run_directory(ARGS), ppo.StopSignal()) as log:
        log.start()
        log.record(report())
    assert log.summary["mean_return"] is None and log.summary["SPS"] is None and log.sps is None
    assert read_scalars(tmp_path).keys() == {"losses/loss"}


def test_faults_end_the_run_by_name_after_logging_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FloatingPointError, match="iteration 2: not finite: reward"):  # noqa: SIM117
        with ppo.RunLog(ARGS, ppo.make_run_directory(ARGS), ppo.StopSignal()) as log:
            log.start()
            log.record(report((1.0,)))
            log.record(report((np.nan,), faults=["reward"]))
    summary = read_summary(tmp_path)
    assert summary["status"] == "failed" and "iteration 2" in summary["reason"]
    assert summary["mean_return"] == 1.0 and summary["global_step"] == 128
    assert [step for step, _ in read_scalars(tmp_path)["losses/loss"]] == [64, 128]


def test_runs_of_one_second_never_share_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ppo.time, "time", lambda: 1000.7)
    names = [ppo.make_run_directory(ARGS) for _ in range(3)]
    prefix = "runs/Hopper-v4__ppo_continuous_action_envpool_xla_jax_scan__1__"
    assert names == [prefix + second for second in ("1000", "1001", "1002")]
    slashed = ppo.make_run_directory(ppo.Args(env_id="MetaWorld/Reach-v3", exp_name="a/b"))
    assert slashed == "runs/MetaWorld-Reach-v3__a-b__1__1000"
    assert len(run_directories(tmp_path)) == 4


def test_signal_handlers_are_restored_after_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with ppo.StopSignal() as stop:
        assert signal.getsignal(signal.SIGINT) == stop.receive
        signal.raise_signal(signal.SIGTERM)
        assert stop.received == signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    with pytest.raises(ppo.BadInput):
        ppo.train(ppo.Args(env_id="CartPole-v1"))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_stop_signal_leaves_handlers_alone_outside_the_main_thread():
    before, seen = signal.getsignal(signal.SIGINT), []

    def enter():
        with ppo.StopSignal() as stop:
            seen.append((signal.getsignal(signal.SIGINT), stop.previous))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(before, {})]


def test_git_commit_is_that_of_the_scripts_repository(tmp_path, monkeypatch):
    def git(*command):
        ppo.subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b", *command], cwd=tmp_path, check=True)

    monkeypatch.setattr(ppo, "__file__", str(tmp_path / "script.py"))
    assert ppo.git_commit() is None
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    head = (tmp_path / ".git" / "HEAD").read_text().split()[1]
    assert ppo.git_commit() == (tmp_path / ".git" / head).read_text().strip()


def test_show_writes_a_dash_for_what_is_unknown():
    assert ppo.show(None, ".1f") == "-" and ppo.show(1234.56, ",.1f") == "1,234.6"


def test_write_scalars_and_table_are_what_tensorboard_reads(tmp_path):
    writer = ppo.make_writer(str(tmp_path))
    ppo.write_scalars(writer, {"a/b": 1.5}, step=7)
    ppo.write_table(writer, "t", {"x": 1})
    writer.close()
    events = read_events(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("a/b")] == [(7, 1.5)]
    assert events.Tensors("t/text_summary")[0].tensor_proto.string_val == [b"|param|value|\n|-|-|\n|x|1|"]


def read_wandb(path):
    """The records of an offline W&B run: LevelDB's log format, after a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, offset, part = path.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        left = 32768 - offset % 32768  # of the block
        if left < 7:
            offset += left
            continue
        length, kind = struct.unpack("<HB", data[offset + 4 : offset + 7])
        part += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(part)
            part = b""


def test_wandb_offline_records_config_scalars_global_step_tags_and_code(tmp_path):
    script = shutil.copy(SCRIPT, tmp_path)  # W&B saves the code of a program below the working directory
    ended = run(tmp_path, *TINY, "--env-id=Hopper-v4", "--track", script=script, WANDB_MODE="offline", WANDB_TAGS="a,b")
    assert ended.returncode == 0, ended.stderr
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    config, history, tags = {}, [], set()
    for record in read_wandb(path):
        if record.HasField("run"):
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            tags |= set(record.run.tags)
            assert record.run.project == "cleanRL" and record.run.display_name == run_directories(tmp_path)[0].name
        if record.HasField("history"):
            history.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
    assert config["env_id"] == "Hopper-v4" and config["seed"] == 1 and "exp_name" in config
    assert tags == {"a", "b"}
    rows = [row for row in history if "losses/loss" in row]
    assert [row["global_step"] for row in rows] == [64 * k for k in range(1, 9)]
    assert all("charts/SPS" in row for row in rows[1:])
    assert list(tmp_path.glob("wandb/offline-run-*/files/code/**/ppo_continuous_action_envpool_xla_jax_scan.py"))


def test_a_fault_of_the_writers_leaves_a_summary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ppo, "make_writer", lambda directory: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert ppo.main(TINY) == 1
    summary = read_summary(tmp_path)
    assert summary["status"] == "failed" and "No space left" in summary["reason"] and summary["global_step"] == 0


def test_runs_of_one_process_do_not_pile_up_threads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    threads = []
    for _ in range(3):
        ppo.train(dataclasses.replace(ARGS, num_threads=4, save_model=False))
        gc.collect()
        threads.append(len(os.listdir("/proc/self/task")))
    assert threads[2] <= threads[0] + 2  # a pool has five


def test_check_wandb_login_asks_for_none_offline(monkeypatch):
    import wandb

    class Setup:
        class settings:
            mode = "offline"

    monkeypatch.setattr(wandb, "setup", lambda: Setup)
    monkeypatch.setattr(wandb, "login", lambda prompt: False)
    assert ppo.check_wandb_login() is None
    Setup.settings.mode = "online"
    with pytest.raises(ppo.BadInput, match="WANDB_MODE=offline"):
        ppo.check_wandb_login()
    monkeypatch.setattr(wandb, "login", lambda prompt: True)
    assert ppo.check_wandb_login() is None
    monkeypatch.setattr(wandb, "login", lambda prompt: (_ for _ in ()).throw(ValueError("API key must be 40 characters")))
    with pytest.raises(ppo.BadInput, match="W&B refuses: API key must be 40 characters; or set WANDB_MODE=offline"):
        ppo.check_wandb_login()


@pytest.mark.skipif(sys.platform != "linux", reason="the C library's own affair")
def test_freed_memory_goes_back_to_the_system():
    def resident_mb() -> float:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    libc, size = ctypes.CDLL(None), 2**15
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(size) for _ in range(2**11)]  # 64 MB
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[:-1]:  # the last one keeps the C library from shrinking its heap by itself
        libc.free(block)
    before = resident_mb()
    ppo.return_free_memory()
    after = resident_mb()
    libc.free(blocks[-1])
    assert after < before - 30
