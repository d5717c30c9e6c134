"""Run the script in a process of its own, and read what it leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path

from conftest import ROOT

SCRIPT = ROOT / "ppo_continuous_action_envpool_xla_jax_scan.py"
TINY = "--num-envs 4 --num-steps 16 --num-minibatches 4 --update-epochs 2 --total-timesteps 512 --eval-episodes 1".split()


def command(*flags, script=SCRIPT):
    return [sys.executable, str(script), *flags]


def run(cwd, *flags, script=SCRIPT, **env):
    """The finished process, with its output as text."""
    env = os.environ | {"COLUMNS": "200"} | env
    return subprocess.run(command(*flags, script=script), cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def run_directories(cwd):
    return sorted(Path(cwd, "runs").iterdir())


def read_summary(cwd):
    (directory,) = run_directories(cwd)
    return json.loads((directory / "summary.json").read_text())


def read_events(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    return events.Reload()


def read_scalars(cwd):
    """{tag: [(step, value), ...]} of the only run below `cwd`."""
    (directory,) = run_directories(cwd)
    events = read_events(directory)
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
