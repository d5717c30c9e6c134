"""Measure training steps per second: this script, Stable-Baselines3, SBX and tianshou, and raw EnvPool stepping.

    python benchmark/speed.py > benchmark/results/speed.md

Every measurement is a process of its own, one at a time. They alternate, so that a machine that slows down slows all of
them; the table gives medians. Each contender steps 64 environments by EnvPool, one thread a core, and trains with the
script's hyperparameters as far as it has them, with one thread of torch or XLA, which is the fastest for each; compilation
and the first iteration are left out. Needs requirements.txt and requirements-peers.txt;
a contender that is not installed gets a -.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "ppo_continuous_action_envpool_xla_jax_scan.py"
NUM_ENVS, NUM_STEPS = 64, 32
BATCH_SIZE = NUM_ENVS * NUM_STEPS
PACKAGES = ("jax", "flax", "optax", "torch", "envpool", "stable-baselines3", "sbx-rl", "tianshou")


class BadInput(ValueError):
    """What the user asked for cannot be done, in one line."""


def steps_per_second(iterate, seconds: float) -> float:
    """Call `iterate`, which makes one batch of steps, once to warm up and then for so many seconds."""
    iterate()
    start, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - start < seconds:
        iterate()
        count += 1
    return count * BATCH_SIZE / (time.perf_counter() - start)


def make_pool(env_id: str):
    import envpool

    return envpool.make(env_id, env_type="gymnasium", num_envs=NUM_ENVS, seed=1)


# ---------------------------------------------------------------------------------------------------------------------
# Contenders: (env_id, seconds) -> steps per second


def measure_raw(env_id: str, seconds: float) -> float:
    """EnvPool alone, stepped by Python with uniform actions. Other actions can be cheaper: a policy that falls less."""
    import numpy as np

    pool = make_pool(env_id)
    space, generator = pool.action_space, np.random.default_rng(1)
    actions = generator.uniform(space.low, space.high, (NUM_STEPS, NUM_ENVS, *space.shape)).astype(space.dtype)
    pool.reset()

    def iterate():
        for action in actions:
            pool.step(action)

    return steps_per_second(iterate, seconds)


def measure_script(env_id: str, seconds: float) -> float:
    """The script as a user runs it, stopped by a signal; its SPS leaves out the first iteration itself."""
    import signal

    sys.path.insert(0, str(SCRIPT.parent))
    script = __import__(SCRIPT.stem)
    start_up = 15  # what compiling may take, at most
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        timer = threading.Timer(start_up + seconds, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()
        summary = script.train(script.Args(env_id=env_id, total_timesteps=10**9, anneal_lr=False))
        os.chdir("/")
    return summary["SPS"]


def make_vec_env(env_id: str):
    """EnvPool as Stable-Baselines3's vector environment, observations normalized."""
    import numpy as np
    from stable_baselines3.common.vec_env import VecEnvWrapper, VecNormalize

    class EnvPoolVecEnv(VecEnvWrapper):
        """Resets an environment in the step that ends its episode, as Stable-Baselines3 expects."""

        def __init__(self, pool):
            super().__init__(pool, pool.observation_space, pool.action_space)

        def reset(self):
            return self.venv.reset()[0]

        def step_async(self, actions):
            self.actions = actions.astype(self.action_space.dtype)

        def step_wait(self):
            obs, reward, terminated, truncated, _ = self.venv.step(self.actions)
            done, infos = terminated | truncated, [{} for _ in range(NUM_ENVS)]
            for i in np.flatnonzero(done):
                infos[i] = {"terminal_observation": obs[i].copy(), "TimeLimit.truncated": truncated[i] and not terminated[i]}
            if done.any():
                obs[done] = self.venv.reset(np.flatnonzero(done).astype(np.int32))[0]
            return obs, reward, done, infos

    return VecNormalize(EnvPoolVecEnv(make_pool(env_id)), norm_reward=False)


def measure_stable_baselines(algorithm, policy_kwargs: dict, env_id: str, seconds: float) -> float:
    model = algorithm(
        "MlpPolicy",
        make_vec_env(env_id),
        n_steps=NUM_STEPS,
        batch_size=64,
        n_epochs=10,
        normalize_advantage=False,
        vf_coef=0.25,
        device="cpu",
        policy_kwargs={"log_std_init": -0.5, "ortho_init": True, "net_arch": {"pi": [64, 64], "vf": [64, 64]}} | policy_kwargs,
    )
    return steps_per_second(lambda: model.learn(BATCH_SIZE, reset_num_timesteps=False), seconds)


def measure_sb3(env_id: str, seconds: float) -> float:
    import torch
    from stable_baselines3 import PPO

    return measure_stable_baselines(PPO, {"activation_fn": torch.nn.Tanh}, env_id, seconds)


def measure_sbx(env_id: str, seconds: float) -> float:
    from sbx import PPO

    return measure_stable_baselines(PPO, {}, env_id, seconds)  # its activation is tanh


def measure_tianshou(env_id: str, seconds: float) -> float:
    import torch
    from tianshou.algorithm import PPO
    from tianshou.algorithm.algorithm_base import policy_within_training_step
    from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import VectorEnvNormObs
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic

    env = VectorEnvNormObs(make_pool(env_id))
    shapes = env.observation_space.shape, env.action_space.shape
    actor_net, critic_net = (Net(state_shape=shapes[0], hidden_sizes=(64, 64), activation=torch.nn.Tanh) for _ in range(2))
    actor = ContinuousActorProbabilistic(preprocess_net=actor_net, action_shape=shapes[1], unbounded=True)
    torch.nn.init.constant_(actor.sigma_param, -0.5)
    policy = ProbabilisticActorPolicy(
        actor=actor,
        dist_fn=lambda parameters: torch.distributions.Independent(torch.distributions.Normal(*parameters), 1),
        action_space=env.action_space,
    )
    algorithm = PPO(
        policy=policy,
        critic=ContinuousCritic(preprocess_net=critic_net),
        optim=AdamOptimizerFactory(lr=3e-4, eps=1e-5),
        advantage_normalization=False,
        recompute_advantage=True,
        return_scaling=True,
        vf_coef=0.25,
        ent_coef=0.0,
        max_grad_norm=0.5,
    )
    collector = Collector(policy, env, VectorReplayBuffer(BATCH_SIZE, NUM_ENVS))
    collector.reset()

    def iterate():
        with policy_within_training_step(policy):
            collector.collect(n_step=BATCH_SIZE)
            algorithm.update(buffer=collector.buffer, batch_size=64, repeat=10)
        collector.reset_buffer(keep_statistics=True)

    return steps_per_second(iterate, seconds)


CONTENDERS = {
    "raw EnvPool": measure_raw,
    "this script": measure_script,
    "Stable-Baselines3": measure_sb3,
    "SBX": measure_sbx,
    "tianshou": measure_tianshou,
}
REFERENCE = "this script"

# ---------------------------------------------------------------------------------------------------------------------


def measure_in_process(name: str, env_id: str, seconds: float) -> float | None:
    """Measure in a process of its own; None, and its last words to standard error, if it fails."""
    command = [sys.executable, __file__, "--measure", name, "--env-ids", env_id, "--seconds", str(seconds)]
    threads = {"OMP_NUM_THREADS": "1", "NPROC": "1"}  # of torch and XLA: minibatches of 64 are too small to share
    process = subprocess.run(command, capture_output=True, text=True, env=threads | os.environ)
    last = (process.stdout.strip().splitlines() or [""])[-1]
    if process.returncode == 0:
        return json.loads(last)
    print(f"{name}, {env_id}: {(process.stderr.strip().splitlines() or ['failed'])[-1]}", file=sys.stderr)
    return None


def make_table(results: dict[tuple[str, str], list[float]], env_ids: list[str], names: list[str]) -> list[str]:
    """Medians, and in brackets what they are to the reference's, in markdown."""
    lines = ["| steps per second | " + " | ".join(env_ids) + " |", "| --- |" + " ---: |" * len(env_ids)]
    for name in names:
        cells = []
        for env_id in env_ids:
            rates, reference = results[name, env_id], results.get((REFERENCE, env_id))
            ratio = f" ({statistics.median(rates) / statistics.median(reference):.3g})" if rates and reference else ""
            cells.append(f"{statistics.median(rates):,.0f}{ratio}" if rates else "-")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"


def processor() -> str:
    """The processor's name, where Linux tells it."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main(argv: list[str] | None = None) -> int:
    """The command line; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"speed.py: {message}\n")  # without the usage
    default = ["HalfCheetah-v4", "Hopper-v4", "Ant-v4"]
    parser.add_argument("--env-ids", nargs="+", default=default, help=f"the tasks (default: {' '.join(default)})")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME",
                        help=f"of {', '.join(CONTENDERS)} (default: all)")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each (default: 3)")
    parser.add_argument("--seconds", type=float, default=20, help="of one measurement, warming up apart (default: 20)")
    parser.add_argument("--measure", choices=CONTENDERS, help=argparse.SUPPRESS)  # what the process of a measurement runs
    args = parser.parse_args(argv)
    if args.repeats < 1 or not 0 < args.seconds < 3600:
        parser.error(f"--repeats {args.repeats} --seconds {args.seconds}: at least 1, and between 0 and 3600")
    if args.measure:
        print(json.dumps(CONTENDERS[args.measure](args.env_ids[0], args.seconds)))
        return 0

    results = {(name, env_id): [] for name in args.contenders for env_id in args.env_ids}
    for repeat in range(args.repeats):
        for name, env_id in results:
            rate = measure_in_process(name, env_id, args.seconds)
            results[name, env_id] += [] if rate is None else [rate]
            print(f"{repeat + 1}/{args.repeats} {name}, {env_id}: {rate and round(rate)}", file=sys.stderr, flush=True)
    print(*make_table(results, args.env_ids, args.contenders), sep="\n")
    print(
        f"\nMedians of {args.repeats}, each of {args.seconds:g} s; in brackets, of {REFERENCE}'s. {NUM_ENVS} environments of "
        f"EnvPool, {NUM_STEPS} steps, 10 epochs of minibatches of 64, one thread of torch or XLA.\n"
        f"{', '.join(map(version, PACKAGES))}, Python {platform.python_version()}; {platform.platform()}, "
        f"{os.cpu_count()} cores, {processor()}."
    )
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
