# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax>=0.10.0,<1",
#     "jaxlib>=0.10.0,<1",
#     "flax>=0.12.0,<1",
#     "optax>=0.2.6,<1",
#     "envpool>=1.2.5,<2",
#     "numpy>=2.1.0,<3",
#     "tyro>=1.0.0,<2",
#     "tensorboard>=2.19.0,<3",
#     "wandb>=0.30.0,<1",
#     "rich>=14.3.0,<16",
# ]
# ///
"""PPO for continuous control: EnvPool stepped inside the compiled program, Flax networks, every inner loop a `lax.scan`.

    python ppo_continuous_action_envpool_xla_jax_scan.py --env-id HalfCheetah-v4
    python ppo_continuous_action_envpool_xla_jax_scan.py --env-id Hopper-v4 --seed 2 --track
    python ppo_continuous_action_envpool_xla_jax_scan.py --evaluate runs/<run>/<exp_name>.cleanrl_model

The file reads from top to bottom: arguments, environment stream, agent, PPO, saving and evaluating, training. All of it is
pure until "Saving and evaluating", but for what checks, makes and adapts a pool. Importing the file changes nothing but
JAX's x64 flag.

Shapes: T num_steps, N num_envs, B = T * N, M minibatch, O observation size, A action size.
"""

import argparse
import ast
import collections
import contextlib
import ctypes
import dataclasses
import difflib
import functools
import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import serialization, struct
from flax.linen.initializers import constant, orthogonal
from jax.flatten_util import ravel_pytree
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn

# MuJoCo's pools speak float64, which JAX narrows unless this is set before any array exists. All else names its dtype.
jax.config.update("jax_enable_x64", True)

# ---------------------------------------------------------------------------------------------------------------------
# Arguments


class BadInput(ValueError):
    """What the user asked for cannot be done. One line that names the argument, the value and what would do."""


@dataclass(frozen=True)  # hence hashable, hence static to `jit` as a whole
class Args:
    """PPO for continuous control on EnvPool, compiled by JAX."""

    # Experiment
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """the name of this experiment"""
    seed: int = 1
    """seed of the networks, the actions, the minibatches and the environments"""
    track: bool = False
    """track this experiment with Weights and Biases (WANDB_MODE=offline needs no login)"""
    wandb_project_name: str = "cleanRL"
    """the project's name at Weights and Biases"""
    wandb_entity: str | None = None
    """the entity (team) at Weights and Biases"""

    # Agents
    save_model: bool = True
    """save the agent in the run's directory when training ends, and all that is needed to resume it"""
    checkpoint_frequency: int = 0
    """save it every so many iterations too (0: only at the end)"""
    resume: str | None = None
    """a saved model to go on training from, in its own run directory and with its own arguments"""
    evaluate: str | None = None
    """a saved model to evaluate, instead of training"""
    eval_episodes: int = 10
    """the number of episodes in an evaluation"""
    eval_frequency: int = 0
    """evaluate every so many iterations too (0: only at the end)"""
    eval_deterministic: bool = True
    """evaluate the mean action, not a sampled one"""
    capture_video: bool = False
    """film the first episode of each evaluation into videos/{run_name} (needs imageio[ffmpeg] and OpenGL)"""

    # Environment
    env_id: str = "HalfCheetah-v4"
    """the id of the task: any of EnvPool's with continuous actions and vector observations"""
    env_kwargs: tuple[str, ...] = ()
    """EnvPool's own options for the task, as key=value, such as max_episode_steps=200"""
    num_envs: int = 64
    """the number of parallel environments"""
    num_threads: int = 0
    """the number of threads that step them (0: one a core)"""
    norm_obs: bool = True
    """normalize observations by their running mean and variance, clipped to +-10"""
    norm_reward: bool = False
    """divide rewards by the running deviation of the discounted return, clipped to +-10, as baselines does"""

    # Algorithm
    total_timesteps: int = 3_000_000
    """environment steps of the whole run, over all environments"""
    learning_rate: float = 3e-4
    """Adam's learning rate"""
    num_steps: int = 32
    """the number of steps in each environment per iteration"""
    anneal_lr: bool = True
    """lower the learning rate linearly to zero, once an iteration"""
    gamma: float = 0.99
    """the discount factor"""
    gae_lambda: float = 0.95
    """the lambda of generalized advantage estimation"""
    num_minibatches: int = 32
    """the number of minibatches in an epoch"""
    update_epochs: int = 10
    """the number of epochs of updates per iteration"""
    norm_adv: bool = False
    """normalize advantages within each minibatch"""
    clip_coef: float = 0.2
    """the surrogate clipping coefficient"""
    clip_vloss: bool = False
    """clip the value loss as well, as the original implementation does"""
    ent_coef: float = 0.0
    """coefficient of the entropy bonus"""
    vf_coef: float = 0.25
    """coefficient of the mean squared value error (CleanRL's other scripts halve the error: their 0.5 is 0.25 here)"""
    max_grad_norm: float = 0.5
    """the largest norm of the gradient, of actor and critic together"""
    target_kl: float | None = None
    """end an iteration's updates once a minibatch's approximate KL divergence exceeds this"""
    norm_return: bool = True
    """let the critic predict returns divided by their running deviation, as tianshou does"""
    recompute_advantage: bool = True
    """estimate advantages and targets anew with the current critic at the start of every epoch"""

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size

    @property
    def env_options(self) -> dict[str, Any]:
        """`env_kwargs` as a dict; values are Python literals, or else strings."""
        options = {}
        for pair in self.env_kwargs:
            key, equals, value = pair.partition("=")
            if not (key.isidentifier() and equals):
                raise BadInput(f"env_kwargs={pair}: must be key=value, such as max_episode_steps=200")
            if key in options:
                raise BadInput(f"env_kwargs={pair}: {key} is given twice")
            try:
                options[key] = ast.literal_eval(value)
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                options[key] = value
            if key in ("max_episode_steps", "frame_skip") and (type(options[key]) is not int or options[key] < 1):
                raise BadInput(f"env_kwargs={pair}: must be at least 1 and whole")
        return options

    def __post_init__(self):
        _ = self.env_options  # raises for what is not key=value
        for name in ("num_envs", "num_steps", "num_minibatches", "update_epochs", "total_timesteps", "eval_episodes"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("checkpoint_frequency", "eval_frequency"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name}={getattr(self, name)}: must be at least 0")
        if self.resume and self.evaluate:
            raise BadInput(f"resume={self.resume}, evaluate={self.evaluate}: only one of them can be done at once")
        for name in ("learning_rate", "clip_coef", "ent_coef", "vf_coef", "max_grad_norm", "target_kl"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise BadInput(f"{name}={value}: must be finite and at least 0")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadInput(f"{name}={getattr(self, name)}: must lie in [0, 1]")
        if self.max_grad_norm == 0:
            raise BadInput("max_grad_norm=0: must be above 0")
        if not 0 <= self.seed < 2**31:
            raise BadInput(f"seed={self.seed}: must lie in [0, 2**31 - 1]")
        if not 0 <= self.num_threads <= self.num_envs:
            raise BadInput(f"num_threads={self.num_threads}: must lie in [0, num_envs={self.num_envs}]")
        if self.batch_size % self.num_minibatches:
            raise BadInput(
                f"num_minibatches={self.num_minibatches}: must divide the batch, num_envs * num_steps = {self.batch_size}"
            )
        for name in ("exp_name", "wandb_project_name", "wandb_entity"):
            if not (getattr(self, name) or "").isprintable():
                raise BadInput(f"{name}={getattr(self, name)!r}: must be printable")
        for name in ("batch_size", "update_epochs"):
            if getattr(self, name) >= 2**31:
                raise BadInput(f"{name}={getattr(self, name)}: must be less than 2**31")
        if self.num_iterations >= 2**31:
            raise BadInput(f"total_timesteps={self.total_timesteps}: must be less than 2**31 batches of {self.batch_size}")
        if self.total_timesteps < self.batch_size:
            raise BadInput(
                f"total_timesteps={self.total_timesteps}: must be at least one batch, num_envs * num_steps = {self.batch_size}"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Environment stream: the steps of N environments, and the wrappers that they pass through


class Step(NamedTuple):
    """What N environments answer to N actions.

    EnvPool resets one step late. `obs` is always the true successor, the last observation of an episode included; the
    step after that one ignores the action, has no reward and only brings the first observation of the next episode.
    """

    obs: jax.Array  # [N, O], or a dict of such
    reward: jax.Array  # [N]
    terminated: jax.Array  # [N] bool: the task ended
    truncated: jax.Array  # [N] bool: a time limit ended the episode, not the task
    is_reset: jax.Array  # [N] bool: this step only reset
    info: dict[str, jax.Array]  # [N, ...] each


class EnvWrapper(struct.PyTreeNode):
    """A pure transformation of the stream between environments and agent; by default, the identity.

    A wrapper is a pytree and is its own state: each method returns the wrapper to use from then on.
    """

    def reset(self, obs):
        """The first observations of all environments, outwards: episodes start anew, what was learned stays."""
        return self, obs

    def send(self, action):
        """The agent's actions [N, A], inwards."""
        return self, action

    def recv(self, step: Step):
        """The environments' answers, outwards."""
        return self, step


def fold(wrappers: tuple[EnvWrapper, ...], method: str, x):
    """Pass `x` through a method of all wrappers, innermost first: `reset` and `recv` in order, `send` in reverse."""
    direction = -1 if method == "send" else 1
    successors = []
    for wrapper in wrappers[::direction]:
        wrapper, x = getattr(wrapper, method)(x)
        successors.append(wrapper)
    return tuple(successors[::direction]), x


class RunningMeanStd(struct.PyTreeNode):
    """Mean and variance of a stream, merged batch by batch (Chan et al. 1983). The only float64 state of a run."""

    mean: jax.Array
    var: jax.Array
    count: jax.Array

    @classmethod
    def create(cls, shape=()):
        return cls(jnp.zeros(shape, jnp.float64), jnp.ones(shape, jnp.float64), jnp.zeros((), jnp.float64))

    @property
    def std(self):
        return jnp.sqrt(self.var + 1e-8)

    def update(self, x, mask):
        """Merge the rows of x [B, ...] that mask [B] keeps. Keeping none changes nothing."""
        x, keep = x.astype(jnp.float64), jnp.broadcast_to(jnp.expand_dims(mask, range(1, x.ndim)), x.shape)
        batch_mean = masked_mean(x, keep, axis=0)
        batch_var = masked_mean(jnp.square(x - batch_mean[None]), keep, axis=0)
        count = self.count + mask.sum()
        weight = mask.sum() / jnp.maximum(count, 1)  # of the batch in the merged stream
        delta = batch_mean - self.mean
        return self.replace(
            mean=self.mean + weight * delta,
            var=self.var + weight * (batch_var - self.var) + weight * (1 - weight) * jnp.square(delta),
            count=count,
        )


def masked_mean(x, mask, axis=None):
    """Mean of the entries of x that mask, of the same shape, keeps; 0 of none. What mask drops may be NaN."""
    return jnp.where(mask, x, 0).sum(axis) / jnp.maximum(mask.sum(axis), 1).astype(x.dtype)


class VectorEnvRecordStatistics(EnvWrapper):
    """Put returns and lengths of episodes into `info`. Innermost, so that it sees raw rewards."""

    episode_return: jax.Array  # [N] of the running episodes
    episode_length: jax.Array  # [N]
    returned_episode_return: jax.Array  # [N] of the last finished episodes
    returned_episode_length: jax.Array  # [N] 0 where none has finished

    @classmethod
    def create(cls, num_envs: int = 0):
        zeros, none = jnp.zeros(num_envs, jnp.float32), jnp.zeros(num_envs, jnp.int32)
        return cls(zeros, none, zeros, none)

    def reset(self, obs):
        return self.create(len(jax.tree.leaves(obs)[0])), obs

    def recv(self, step):
        done = step.terminated | step.truncated
        episode_return = jnp.where(step.is_reset, 0, self.episode_return + step.reward)
        episode_length = jnp.where(step.is_reset, 0, self.episode_length + 1)
        successor = self.replace(
            episode_return=episode_return,
            episode_length=episode_length,
            returned_episode_return=jnp.where(done, episode_return, self.returned_episode_return),
            returned_episode_length=jnp.where(done, episode_length, self.returned_episode_length),
        )
        return successor, step._replace(info=step.info | vars(successor))


class VectorEnvFlattenObs(EnvWrapper):
    """Join dict observations, keys sorted, and matrices into one vector an environment."""

    def reset(self, obs):
        parts = [obs[key] for key in sorted(obs)] if isinstance(obs, dict) else [obs]
        return self, jnp.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)

    def recv(self, step):
        return self, step._replace(obs=self.reset(step.obs)[1])


class VectorEnvClipAct(EnvWrapper):
    """Clip actions to [-1, 1] and map them linearly to [low, high]."""

    low: jax.Array  # [A]
    high: jax.Array  # [A]

    def send(self, action):
        middle, half = (self.high + self.low) / 2, (self.high - self.low) / 2
        return self, middle[None] + half[None] * jnp.clip(action, -1, 1)


class VectorEnvNormObs(EnvWrapper):
    """Normalize observations by their running mean and variance, clipped to +-10. The statistics see them first."""

    rms: RunningMeanStd  # of [O]
    learn: bool = struct.field(pytree_node=False, default=True)

    def reset(self, obs):
        rms = self.rms.update(obs, jnp.ones(len(obs), bool)) if self.learn else self.rms
        normalized = (obs - rms.mean[None]) / rms.std[None]
        return self.replace(rms=rms), jnp.clip(normalized, -10, 10).astype(obs.dtype)

    def recv(self, step):
        successor, obs = self.reset(step.obs)
        return successor, step._replace(obs=obs)


class VectorEnvNormReward(EnvWrapper):
    """Divide rewards by the running deviation of the discounted return, clipped to +-10 (baselines' VecNormalize)."""

    rms: RunningMeanStd  # of the discounted returns
    discounted_return: jax.Array  # [N] of the running episodes
    gamma: float = struct.field(pytree_node=False)
    learn: bool = struct.field(pytree_node=False, default=True)

    @classmethod
    def create(cls, gamma):
        return cls(RunningMeanStd.create(), jnp.zeros(0, jnp.float32), gamma)

    def reset(self, obs):
        return self.replace(discounted_return=jnp.zeros(len(jax.tree.leaves(obs)[0]), jnp.float32)), obs

    def recv(self, step):
        discounted_return = jnp.where(step.is_reset, 0, self.gamma * self.discounted_return + step.reward)
        rms = self.rms.update(discounted_return, ~step.is_reset) if self.learn else self.rms
        reward = jnp.clip(step.reward / rms.std.astype(step.reward.dtype), -10, 10)
        return self.replace(rms=rms, discounted_return=discounted_return), step._replace(reward=reward)


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or repr(error)).splitlines()[0]


class Task(NamedTuple):
    """What an agent must know of a task: the shapes of its observations and the bounds of its actions."""

    obs_shapes: dict[str, tuple[int, ...]]  # of a dict of observations; of the one observation under ""
    low: np.ndarray  # [A]
    high: np.ndarray  # [A]

    @property
    def obs_size(self) -> int:
        return sum(map(math.prod, self.obs_shapes.values()))


def obs_spaces(observation_space) -> dict[str, Any]:
    """The spaces of a dict of observations, or the one space under \"\"."""
    return getattr(observation_space, "spaces", {"": observation_space})


def make_task(pool) -> Task:
    shapes = {key: tuple(space.shape) for key, space in obs_spaces(pool.observation_space).items()}
    return Task(shapes, np.float32(pool.action_space.low), np.float32(pool.action_space.high))


def make_wrappers(args: Args, task: Task) -> tuple[EnvWrapper, ...]:
    """The wrappers that the arguments ask for, innermost first. A wrapper of your own goes here."""
    wrappers = [
        VectorEnvRecordStatistics.create(),
        VectorEnvFlattenObs(),
        VectorEnvClipAct(jnp.asarray(task.low), jnp.asarray(task.high)),
    ]
    if args.norm_obs:
        wrappers.append(VectorEnvNormObs(RunningMeanStd.create((task.obs_size,))))
    if args.norm_reward:
        wrappers.append(VectorEnvNormReward.create(args.gamma))
    return tuple(wrappers)


class Env(NamedTuple):
    """The two functions of an environment that a scan needs, and all that a test has to fake."""

    send: Callable[[Any, jax.Array], Any]  # handle, action [N, A] -> handle
    recv: Callable[[Any], tuple[Any, Step]]  # handle -> handle, step


def check_task(env_id: str, options: dict[str, Any]) -> None:
    """Raise `BadInput` unless EnvPool has the task and takes the options, and PPO can act and observe in it."""
    import envpool

    ids = envpool.list_all_envs()
    if env_id not in ids:
        near = difflib.get_close_matches(env_id, ids, n=3, cutoff=0)
        raise BadInput(f"env_id={env_id}: EnvPool has no such task; the nearest names are {', '.join(near)}")
    try:
        spec = envpool.make_spec(env_id)
    except Exception as error:  # EnvPool's suites ask for libraries of their own, in their own ways
        raise BadInput(f"env_id={env_id}: EnvPool cannot make it here: {first_line(error)}") from None
    ours = {"num_envs", "batch_size", "num_threads", "max_num_players", "seed", "env_seed", "gym_reset_return_info"}
    allowed = [key for key in spec.config._fields if key not in ours]
    for key in options:
        if key not in allowed:
            raise BadInput(f"env_kwargs={key}: no option of {env_id}; it takes {', '.join(allowed)}")
    try:
        spec = envpool.make_spec(env_id, **options)
    except TypeError:
        raise BadInput(f"env_kwargs={options}: EnvPool takes values of another type") from None
    except Exception as error:
        raise BadInput(f"env_kwargs={options}: EnvPool does not take it: {first_line(error)}") from None
    action = spec.action_space
    if not (hasattr(action, "low") and np.issubdtype(action.dtype, np.floating) and len(action.shape) == 1):
        raise BadInput(f"env_id={env_id}: its actions are {action}; a vector of continuous actions is needed")
    if not (np.abs([action.low, action.high]) < 1e10).all():  # MuJoCo's infinity
        raise BadInput(f"env_id={env_id}: its actions are {action}; finite bounds are needed")
    for space in obs_spaces(spec.observation_space).values():
        if not (hasattr(space, "low") and np.issubdtype(space.dtype, np.floating) and len(space.shape) <= 2):
            raise BadInput(f"env_id={env_id}: it observes {space}; vectors of numbers, or one dict of them, are needed")


def environment_seeds(num_envs: int, seed: int, stream: int, iteration: int) -> list[int]:
    """Seeds of N environments. Others for another seed, stream (0 trains, 1 evaluates) or iteration, but by chance."""
    return [int(s) >> 1 for s in np.random.SeedSequence((seed, stream, iteration)).generate_state(num_envs)]


def make_pool(env_id: str, num_envs: int, env_seed: list[int], num_threads: int = 0, /, **options):
    """An EnvPool of the task, with EnvPool's own `options` for it. Raises `BadInput` for what cannot be trained on."""
    import envpool

    try:
        backend = jax.default_backend()
    except Exception as error:
        raise BadInput(f"JAX_PLATFORMS={jax.config.jax_platforms}: {first_line(error)}; set JAX_PLATFORMS=cpu") from None
    if backend == "tpu":
        raise BadInput("backend=tpu: EnvPool steps on CPU and GPU only; set JAX_PLATFORMS=cpu")
    # Gymnasium narrows the bounds of float64 observations to float32, and says so each time.
    warnings.filterwarnings("ignore", ".*Box (low|high)'s precision lowered")
    check_task(env_id, options)
    ours = {"num_envs": num_envs, "num_threads": num_threads, "env_seed": env_seed}
    try:
        return envpool.make(env_id, env_type="gymnasium", **ours, **options)
    except Exception as error:
        raise BadInput(f"env_id={env_id}, env_kwargs={options}: EnvPool cannot make it: {first_line(error)}") from None


def make_step(obs, reward, terminated, truncated, info) -> Step:
    """What a pool answers, as a `Step`. Only here does float64 meet float32."""
    info = {key: value for key, value in info.items() if key not in ("env_id", "players")}
    obs, reward, info = jax.tree.map(to_float32, (obs, reward, info))
    return Step(obs, reward, terminated, truncated, info["elapsed_step"] == 0, info)


def as_env(pool) -> tuple[Env, Any]:
    """Adapt a pool's XLA functions to an `Env` and its handle."""
    handle, xla_recv, xla_send, _ = pool.xla()
    action_dtype = pool.action_space.dtype

    def send(handle, action):
        return xla_send(handle, action.astype(action_dtype))

    def recv(handle):
        handle, answer = xla_recv(handle)
        return handle, make_step(*answer)

    return Env(send, recv), handle


def to_float32(x):
    """Narrow floating-point arrays; leave others as they are."""
    return jnp.asarray(x, jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.asarray(x)


# ---------------------------------------------------------------------------------------------------------------------
# Agent


def dense(features: int, scale: float) -> nn.Dense:
    return nn.Dense(features, kernel_init=orthogonal(scale), bias_init=constant(0.0))


class Actor(nn.Module):
    """obs [..., O] -> mean [..., A] and log standard deviation [..., A], the latter the same for every observation."""

    action_size: int

    @nn.compact
    def __call__(self, obs):
        x = nn.tanh(dense(64, math.sqrt(2))(obs))
        x = nn.tanh(dense(64, math.sqrt(2))(x))
        mean = dense(self.action_size, 0.01)(x)
        log_std = self.param("log_std", constant(-0.5), (self.action_size,), jnp.float32)
        return mean, jnp.broadcast_to(log_std, mean.shape)


class Critic(nn.Module):
    """obs [..., O] -> value [...], in the critic's own units."""

    @nn.compact
    def __call__(self, obs):
        x = nn.tanh(dense(64, math.sqrt(2))(obs))
        x = nn.tanh(dense(64, math.sqrt(2))(x))
        return dense(1, math.sqrt(2))(x).squeeze(-1)


class Network(nn.Module):
    """Actor and critic under one tree of parameters; they share none."""

    action_size: int

    def setup(self):
        self.actor, self.critic = Actor(self.action_size), Critic()

    def __call__(self, obs):
        return self.actor(obs), self.critic(obs)

    def policy(self, obs):
        return self.actor(obs)

    def value(self, obs):
        return self.critic(obs)


class AgentState(struct.PyTreeNode):
    """What PPO learns, and the units that the critic predicts in."""

    network: Network = struct.field(pytree_node=False)
    params: Any
    opt_state: Any
    return_rms: RunningMeanStd

    def return_scale(self, args: Args):
        """What a value of the critic is multiplied by to make a return."""
        return self.return_rms.std if args.norm_return else jnp.ones((), jnp.float64)


def gaussian_log_prob(action, mean, log_std):
    """Log density of a diagonal Gaussian: [..., A] -> [...]"""
    z = (action - mean) * jnp.exp(-log_std)
    return (-0.5 * jnp.square(z) - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def gaussian_entropy(log_std):
    """Entropy of a diagonal Gaussian: [..., A] -> [...]"""
    return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def make_optimizer(args: Args) -> optax.GradientTransformation:
    """Clip the joint gradient, then Adam. The learning rate is multiplied in by `improve`: see `learning_rate`."""
    return optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.scale_by_adam(eps=1e-5))


@functools.partial(jax.jit, static_argnames=("args", "obs_size", "action_size"))
def make_agent(args: Args, key, obs_size: int, action_size: int) -> AgentState:
    network = Network(action_size)
    params = network.init(key, jnp.zeros((1, obs_size), jnp.float32))
    return AgentState(network, params, make_optimizer(args).init(ravel_pytree(params)[0]), RunningMeanStd.create())


def learning_rate(args: Args, iteration):
    """The rate of the iteration after `iteration` finished ones, by the run's count: an early stop halts the optimizer's."""
    remaining = jnp.maximum(1 - iteration / args.num_iterations, 0)
    return args.learning_rate * (remaining if args.anneal_lr else jnp.ones_like(remaining))


# ---------------------------------------------------------------------------------------------------------------------
# PPO


class RunState(struct.PyTreeNode):
    """All that an iteration reads and writes."""

    iteration: jax.Array  # finished ones
    key: jax.Array
    agent: AgentState
    handle: Any  # of the environments: a pointer, not their state
    wrappers: tuple[EnvWrapper, ...]  # innermost first
    obs: jax.Array  # [N, O]


class Rollout(NamedTuple):
    """T steps of N environments, each row an observation, the action taken there and the answer to it."""

    obs: jax.Array  # [T, N, O]
    action: jax.Array  # [T, N, A] as sampled, neither clipped nor mapped
    log_prob: jax.Array  # [T, N]
    reward: jax.Array  # [T, N]
    terminated: jax.Array  # [T, N] bool
    truncated: jax.Array  # [T, N] bool
    is_reset: jax.Array  # [T, N] bool: the action was ignored
    info: dict[str, jax.Array]  # [T, N, ...] each


class Batch(NamedTuple):
    """Rows to learn from: all of a rollout [B, ...], or a minibatch of them [M, ...]."""

    obs: jax.Array  # [B, O]
    action: jax.Array  # [B, A]
    log_prob: jax.Array  # [B] when the action was taken
    value: jax.Array  # [B] of the latest estimation, in the critic's units
    advantage: jax.Array  # [B]
    target: jax.Array  # [B] for the value, in the critic's units
    mask: jax.Array  # [B] bool: False where the step only reset


class Report(NamedTuple):
    """What an iteration tells the outside world."""

    metrics: dict[str, jax.Array]  # scalars
    episode_means: dict[str, jax.Array]  # scalars, NaN where no episode finished
    faults: dict[str, jax.Array]  # bool scalars: what was not finite
    ended: jax.Array  # [T, N] bool: an episode finished
    episode_return: jax.Array  # [T, N] of the running episodes


def collect_rollout(env: Env, state: RunState, args: Args) -> tuple[RunState, Rollout]:
    """Act for T steps in N environments."""

    def act(state: RunState, _):
        key, action_key = jax.random.split(state.key)
        mean, log_std = state.agent.network.apply(state.agent.params, state.obs, method="policy")
        action = mean + jnp.exp(log_std) * jax.random.normal(action_key, mean.shape, mean.dtype)
        wrappers, sent = fold(state.wrappers, "send", action)
        handle, step = env.recv(env.send(state.handle, sent))
        wrappers, step = fold(wrappers, "recv", step)
        row = Rollout(state.obs, action, gaussian_log_prob(action, mean, log_std), *step[1:])
        return state.replace(key=key, handle=handle, wrappers=wrappers, obs=step.obs), row

    return jax.lax.scan(act, state, length=args.num_steps)


def compute_gae(reward, value, terminated, truncated, gamma, gae_lambda):
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16) over episodes that end inside the rollout.

    Only termination forbids the bootstrap; either end of an episode stops the trace. The value that follows a truncated
    step is that of its episode's own last observation. Steps that only reset get meaningless advantages, which reach no
    other step.

    Shapes: value [T + 1, N], all else [T, N]; returns advantages [T, N].
    """
    delta = reward + gamma * jnp.where(terminated, 0, value[1:]) - value[:-1]

    def accumulate(advantage, row):
        delta, ended = row
        advantage = delta + gamma * gae_lambda * jnp.where(ended, 0, advantage)
        return advantage, advantage

    _, advantage = jax.lax.scan(accumulate, jnp.zeros_like(value[0]), (delta, terminated | truncated), reverse=True)
    return advantage


def estimate_advantages(agent: AgentState, rollout: Rollout, last_obs, args: Args) -> tuple[AgentState, Batch]:
    """Advantages and value targets of a rollout by the current critic, flattened to rows; `last_obs` [N, O] follows it.

    Rewards stay raw. With `norm_return` the critic predicts returns divided by their running deviation, which is updated
    after it has served (Weng et al. 2022). Rows of steps that only reset are zeroed, so that nothing of them can leak.
    """
    value = agent.network.apply(agent.params, jnp.concatenate([rollout.obs, last_obs[None]]), method="value")
    scale = agent.return_scale(args).astype(value.dtype)
    advantage = compute_gae(rollout.reward, value * scale, rollout.terminated, rollout.truncated, args.gamma, args.gae_lambda)
    returns = advantage + value[:-1] * scale
    mask = ~rollout.is_reset
    agent = agent.replace(return_rms=agent.return_rms.update(returns.reshape(-1), mask.reshape(-1)))
    rows = Batch(rollout.obs, rollout.action, rollout.log_prob, value[:-1], advantage, returns / scale, mask)
    rows = jax.tree.map(lambda x: jnp.where(jnp.expand_dims(mask, range(2, x.ndim)), x, jnp.zeros_like(x)), rows)
    return agent, jax.tree.map(lambda x: x.reshape(args.batch_size, *x.shape[2:]), rows)


def ppo_loss(params, network: Network, batch: Batch, args: Args):
    """The clipped surrogate objective (Schulman et al. 2017, eq. 7 and 9) over a minibatch, and its diagnostics."""
    mask = batch.mask
    (mean, log_std), value = network.apply(params, batch.obs)
    log_ratio = jnp.where(mask, gaussian_log_prob(batch.action, mean, log_std) - batch.log_prob, 0)
    ratio = jnp.exp(log_ratio)

    advantage = batch.advantage
    if args.norm_adv:
        centered = jnp.where(mask, advantage - masked_mean(advantage, mask), 0)
        advantage = centered / (jnp.sqrt(masked_mean(jnp.square(centered), mask)) + 1e-8)

    clipped_ratio = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -masked_mean(jnp.minimum(ratio * advantage, clipped_ratio * advantage), mask)

    value_error = jnp.square(value - batch.target)
    if args.clip_vloss:
        clipped_value = batch.value + jnp.clip(value - batch.value, -args.clip_coef, args.clip_coef)
        value_error = jnp.maximum(value_error, jnp.square(clipped_value - batch.target))
    value_loss = masked_mean(value_error, mask)

    entropy = masked_mean(gaussian_entropy(log_std), mask)
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    return loss, {
        "losses/loss": loss,
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/old_approx_kl": masked_mean(-log_ratio, mask),
        "losses/approx_kl": masked_mean(jnp.expm1(log_ratio) - log_ratio, mask),  # http://joschu.net/blog/kl-approx.html
        "losses/clipfrac": masked_mean((jnp.abs(ratio - 1) > args.clip_coef).astype(ratio.dtype), mask),
    }


def improve(agent: AgentState, minibatch: Batch, rate, args: Args) -> tuple[AgentState, dict[str, jax.Array]]:
    """One step of gradient descent on a minibatch, at the given learning rate."""
    grads, metrics = jax.grad(ppo_loss, has_aux=True)(agent.params, agent.network, minibatch, args)
    flat_grads, unravel = ravel_pytree(grads)  # one vector: fewer kernels than a dozen small arrays
    direction, opt_state = make_optimizer(args).update(flat_grads, agent.opt_state)
    params = jax.tree.map(lambda p, d: p - rate.astype(p.dtype) * d, agent.params, unravel(direction))
    metrics |= {"losses/grad_norm": optax.tree.norm(flat_grads)}
    return agent.replace(params=params, opt_state=opt_state), metrics


def random_order(key, size: int):
    """A random permutation of `size` indices. One sort of single words: six times as fast as `jax.random.permutation`."""
    bits = jax.random.bits(key, (size,), jnp.uint32).astype(jnp.uint64)
    return jnp.sort(bits << 32 | jnp.arange(size, dtype=jnp.uint64)).astype(jnp.uint32)  # keeps the low half, the index


def explained_variance(value, target, mask):
    """Share of the targets' variance that the values explain, over the rows [B] that mask keeps; 0 where there is none."""

    def variance(x):
        return masked_mean(jnp.square(x - masked_mean(x, mask)), mask)

    error_var, target_var = jax.vmap(variance)(jnp.stack([target - value, target]))
    return jnp.where(target_var > 0, 1 - error_var / jnp.where(target_var > 0, target_var, 1), 0)


def update_agent(agent: AgentState, rollout: Rollout, last_obs, rate, key, args: Args):
    """Improve an agent by `update_epochs` passes over a rollout, each in fresh random minibatches.

    Once a minibatch's approximate KL divergence exceeds `target_kl`, neither it nor what follows changes anything.
    Returns the agent and the means of the metrics over the minibatches that changed it.
    """
    if not args.recompute_advantage:
        agent, fixed_batch = estimate_advantages(agent, rollout, last_obs, args)

    def update_minibatch(carry, minibatch):
        agent, stopped = carry
        improved, metrics = improve(agent, minibatch, rate, args)
        if args.target_kl is not None:
            stopped |= metrics["losses/approx_kl"] > args.target_kl
            improved = jax.tree.map(functools.partial(jnp.where, stopped), agent, improved)
        return (improved, stopped), (metrics, ~stopped)

    def update_epoch(carry, key):
        agent, stopped = carry
        if args.recompute_advantage:
            estimated, batch = estimate_advantages(agent, rollout, last_obs, args)
            agent = jax.tree.map(functools.partial(jnp.where, stopped), agent, estimated)
        else:
            batch = fixed_batch
        order = random_order(key, args.batch_size).reshape(args.num_minibatches, -1)
        carry, (metrics, executed) = jax.lax.scan(update_minibatch, (agent, stopped), jax.tree.map(lambda x: x[order], batch))
        return carry, (metrics, executed, explained_variance(batch.value, batch.target, batch.mask))

    keys = jax.random.split(key, args.update_epochs)
    (agent, _), (metrics, executed, explained) = jax.lax.scan(update_epoch, (agent, jnp.zeros((), bool)), keys)
    metrics = jax.tree.map(lambda x: masked_mean(x, executed), metrics)
    return agent, metrics | {"losses/explained_variance": explained[0]}  # of the critic that saw the rollout first


def episode_means(rollout: Rollout) -> dict[str, jax.Array]:
    """Means over the episodes that finished in a rollout, and over the last ones of all environments; NaN of none."""
    info, ended = rollout.info, rollout.terminated | rollout.truncated
    last_return, last_length = info["returned_episode_return"][-1], info["returned_episode_length"][-1]
    means = {
        "charts/episodic_return": (info["episode_return"], ended),
        "charts/episodic_length": (info["episode_length"], ended),
        "charts/avg_episodic_return": (last_return, last_length > 0),
        "charts/avg_episodic_length": (last_length, last_length > 0),
    }
    for key in ("success", "is_success"):
        if key in info:
            means["charts/success_rate"] = (info[key], ended)
    return {name: jnp.mean(x.astype(jnp.float32), where=mask) for name, (x, mask) in means.items()}


def all_finite(tree):
    """Whether every floating-point entry of a pytree is finite."""
    return jnp.isfinite(ravel_pytree(tree)[0]).all()


@functools.partial(jax.jit, static_argnames=("env", "args"))
def train_iteration(state: RunState, env: Env, args: Args) -> tuple[RunState, Report]:
    """One iteration of PPO: act, then improve."""
    state, rollout = collect_rollout(env, state, args)
    key, update_key = jax.random.split(state.key)
    rate = learning_rate(args, state.iteration)
    agent, metrics = update_agent(state.agent, rollout, state.obs, rate, update_key, args)
    ended = rollout.terminated | rollout.truncated
    metrics |= {
        "charts/num_episodes": ended.sum(),
        "charts/reset_fraction": rollout.is_reset.astype(jnp.float32).mean(),
        "charts/learning_rate": rate,
        "charts/action_std": jnp.exp(agent.params["params"]["actor"]["log_std"]).mean(),
    }
    faults = {
        "observation": ~all_finite((rollout.obs, state.obs)),
        "reward": ~all_finite(jnp.where(rollout.is_reset, 0, rollout.reward)),
        "loss": ~all_finite(metrics["losses/loss"]),
        "parameter": ~all_finite(agent.params),
    }
    report = Report(metrics, episode_means(rollout), faults, ended, rollout.info["episode_return"])
    return state.replace(iteration=state.iteration + 1, key=key, agent=agent), report


def make_state(args: Args, task: Task, handle=None, obs=None) -> RunState:
    """A new run, at the first observations of its environments; by default at none, to be filled from a file."""
    obs = jnp.zeros((args.num_envs, task.obs_size), jnp.float32) if obs is None else obs
    key, agent_key = jax.random.split(jax.random.PRNGKey(args.seed))
    wrappers, obs = jax.jit(fold, static_argnames="method")(make_wrappers(args, task), "reset", obs)  # less memory than eager
    agent = make_agent(args, agent_key, obs.shape[-1], len(task.low))
    return RunState(jnp.zeros((), jnp.int32), key, agent, handle, wrappers, obs)


# ---------------------------------------------------------------------------------------------------------------------
# Saving and evaluating

FORMAT = 1  # of a model file: {format, sha256, payload}, msgpack throughout, never pickle
FREE_ON_RESUME = {"total_timesteps", "track", "wandb_project_name", "wandb_entity", "save_model", "checkpoint_frequency"}
FREE_ON_RESUME |= {"resume", "evaluate", "eval_episodes", "eval_frequency", "eval_deterministic", "capture_video"}


class Model(NamedTuple):
    """What a model file holds."""

    args: Args
    task: Task
    state: RunState  # without handle and observations


def write_atomically(path: str, content: bytes) -> None:
    """Write a file so that at any moment `path` holds all of the old content or all of the new."""
    try:
        with open(path + ".tmp", "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".tmp", path)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(path + ".tmp")
        raise


def save_model(path: str, model: Model) -> None:
    """Write all that acting, evaluating and resuming need. The simulators' own state cannot be saved. Raises OSError."""
    args, task, state = model
    saved = {
        "args": dataclasses.asdict(args) | {"env_kwargs": list(args.env_kwargs)},
        "versions": versions(),
        "task": task._asdict() | {"obs_shapes": {key: list(shape) for key, shape in task.obs_shapes.items()}},
        "state": jax.device_get(serialization.to_state_dict(state.replace(handle=None, obs=None))),
    }
    payload = serialization.msgpack_serialize(saved)
    record = {"format": FORMAT, "sha256": hashlib.sha256(payload).hexdigest(), "payload": payload}
    write_atomically(path, serialization.msgpack_serialize(record))


def load_model(path: str) -> Model:
    """Read a model file; no code in it can run. Raises `BadInput` for any other file, or a damaged one."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read ({getattr(error, 'strerror', error)})") from None
    try:
        record = serialization.msgpack_restore(content)
        version, digest, payload = record["format"], record["sha256"], record["payload"]
        found_digest = hashlib.sha256(payload).hexdigest()
    except Exception:  # whatever a file that is none of ours makes of msgpack
        raise BadInput(f"{path}: not a model file, or not all of one; a .cleanrl_model of this script is needed") from None
    if version != FORMAT:
        raise BadInput(f"{path}: a model file of format {version!r}; this script reads format {FORMAT}")
    if found_digest != digest:
        raise BadInput(f"{path}: damaged, its checksum does not match; an earlier copy is needed")
    try:
        saved = serialization.msgpack_restore(payload)
        args = Args(**saved["args"] | {"env_kwargs": tuple(saved["args"]["env_kwargs"])})
        shapes = {key: tuple(shape) for key, shape in saved["task"]["obs_shapes"].items()}
        task = Task(shapes, saved["task"]["low"], saved["task"]["high"])
        blank = make_state(args, task).replace(handle=None, obs=None)
        state = serialization.from_state_dict(blank, saved["state"])
    except Exception as error:
        raise BadInput(f"{path}: its content is not this script's ({error})") from None
    for (where, leaf), expected in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(blank), strict=True):
        if leaf.shape != expected.shape or leaf.dtype != expected.dtype:
            found, wanted = (f"{x.dtype}{list(x.shape)}" for x in (leaf, expected))
            raise BadInput(f"{path}: {jax.tree_util.keystr(where)} is {found}, not {wanted} as its arguments say")
    return Model(args, task, jax.tree.map(jnp.asarray, state))


def check_resumed(args: Args, model: Model) -> None:
    """Raise `BadInput` if the arguments change more of a saved run than they may, or leave it nothing to do."""
    for field in dataclasses.fields(Args):
        ours, theirs = getattr(args, field.name), getattr(model.args, field.name)
        if ours != theirs and field.name not in FREE_ON_RESUME:
            raise BadInput(f"{field.name}={ours}: the saved run has {theirs} and keeps it; start a new run to change it")
    if args.resume and model.state.iteration >= args.num_iterations:
        steps = int(model.state.iteration) * args.batch_size
        raise BadInput(f"total_timesteps={args.total_timesteps}: the saved run has trained {steps} already; ask for more")


def freeze(wrappers: tuple[EnvWrapper, ...]) -> tuple[EnvWrapper, ...]:
    """The wrappers, with statistics that learn no more."""
    return tuple(wrapper.replace(learn=False) if hasattr(wrapper, "learn") else wrapper for wrapper in wrappers)


def act(agent: AgentState, obs, key=None):
    """Actions [..., A] for observations [..., O]: the mean, or with a key a sample."""
    mean, log_std = agent.network.apply(agent.params, obs, method="policy")
    return mean if key is None else mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape, mean.dtype)


@jax.jit
def wrapped_act(agent: AgentState, wrappers: tuple[EnvWrapper, ...], obs):
    """Mean actions in the task's own bounds, for observations as the task gives them."""
    wrappers, obs = fold(wrappers, "reset", obs)
    return fold(wrappers, "send", act(agent, obs))[1]


@functools.partial(jax.jit, static_argnames="deterministic")
def choose_actions(state: RunState, deterministic: bool) -> tuple[RunState, jax.Array]:
    """The next actions [N, A] for all environments, in the task's own bounds."""
    key, action_key = jax.random.split(state.key)
    action = act(state.agent, state.obs, None if deterministic else action_key)
    wrappers, action = fold(state.wrappers, "send", action)
    return state.replace(key=key, wrappers=wrappers), action


@jax.jit
def receive_step(state: RunState, answer) -> tuple[RunState, Step]:
    """Pass on what a pool's `step` answered."""
    wrappers, step = fold(state.wrappers, "recv", make_step(*answer))
    return state.replace(wrappers=wrappers, obs=step.obs), step


def evaluate(model: Model, episodes: int, deterministic: bool, film_path: str | None = None, stop=None) -> dict[str, Any]:
    """Score an agent on fresh environments, equally many episodes of each; the same model always meets the same ones.

    Films the first episode of the first environment, if it is told where. Returns what the last line of `--evaluate`
    prints: env_id, mean, std, min, max, episodes, length, deterministic. Raises KeyboardInterrupt once `stop` has received.
    """
    stop = stop or StopSignal()  # that listens to nothing, since it is not entered
    args, task, state = model
    num_envs = max(n for n in range(1, min(episodes, args.num_envs) + 1) if episodes % n == 0)
    seeds = environment_seeds(num_envs, args.seed, stream=1, iteration=int(state.iteration))
    pool = make_pool(args.env_id, num_envs, seeds, min(args.num_threads, num_envs), **args.env_options)
    if make_task(pool).obs_shapes != task.obs_shapes or len(make_task(pool).low) != len(task.low):
        raise BadInput(f"env_id={args.env_id}: its sizes here are not those that the model was trained with")
    wrappers, obs = fold(freeze(state.wrappers), "reset", jax.tree.map(to_float32, pool.reset()[0]))
    state = state.replace(handle=None, wrappers=wrappers, obs=obs)
    limit = pool.config.get("max_episode_steps") or math.inf  # which some tasks forget, such as LaneKeeping-v0
    finished = [[] for _ in range(num_envs)]  # (return, length) of each environment's first episodes
    filmed = []  # actions [A] of the first episode
    while any(len(of_env) < episodes // num_envs for of_env in finished):
        if stop.received:
            raise KeyboardInterrupt
        state, action = choose_actions(state, deterministic)
        action = np.asarray(action, pool.action_space.dtype)
        if not finished[0]:
            filmed.append(action[0])
        state, step = receive_step(state, pool.step(action))
        ended, returns, lengths = jax.device_get(
            (step.terminated | step.truncated, step.info["episode_return"], step.info["episode_length"])
        )
        for i in np.flatnonzero(ended | (lengths >= limit)):
            finished[i].append((float(returns[i]), int(lengths[i])))
    if film_path:
        stop.interrupts = True
        if not stop.received:  # in the last step
            film(film_path, args, seeds[0], filmed)
    returns, lengths = np.array([of_env[: episodes // num_envs] for of_env in finished]).reshape(-1, 2).T
    return {
        "env_id": args.env_id,
        "mean": returns.mean(),
        "std": returns.std(),
        "min": returns.min(),
        "max": returns.max(),
        "episodes": episodes,
        "length": lengths.mean(),
        "deterministic": deterministic,
    }


def check_camera() -> None:
    """Raise `BadInput` unless films can be written."""
    if not importlib.util.find_spec("imageio_ffmpeg"):
        raise BadInput("capture_video=True: needs imageio; pip install 'imageio[ffmpeg]'")


def make_film_path(model: Model, run_name: str) -> str:
    return os.path.join("videos", run_name, f"step-{int(model.state.iteration) * model.args.batch_size}.mp4")


def film(path: str, args: Args, seed: int, actions: list[np.ndarray]) -> None:
    """Have an episode acted out again and filmed, or say why not: a film is worth no run.

    In a process of its own, because MuJoCo ends the process that it finds no OpenGL in; in a session of its own, because
    Ctrl-C is for the training.
    """
    folder, name = os.path.split(os.path.abspath(__file__))
    code = "import importlib, json, sys; sys.path.insert(0, sys.argv[1]); module = importlib.import_module(sys.argv[2]); "
    command = [sys.executable, "-c", code + "module.act_out(*json.load(sys.stdin))", folder, name[: -len(".py")]]
    partial = path + ".tmp.mp4"
    episode = json.dumps([os.path.abspath(partial), args.env_id, args.env_kwargs, seed, np.array(actions).tolist()])
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        ended = subprocess.run(command, input=episode, capture_output=True, text=True, start_new_session=True)
        if ended.returncode:
            last_words = ended.stderr.strip().splitlines()[-1:] or [f"its process ended with {ended.returncode}"]
            hint = "; on Debian, OpenGL comes with: apt install libegl-mesa0 libgl1-mesa-dri"
            raise OSError(last_words[0] + (hint if "GL" in last_words[0] else ""))
        os.replace(partial, path)
    except OSError as error:
        print(f"{path}: not filmed: {error}", file=sys.stderr)
    else:
        say(f"filmed: {path}")
    finally:
        with contextlib.suppress(OSError):
            os.remove(partial)


def act_out(path: str, env_id: str, env_kwargs: list[str], seed: int, actions: list[list[float]]) -> None:
    """Act an episode out again before EnvPool's camera and write the film, a frame a step."""
    import envpool
    import imageio
    import imageio_ffmpeg

    os.chdir(tempfile.gettempdir())  # where MuJoCo leaves its log
    # MuJoCo looks for OpenGL among the libraries that all can see. It must find the one that EnvPool draws with, its own.
    for library in glob.glob(os.path.join(os.path.dirname(envpool.__file__) + ".libs", "libEGL*")):
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    options = Args(env_kwargs=tuple(env_kwargs)).env_options | {"num_envs": 1, "env_seed": [seed], "render_mode": "rgb_array"}
    pool = envpool.make(env_id, env_type="gymnasium", **options)
    pool.reset()
    with imageio.get_writer(path, fps=frame_rate(pool.spec.config, env_id), macro_block_size=2) as writer:
        for action in np.array(actions, pool.action_space.dtype):
            pool.step(action[None])
            writer.append_data(pool.render()[0])
    with contextlib.suppress(RuntimeError):  # of a film that cannot be read
        if imageio_ffmpeg.count_frames_and_secs(path)[0] == len(actions):
            return
    raise OSError("the film is not whole; is the disk full?")  # ffmpeg keeps quiet about it


def frame_rate(config, env_id: str) -> float:
    """Steps of a task in a second of its own time, by the MuJoCo model that it loads; 30 without one."""
    config = config._asdict()
    if "ctrl_dt" in config:  # MuJoCo Playground
        return 1 / config["ctrl_dt"]
    folder = os.path.join(config["base_path"], "mujoco")
    if "xml_file" in config:
        name = config["xml_file"].removesuffix(".xml")
        models = [os.path.join(folder, path) for path in (f"assets_gym/{name}.xml", f"assets_gym/{name}_envpool.xml")]
        models.append(os.path.join(folder, "robotics", "assets", config["xml_file"]))
    else:  # dm_control names them after the domain: ball_in_cup.xml for BallInCupCatch-v1
        models = glob.glob(os.path.join(folder, "assets_dmc", "*.xml")) if "task_name" in config else []
        models = [m for m in models if env_id.lower().startswith(os.path.basename(m)[: -len(".xml")].replace("_", "").lower())]
    for model in sorted(filter(os.path.exists, models), key=len, reverse=True):
        with open(model) as file:
            timestep = re.search(r'<option[^>]* timestep="([^"]+)"', file.read())
        return 1 / (config["frame_skip"] * float(timestep[1] if timestep else 0.002))  # MuJoCo's default
    return 30


def load_agent(path: str) -> Callable[..., np.ndarray]:
    """The policy of a model file, for use elsewhere; needs no EnvPool. See `Policy`. Raises `BadInput` as `load_model`."""
    _, task, state = load_model(path)
    return Policy(task, state.agent, freeze(state.wrappers))


@dataclass(frozen=True)
class Policy:
    """Observations in, actions in the task's own bounds out: NumPy, one [O] or many [N, O], or dicts of such.

    Raises `BadInput` for observations of another task.
    """

    task: Task
    agent: AgentState
    wrappers: tuple[EnvWrapper, ...]

    def __call__(self, obs) -> np.ndarray:
        shapes = {key: np.shape(x) for key, x in (obs if isinstance(obs, dict) else {"": obs}).items()}
        one = shapes == self.task.obs_shapes
        if not one and {key: shape[1:] for key, shape in shapes.items()} != self.task.obs_shapes:
            raise BadInput(f"obs has the shapes {shapes}; one observation of the agent's task has {self.task.obs_shapes}")
        obs = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32)[None] if one else jnp.asarray(x, jnp.float32), obs)
        action = np.asarray(wrapped_act(self.agent, self.wrappers, obs))
        return action[0] if one else action


# ---------------------------------------------------------------------------------------------------------------------
# Training


class StopSignal:
    """While entered, SIGINT and SIGTERM are kept for the training loop to see; a second one ends the process at once."""

    def __init__(self):
        self.received: signal.Signals | None = None
        self.interrupts = False  # raise KeyboardInterrupt as well, while a film is waited for; within JAX it could get lost
        self.previous = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self.previous = {number: signal.signal(number, self.receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def receive(self, number, frame):
        self.received = signal.Signals(number)
        for number in self.previous:
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):  # Ctrl-C ends who reads our output, such as `tee`, too
            if sys.stdout and sys.stdout.isatty():
                os.write(1, b"\x1b[?25h")  # the cursor, which the progress bar hides and a second signal would not bring back
            os.write(2, f"\n{self.received.name}: this iteration is the last; once more ends at once\n".encode())
        if self.interrupts:
            raise KeyboardInterrupt

    def __exit__(self, *exception):
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def check_wandb_names(args: Args) -> None:
    """Raise `BadInput` for a name that W&B refuses, online or offline."""
    import wandb

    try:
        run_id = f"_{args.exp_name}_".replace("/", "-")
        wandb.Settings(project=args.wandb_project_name, entity=args.wandb_entity, run_id=run_id)
    except Exception as error:
        raise BadInput(f"track=True: W&B refuses: {first_line(error)}") from None


def check_wandb_login() -> None:
    """Raise `BadInput` where W&B would want to go online and cannot."""
    import wandb

    try:
        welcome = wandb.setup().settings.mode != "online" or wandb.login(prompt=False)
    except Exception as error:
        raise BadInput(f"track=True: W&B refuses: {first_line(error)}; or set WANDB_MODE=offline") from None
    if not welcome:
        raise BadInput("track=True: no login at Weights and Biases; run `wandb login`, or set WANDB_MODE=offline")


def make_run_directory(args: Args) -> str:
    """Make `runs/{run_name}`, which no other run shares, and return its path."""
    second = int(time.time())
    while True:
        run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{second}".replace("/", "-")
        if len(os.fsencode(run_name)) > 255:
            raise BadInput(f"exp_name={args.exp_name[:20]}...: too long for a directory's name")
        try:
            os.makedirs(directory := os.path.join("runs", run_name))
            return directory
        except FileExistsError:
            second += 1
        except OSError as error:
            raise BadInput(f"runs/{run_name}: cannot be made here ({error.strerror})") from None


def say(line: str) -> None:
    """Print a line. If no one reads on, as after `| head -1`, or the disk is full, it is lost, and so are all later ones."""
    try:
        print(line, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def versions() -> dict[str, str]:
    packages = ("jax", "jaxlib", "flax", "optax", "envpool", "numpy")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def git_commit() -> str | None:
    """The commit of the repository that this file lies in, if any."""
    command = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def start_wandb(args: Args, run_name: str):
    """Track a run, new or resumed. What TensorBoard's writer gets from now on is mirrored.

    W&B saves the code too, where the script lies below the working directory. Should it become unreachable, it says so, and
    a run that ends waits ten minutes for it, or as WANDB_FINISH_TIMEOUT says; by itself it would wait without end.
    """
    import wandb

    return wandb.init(
        settings=wandb.Settings(finish_timeout=wandb.setup().settings.finish_timeout or 600),
        project=args.wandb_project_name,
        entity=args.wandb_entity,
        name=run_name,
        id=run_name,
        resume="allow",
        config=dataclasses.asdict(args),
        sync_tensorboard=True,
        save_code=True,
    )


def log_film(wandb_run, path: str) -> None:
    import wandb

    wandb_run.log({"video": wandb.Video(path)})


def make_writer(directory: str):
    """TensorBoard's own writer. After `start_wandb`, which puts a class of its own in this one's place."""
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    return EventFileWriter(directory, flush_secs=10)


def write_scalars(writer, metrics: dict[str, float], step: int) -> None:
    """Write to TensorBoard what CleanRL's event files hold and every reader of them finds."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
    writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))


def write_table(writer, tag: str, table: dict[str, Any]) -> None:
    """Write a table to TensorBoard's text panel."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.metadata import create_summary_metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    text = "|param|value|\n|-|-|\n" + "\n".join(f"|{key}|{value}|" for key, value in table.items())
    metadata = create_summary_metadata(display_name=tag, description="")
    value = Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=make_tensor_proto([text.encode()]))
    writer.add_event(Event(wall_time=time.time(), summary=Summary(value=[value])))


class RunLog:
    """The outside of a run: TensorBoard, W&B, the terminal and, however the run ends, `summary.json`."""

    def __init__(self, args: Args, directory: str, stop: StopSignal, iteration: int = 0):
        self.args, self.directory, self.stop = args, directory, stop
        self.run_name = os.path.basename(directory)
        self.model_path = os.path.join(directory, args.exp_name.replace("/", "-") + ".cleanrl_model")
        self.first_iteration = self.iteration = iteration  # finished before, and by now
        self.start_time = time.time()
        self.first_end = self.last_end = self.start_time  # of the first iteration, which compiles, and of the latest
        self.last_returns = collections.deque(maxlen=100)
        self.evaluation: dict[str, Any] | None = None  # the last one
        self.summary: dict[str, Any] = {}
        self.not_saved: dict[str, str] = {}  # path -> why
        self.events = os.path.join(directory, "events.out.tfevents.*")
        self.commit, self.wandb_run, self.writer = git_commit(), None, None
        console = Console()
        columns = ("{task.percentage:3.0f}%", BarColumn(), "{task.description}", TimeRemainingColumn())
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal or console.is_dumb_terminal)
        self.task = self.progress.add_task("compiling", total=args.num_iterations)

    def __enter__(self):
        self.report_thread, threading.excepthook = threading.excepthook, self.hush_thread
        return self

    def hush_thread(self, fault) -> None:
        """What TensorBoard's thread cannot write, the next call to TensorBoard raises."""
        if not isinstance(fault.exc_value, OSError):
            self.report_thread(fault)

    def start(self) -> None:
        """Open the writers and say what runs. Inside `with`, so that a fault here leaves a summary too."""
        self.wandb_run = start_wandb(self.args, self.run_name) if self.args.track else None
        self.writer = make_writer(self.directory)
        packages = ", ".join(f"{name} {version}" for name, version in versions().items())
        threads = self.args.num_threads or min(self.args.num_envs, os.cpu_count())
        say(self.run_name)
        say(f"{packages}; {jax.default_backend()}, {os.cpu_count()} cores, {threads} EnvPool threads")
        write_table(self.writer, "hyperparameters", dataclasses.asdict(self.args))
        self.progress.start()

    @property
    def global_step(self) -> int:
        return self.iteration * self.args.batch_size

    @property
    def sps(self) -> float | None:
        """Steps per second since the end of the first iteration."""
        timed_steps = (self.iteration - self.first_iteration - 1) * self.args.batch_size
        return timed_steps / (self.last_end - self.first_end) if timed_steps > 0 else None

    @property
    def mean_return(self) -> float | None:
        """Mean return of the last 100 finished episodes."""
        return float(np.mean(self.last_returns)) if self.last_returns else None

    def record(self, report: Report) -> None:
        """Log an iteration, `report` in NumPy. Raises FloatingPointError if something in it was not finite."""
        now, self.iteration = time.time(), self.iteration + 1
        episode_means = {name: value for name, value in report.episode_means.items() if not np.isnan(value)}
        metrics = {name: float(value) for name, value in (report.metrics | episode_means).items()}
        if self.iteration == self.first_iteration + 1:
            self.first_end = self.last_end = now
        else:
            metrics["charts/SPS_update"] = self.args.batch_size / (now - self.last_end)
            self.last_end = now
            metrics["charts/SPS"] = self.sps
        self.write(metrics)
        faults = [name for name, fault in report.faults.items() if fault]
        if faults:
            raise FloatingPointError(f"iteration {self.iteration}: not finite: {', '.join(faults)}")
        self.last_returns.extend(report.episode_return[report.ended].tolist())
        status = f"step {self.global_step:,}  return {show(self.mean_return, '.1f')}  SPS {show(self.sps, ',.0f')}"
        self.progress.update(self.task, completed=self.iteration, description=status)
        before, after = (20 * i // self.args.num_iterations for i in (self.iteration - 1, self.iteration))
        is_first = self.iteration == self.first_iteration + 1
        if self.progress.disable and (is_first or after > before):  # about twenty lines where output is piped
            say(status)

    def save(self, model: Model) -> None:
        """Save an agent."""
        self.attempt(self.model_path, save_model, self.model_path, model)

    def write(self, metrics: dict[str, float]) -> None:
        """Write scalars to TensorBoard."""
        self.attempt(self.events, write_scalars, self.writer, metrics, self.global_step)

    def attempt(self, what: str, action: Callable[..., None], *args) -> None:
        """Do what a full disk may refuse. This costs the run nothing but what it was to save, one line and the exit status."""
        try:
            action(*args)
            self.not_saved.pop(what, None)
        except OSError as error:
            if what not in self.not_saved:
                going_on = "" if self.summary else "; training goes on"
                warnings.warn(f"{what}: not saved ({error.strerror or error}){going_on}", stacklevel=1)
            self.not_saved[what] = error.strerror or str(error)
            error.__traceback__ = None  # it would grow: TensorBoard raises the same one again and again

    def evaluate(self, model: Model) -> None:
        """Evaluate an agent, log its mean return, and leave the time that it took out of SPS."""
        start = time.time()
        film_path = make_film_path(model, self.run_name) if self.args.capture_video else None
        try:
            self.evaluation = evaluate(model, self.args.eval_episodes, self.args.eval_deterministic, film_path, self.stop)
        except KeyboardInterrupt:  # which it noted
            return
        finally:
            self.stop.interrupts = False
        self.write({"eval/episodic_return": self.evaluation["mean"]})
        if self.wandb_run and film_path and os.path.exists(film_path):
            self.attempt(f"{film_path} at W&B", log_film, self.wandb_run, film_path)
        elapsed = time.time() - start
        self.first_end, self.last_end = self.first_end + elapsed, self.last_end + elapsed

    def __exit__(self, exception_type, exception, traceback):
        with contextlib.suppress(OSError):  # of a terminal that is gone
            self.progress.stop()
        if self.writer:
            self.attempt(self.events, self.writer.flush)
            self.writer.close()
        status = "failed" if exception else "finished" if self.iteration == self.args.num_iterations else "stopped"
        self.summary |= {
            "status": status,
            "reason": repr(exception) if exception else getattr(self.stop.received, "name", None),
            "run_name": self.run_name,
            "args": dataclasses.asdict(self.args),
            "command": shlex.join(sys.argv),
            "commit": self.commit,
            "versions": versions(),
            "machine": f"{platform.platform()}, {os.cpu_count()} cores, {jax.devices()[0].device_kind}",
            "global_step": self.global_step,
            "mean_return": self.mean_return,  # of the last finished episodes, at most 100:
            "num_returns": len(self.last_returns),
            "evaluation": self.evaluation,
            "not_saved": self.not_saved,
            "wall_time": time.time() - self.start_time,
            "SPS": self.sps,
        }
        path = os.path.join(self.directory, "summary.json")
        self.attempt(path, write_atomically, path, json.dumps(self.summary, indent=2).encode())
        if self.wandb_run:
            self.attempt("W&B's record", self.wandb_run.finish, int(exception is not None))
        threading.excepthook = self.report_thread
        if not exception:
            say(
                f"{status}: return {show(self.mean_return, '.1f')} over the last {len(self.last_returns)} episodes, "
                f"{self.summary['wall_time']:.0f} s, {show(self.sps, ',.0f')} SPS"
            )


def show(value: float | None, form: str) -> str:
    """Format a number that may not exist yet."""
    return "-" if value is None else format(value, form)


def is_due(iteration: int, frequency: int, args: Args) -> bool:
    """Whether what happens every so many iterations, and at the end, happens now."""
    return iteration == args.num_iterations or (frequency > 0 and iteration % frequency == 0)


def return_free_memory() -> None:
    """Return what compiling took and freed, some 250 MB, to the system. Elsewhere than on Linux it stays with the process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def train(args: Args) -> dict[str, Any]:
    """Train an agent and return the run's summary.

    Raises `BadInput` before anything is written, and FloatingPointError if a loss, reward, observation or parameter is not
    finite.
    """
    # Minibatches are too small to share: an update takes XLA 28 ms with two threads, 21 ms with one. EnvPool has its own.
    os.environ.setdefault("NPROC", "1")  # the size of XLA's thread pool, read when JAX first uses the CPU
    jax.clear_caches()  # of an earlier run in this process, whose pool and threads they would keep
    if args.track:
        check_wandb_names(args)
        check_wandb_login()
    if args.capture_video:
        check_camera()
    model = load_model(args.resume) if args.resume else None
    iteration = int(model.state.iteration) if model else 0
    if model:
        check_resumed(args, model)
    seeds = environment_seeds(args.num_envs, args.seed, stream=0, iteration=iteration)
    with StopSignal() as stop:
        pool = make_pool(args.env_id, args.num_envs, seeds, args.num_threads, **args.env_options)
        directory = os.path.dirname(os.path.abspath(args.resume)) if model else make_run_directory(args)
        with RunLog(args, directory, stop, iteration) as log:
            log.start()
            env, handle = as_env(pool)
            task, obs = make_task(pool), jax.tree.map(to_float32, pool.reset()[0])
            state = make_state(args, task, handle, obs)
            if model:
                say(f"resumed at step {log.global_step:,}; EnvPool cannot save simulators, so episodes start anew")
                wrappers, obs = fold(model.state.wrappers, "reset", obs)
                state = model.state.replace(handle=handle, wrappers=wrappers, obs=obs)
            while log.iteration < args.num_iterations and not stop.received:
                state, report = train_iteration(state, env, args)
                log.record(jax.device_get(report))
                if log.iteration == iteration + 1:
                    return_free_memory()
                if args.save_model and is_due(log.iteration, args.checkpoint_frequency, args):
                    log.save(Model(args, task, state))
                if is_due(log.iteration, args.eval_frequency, args) and not stop.received:
                    log.evaluate(Model(args, task, state))
            if stop.received and args.save_model and log.iteration > iteration:
                log.save(Model(args, task, state))
    return log.summary


def parse_args(argv: list[str] | None) -> Args:
    """Read the command line. What it resumes or evaluates brings its own arguments, as the defaults."""
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    files.add_argument("--resume", nargs="?")  # tyro says what is missing
    files.add_argument("--evaluate", nargs="?")
    known, _ = files.parse_known_args(argv)
    path = known.evaluate if known.resume is None else known.resume
    if path is None:
        return tyro.cli(Args, args=argv)
    model = load_model(path)
    films = model.args.capture_video and not known.evaluate
    defaults = dataclasses.replace(model.args, resume=None, evaluate=None, capture_video=films)
    args = tyro.cli(Args, args=argv, default=defaults)
    check_resumed(args, model)
    return args


def main(argv: list[str] | None = None) -> int:
    """The command line; returns its exit status."""
    try:
        args = parse_args(argv)
        if args.evaluate:
            model, film_path = load_model(args.evaluate), None
            if args.capture_video:
                check_camera()
                film_path = make_film_path(model, os.path.basename(os.path.dirname(os.path.abspath(args.evaluate))))
            result = evaluate(model, args.eval_episodes, args.eval_deterministic, film_path)
            print("".join(f"{name:13} {value}\n" for name, value in result.items()) + json.dumps(result))
            return 0
        summary = train(args)
    except (BadInput, FloatingPointError, OSError) as error:
        print("error:", *str(error).splitlines(), file=sys.stderr)
        return 2 if isinstance(error, BadInput) else 1
    except KeyboardInterrupt:  # of an evaluation; training keeps its signals
        return 130
    return 128 + signal.Signals[summary["reason"]] if summary["reason"] else int(bool(summary["not_saved"]))


if __name__ == "__main__":
    sys.exit(main())
