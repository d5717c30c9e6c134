"""Environments in pure JAX that keep EnvPool's ways: an episode's end is followed by a step that only resets."""

import jax
import jax.numpy as jnp
import numpy as np

import ppo_continuous_action_envpool_xla_jax_scan as ppo


def make_fake(num_envs, observe, reward, length, terminates, seed=0, action_size=1):
    """An `Env` of episodes of `length` steps and its first handle and observations.

    `observe(t, context)` [N, O] and `reward(t, context, action)` [N] see the number of steps taken [N], a number that is
    drawn anew from [-1, 1] at each step [N], and the action [N, A].
    """

    def draw(key):
        return jax.random.uniform(key, (num_envs,), jnp.float32, -1, 1)

    def send(handle, action):
        return handle | {"action": action}

    def recv(handle):
        is_reset = handle["done"]
        t = jnp.where(is_reset, 0, handle["t"] + 1)
        key, draw_key = jax.random.split(handle["key"])
        context = draw(draw_key)
        done = ~is_reset & (t == length)
        value = jnp.where(is_reset, 0, reward(handle["t"], handle["context"], handle["action"]))
        step = ppo.Step(
            obs=observe(t, context),
            reward=value.astype(jnp.float32),
            terminated=done & terminates,
            truncated=done & (not terminates),
            is_reset=is_reset,
            info={"elapsed_step": t},
        )
        return handle | {"t": t, "done": done, "context": context, "key": key}, step

    key, draw_key = jax.random.split(jax.random.PRNGKey(seed))
    handle = {
        "t": jnp.zeros(num_envs, jnp.int32),
        "done": jnp.zeros(num_envs, bool),
        "context": draw(draw_key),
        "key": key,
        "action": jnp.zeros((num_envs, action_size), jnp.float32),
    }
    return ppo.Env(send, recv), handle, observe(handle["t"], handle["context"])


def task(obs_size, action_size=1):
    """The task of a fake environment."""
    return ppo.Task({"": (obs_size,)}, -np.ones(action_size, np.float32), np.ones(action_size, np.float32))


def train_fake(args, observe, reward, length, terminates):
    """Train on a fake environment; the last state and all reports, in NumPy."""
    env, handle, obs = make_fake(args.num_envs, observe, reward, length, terminates)
    state = ppo.make_state(args, task(obs.shape[1]), handle, obs)
    reports = []
    for _ in range(args.num_iterations):
        state, report = ppo.train_iteration(state, env, args)
        reports.append(jax.device_get(report))
    return state, reports


def bandit_reward(t, context, action):
    """The best action is the context; its return is 0."""
    return -jnp.square(action[:, 0] - context)


def bandit_observe(t, context):
    return context[:, None]
