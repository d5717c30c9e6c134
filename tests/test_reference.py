"""Whole iterations on recorded rollouts of Hopper-v4 and HalfCheetah-v4, recomputed in float64 NumPy by `reference.py`.

`PYTHONPATH=. python tests/test_reference.py` prints the largest difference of each case.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import ppo_continuous_action_envpool_xla_jax_scan as ppo
import reference
from compiled import collect_rollout, update_agent

HOPPER = ppo.Args(
    env_id="Hopper-v4",
    num_envs=4,
    num_steps=32,
    num_minibatches=8,
    update_epochs=3,
    total_timesteps=128 * 10,
    norm_reward=True,
)
CHEETAH = ppo.Args(
    env_kwargs=("max_episode_steps=7",),
    num_envs=4,
    num_steps=16,
    num_minibatches=4,
    update_epochs=3,
    total_timesteps=64 * 10,
    norm_reward=True,
)
FAST = dict(learning_rate=3e-3)  # moves far enough for clipping, stopping and recomputation to matter
CASES = {  # name: task, flags, and those of the case from which it must differ
    "hopper-defaults": (HOPPER, {}, None),
    "cheetah-defaults": (CHEETAH, {}, None),
    "cheetah-norm_return-off": (CHEETAH, dict(norm_return=False), {}),
    "hopper-norm_reward": (HOPPER, dict(norm_reward=True, norm_return=False), dict(norm_return=False)),
    "cheetah-norm_reward-norm_return": (CHEETAH, dict(norm_reward=True), {}),
    "cheetah-norm_adv": (CHEETAH, dict(norm_adv=True), {}),
    "hopper-clip_vloss": (HOPPER, FAST | dict(clip_coef=0.02, clip_vloss=True), FAST | dict(clip_coef=0.02)),
    "cheetah-ent_coef-minibatches-of-one": (
        CHEETAH,
        dict(ent_coef=0.05, num_minibatches=64, update_epochs=1),
        dict(num_minibatches=64, update_epochs=1),
    ),
    "hopper-target_kl": (HOPPER, FAST | dict(target_kl="midway"), FAST),
    "hopper-recompute_advantage-off": (HOPPER, FAST | dict(recompute_advantage=False), FAST),
    "cheetah-anneal_lr-off": (
        CHEETAH,
        dict(anneal_lr=False, max_grad_norm=5.0, vf_coef=1.0, gamma=0.9, gae_lambda=0.8),
        dict(max_grad_norm=5.0, vf_coef=1.0, gamma=0.9, gae_lambda=0.8),
    ),
}


# Recording


class Recording(NamedTuple):
    """A real rollout: the script's state before and after it, and what the environments answered."""

    state: ppo.RunState
    after: ppo.RunState
    first_obs: np.ndarray | None  # [N, O] raw, where the state is that of a new run
    rollout: ppo.Rollout
    answers: ppo.Step  # [T, N, ...] raw


def tapping(env):
    """An environment that puts its raw answers into `info`."""

    def recv(handle):
        handle, step = env.recv(handle)
        return handle, step._replace(info=step.info | {"raw_obs": step.obs, "raw_reward": step.reward})

    return ppo.Env(env.send, recv)


def tape_recv(handle):
    t, answers = handle
    return (t + 1, answers), jax.tree.map(lambda x: x[t], answers)


TAPE = ppo.Env(lambda handle, action: handle, tape_recv)  # replays answers; a pool steps once, this as often as it is asked


@functools.cache
def record(task):
    """Hopper's first iteration, or HalfCheetah's third."""
    pool = ppo.make_pool(task.env_id, task.num_envs, ppo.environment_seeds(task.num_envs, 1, 0, 0), **task.env_options)
    env, handle = ppo.as_env(pool)
    first_obs = ppo.to_float32(pool.reset()[0])
    state = ppo.make_state(task, ppo.make_task(pool), handle, first_obs)
    if task is CHEETAH:
        for _ in range(2):
            state, _ = ppo.train_iteration(state, env, task)
        first_obs = None
    after, rollout = collect_rollout(tapping(env), state, task)
    info = {"elapsed_step": rollout.info["elapsed_step"]}
    flags = (rollout.terminated, rollout.truncated, rollout.is_reset)
    answers = ppo.Step(rollout.info["raw_obs"], rollout.info["raw_reward"], *flags, info)
    tape = jnp.zeros((), jnp.int32), answers
    state, after = state.replace(handle=tape), after.replace(handle=())
    return jax.tree.map(np.asarray, Recording(state, after, first_obs, rollout, answers))


def wrapper_of(state, kind):
    return next(wrapper for wrapper in state.wrappers if isinstance(wrapper, kind))


def moments(rms):
    return reference.Moments(*(np.float64(x) for x in (rms.mean, rms.var, rms.count)))


def flat(params):
    """{"actor/Dense_0/kernel": array, ...} in float64"""
    leaves = jax.tree.leaves_with_path(params["params"])
    return {"/".join(key.key for key in path): np.float64(leaf) for path, leaf in leaves}


def learner_of(agent):
    """The script's agent as the reference has it."""
    _, unravel = ravel_pytree(jax.tree.map(np.float64, agent.params))
    adam = agent.opt_state[1]
    first, second = (flat(unravel(jnp.asarray(x, jnp.float64))) for x in (adam.mu, adam.nu))
    return reference.Learner(flat(agent.params), first, second, int(adam.count), moments(agent.return_rms))


@functools.cache
def recomputed_steps(task, norm_reward):
    """The recorded rollout in float64, from the raw answers and the sampled actions alone."""
    state, _, first_obs, rollout, answers = record(task)
    stats = moments(wrapper_of(state, ppo.VectorEnvNormObs).rms)
    if first_obs is None:
        before = np.float64(state.obs)[None]
    else:
        size = first_obs.shape[1]
        stats, before = reference.normalize_observations(
            reference.Moments(np.zeros(size), np.ones(size), 0.0), np.float64(first_obs)[None]
        )
    stats, obs = reference.normalize_observations(stats, np.float64(answers.obs))
    obs, action, reward = np.concatenate([before, obs]), np.float64(rollout.action), np.float64(answers.reward)
    reward_stats = None
    if norm_reward:
        wrapper = wrapper_of(state, ppo.VectorEnvNormReward)
        start = reference.UNSEEN if first_obs is not None else moments(wrapper.rms)
        discounted = np.float64(wrapper.discounted_return)
        reward_stats, _, reward = reference.normalize_rewards(start, discounted, reward, answers.is_reset, task.gamma)
    params = flat(state.agent.params)
    log_prob = np.array([reference.log_density(params, o, a)[0] for o, a in zip(obs[:-1], action, strict=True)])
    flags = (answers.terminated, answers.truncated, answers.is_reset)
    return reference.Steps(obs, action, log_prob, reward, *flags), stats, reward_stats


# Cases


@functools.cache
def recompute(task, flags):
    """The reference's result of an iteration with these flags."""
    args = dataclasses.replace(task, **dict(flags))
    recording = record(task)
    keys = jax.random.split(jax.random.split(recording.after.key)[1], args.update_epochs)
    orders = [np.asarray(ppo.random_order(key, args.batch_size)).reshape(args.num_minibatches, -1) for key in keys]
    assert all((np.sort(order.ravel()) == np.arange(args.batch_size)).all() for order in orders)
    steps, _, _ = recomputed_steps(task, args.norm_reward)
    return reference.improve(learner_of(recording.state.agent), steps, int(recording.state.iteration) + 1, orders, args)


def setting(name):
    """Task, arguments and flags of a case; `target_kl` is put between two minibatches' divergences near the middle."""
    task, flags, base = CASES[name]
    flags = dict(norm_reward=False) | flags
    if flags.get("target_kl") == "midway":
        *_, kls = recompute(task, tuple((flags | dict(target_kl=None)).items()))
        largest = np.maximum.accumulate([0.0, *kls])
        records = [i for i in range(len(kls)) if kls[i] > 1.05 * largest[i]]
        stop = min(records, key=lambda i: abs(i - len(kls) / 2))
        flags["target_kl"] = float(largest[stop] + kls[stop]) / 2
    return task, dataclasses.replace(task, **flags), flags, base


def without_unused_wrappers(state, args):
    return tuple(w for w in state.wrappers if args.norm_reward or not isinstance(w, ppo.VectorEnvNormReward))


def to_float64(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float64) if np.issubdtype(x.dtype, np.floating) else jnp.asarray(x), tree)


def largest_difference(ours, theirs):
    """Of all entries of all arrays, relative to the largest entry of each."""
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[k] - theirs[k]).max() / np.abs(theirs[k]).max()) for k in ours)


def differences_in_float64(name):
    """Parameters, Adam's moments, return statistics and metrics of `update_agent` in float64, beside the reference's."""
    task, args, flags, _ = setting(name)
    recording = record(task)
    steps, _, _ = recomputed_steps(task, args.norm_reward)
    expected, expected_metrics, _ = recompute(task, tuple(flags.items()))
    obs, rest = steps.obs, steps._asdict()
    rollout = recording.rollout._replace(info={}, **(rest | {"obs": obs[:-1]}))
    key, rate = jax.random.split(recording.after.key)[1], ppo.learning_rate(args, jnp.float64(recording.state.iteration))
    agent, metrics = update_agent(*to_float64((recording.state.agent, rollout, obs[-1], rate)), key, args)
    assert {leaf.dtype for leaf in jax.tree.leaves(agent.params)} == {jnp.dtype("float64")}
    got = learner_of(agent)
    assert got.count == expected.count
    return {
        "params": largest_difference(got.params, expected.params),
        "adam": max(largest_difference(got.first, expected.first), largest_difference(got.second, expected.second)),
        "returns": largest_difference(got.returns._asdict(), expected.returns._asdict()) if args.norm_return else 0.0,
        "metrics": max(abs(float(metrics[k]) - expected_metrics[k]) / max(abs(expected_metrics[k]), 1e-2) for k in metrics),
    }


def differences_in_float32(name):
    """Per leaf, the error of `train_iteration` over the norm of the update; and its metrics' largest difference."""
    task, args, flags, _ = setting(name)
    recording = record(task)
    expected, expected_metrics, _ = recompute(task, tuple(flags.items()))
    state = jax.tree.map(jnp.asarray, recording.state)
    state = state.replace(wrappers=without_unused_wrappers(state, args))
    state, report = ppo.train_iteration(state, TAPE, args)
    got, start = learner_of(state.agent), flat(recording.state.agent.params)
    assert got.count == expected.count and state.iteration == recording.state.iteration + 1
    error = {k: np.linalg.norm(got.params[k] - p) / np.linalg.norm(p - start[k]) for k, p in expected.params.items()}
    statistics = largest_difference(got.returns._asdict(), expected.returns._asdict()) if args.norm_return else 0.0
    metrics = {k: float(report.metrics[k]) for k in expected_metrics}
    return {
        "params": max(error.values()),
        "returns": statistics,
        "metrics": max(abs(metrics[k] - v) / max(abs(v), 1e-2) for k, v in expected_metrics.items()),
    }, report


# Tests


def test_the_recordings_hold_terminations_truncations_and_reset_rows():
    hopper, cheetah = record(HOPPER).answers, record(CHEETAH).answers
    assert hopper.terminated.sum() >= 4 and not hopper.truncated.any() and hopper.is_reset.sum() >= 2
    assert cheetah.truncated.sum() >= 8 and not cheetah.terminated.any() and cheetah.is_reset.sum() >= 4
    assert np.abs(record(HOPPER).rollout.action).max() > 1  # some are clipped on their way to the simulator


@pytest.mark.parametrize("task", [HOPPER, CHEETAH], ids=["hopper", "cheetah"])
def test_wrappers_in_float64_normalize_as_recomputed(task):
    state, _, first_obs, _, answers = record(task)
    steps, obs_stats, reward_stats = recomputed_steps(task, True)
    wrappers, answers = to_float64((state.wrappers, answers))
    obs = jnp.asarray(steps.obs[0])
    if first_obs is not None:
        fresh = {"rms": ppo.RunningMeanStd.create(first_obs.shape[1:])}
        wrappers = tuple(w.replace(**fresh) if isinstance(w, ppo.VectorEnvNormObs) else w for w in wrappers)
        wrappers, obs = ppo.fold(wrappers, "reset", jnp.asarray(first_obs, jnp.float64))
        wrappers = to_float64(wrappers)
    recv = jax.jit(lambda wrappers, step: ppo.fold(wrappers, "recv", step))
    seen, rewards = [obs], []
    for t in range(task.num_steps):
        wrappers, step = recv(wrappers, jax.tree.map(lambda x, t=t: x[t], answers))
        seen.append(step.obs)
        rewards.append(step.reward)
    np.testing.assert_allclose(seen, steps.obs, rtol=0, atol=1e-8)
    np.testing.assert_allclose(rewards, steps.reward, rtol=0, atol=1e-8)
    after = state.replace(wrappers=wrappers)
    for kind, expected in ((ppo.VectorEnvNormObs, obs_stats), (ppo.VectorEnvNormReward, reward_stats)):
        got = moments(wrapper_of(after, kind).rms)
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("task", [HOPPER, CHEETAH], ids=["hopper", "cheetah"])
def test_the_rollout_in_float32_is_the_recomputed_one(task):
    _, after, _, rollout, _ = record(task)
    steps, obs_stats, reward_stats = recomputed_steps(task, True)
    np.testing.assert_allclose(rollout.obs, steps.obs[:-1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(after.obs, steps.obs[-1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(rollout.log_prob, steps.log_prob, atol=1e-5)
    np.testing.assert_allclose(rollout.reward, steps.reward, rtol=1e-5, atol=1e-6)
    for kind, expected in ((ppo.VectorEnvNormObs, obs_stats), (ppo.VectorEnvNormReward, reward_stats)):
        got = moments(wrapper_of(after, kind).rms)
        assert got.count == expected.count
        np.testing.assert_allclose(got.var, expected.var, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][2] is not None])
def test_each_option_changes_the_recomputed_iteration(name):
    task, _, flags, base = setting(name)
    ours, theirs = (recompute(task, tuple(f.items()))[0].params for f in (flags, dict(norm_reward=False) | base))
    assert largest_difference(ours, theirs) > 1e-5


def test_target_kl_stops_the_recomputed_iteration_midway():
    task, args, flags, _ = setting("hopper-target_kl")
    stopped, _, kls = recompute(task, tuple(flags.items()))
    total = args.update_epochs * args.num_minibatches
    assert total / 4 < stopped.count < total * 3 / 4 and len(kls) == stopped.count + 1


@pytest.mark.parametrize("name", CASES)
def test_float64_equals_the_recomputed_iteration(name):
    differences = differences_in_float64(name)
    assert max(differences.values()) < 1e-8, differences


@pytest.mark.parametrize("name", CASES)
def test_float32_equals_the_recomputed_iteration(name):
    task, args, _, _ = setting(name)
    differences, report = differences_in_float32(name)
    assert max(differences.values()) < 1e-3, differences
    recording = record(task)
    rate = reference.annealed_rate(args, int(recording.state.iteration) + 1)
    assert report.metrics["charts/learning_rate"] == pytest.approx(rate, rel=1e-6)
    running = wrapper_of(recording.state, ppo.VectorEnvRecordStatistics)
    raw, _, _ = recomputed_steps(task, False)
    returns, lengths = reference.finished_episodes(running.episode_return, running.episode_length, raw)
    assert report.metrics["charts/num_episodes"] == len(returns) > 0
    assert report.episode_means["charts/episodic_return"] == pytest.approx(returns.mean(), rel=1e-5)
    assert report.episode_means["charts/episodic_length"] == pytest.approx(lengths.mean(), rel=1e-6)


if __name__ == "__main__":
    print("| case | float64: params | adam | returns | metrics | float32: params | returns | metrics |\n|-|-|-|-|-|-|-|-|")
    for name in CASES:
        double, (single, _) = differences_in_float64(name), differences_in_float32(name)
        print(f"| {name} | " + " | ".join(f"{x:.1e}" for x in (*double.values(), *single.values())) + " |", flush=True)
