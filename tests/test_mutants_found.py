"""Facts that no other test held until a mutant of the script survived: keys, widths, dtypes, counting, speed."""

import types

import jax
import jax.numpy as jnp
import numpy as np

import ppo_continuous_action_envpool_xla_jax_scan as ppo
from compiled import collect_rollout, estimate_advantages, improve
from fake import bandit_observe, bandit_reward, make_fake, task

SMALL = dict(num_envs=4, num_steps=4, num_minibatches=2, update_epochs=2, total_timesteps=64)


def start(args):
    env, handle, obs = make_fake(args.num_envs, bandit_observe, bandit_reward, 3, True)
    return env, ppo.make_state(args, task(1), handle, obs)


def test_no_random_key_is_used_twice(monkeypatch):
    used, ppo_make_agent = [], ppo.make_agent

    def recording(function):
        def record(key, *rest):
            jax.debug.callback(lambda key: used.append(key.tobytes()), key)
            return function(key, *rest)

        return record

    for name in ("split", "normal", "bits"):
        monkeypatch.setattr(jax.random, name, recording(getattr(jax.random, name)))
    make_agent = recording(lambda key, args, *sizes: ppo_make_agent(args, key, *sizes))
    monkeypatch.setattr(ppo, "make_agent", lambda args, key, *sizes: make_agent(key, args, *sizes))
    args = ppo.Args(num_envs=2, num_steps=2, num_minibatches=1, update_epochs=2, total_timesteps=64, seed=5)
    env, state = start(args)
    for _ in range(2):
        state, _ = ppo.train_iteration(state, env, args)
    jax.effects_barrier()
    assert len(used) > 2 * (2 * 2 + 1 + 1 + 2) and len(set(used)) == len(used)


def test_both_networks_have_two_hidden_layers_of_64():
    _, state = start(ppo.Args(**SMALL))
    shapes = jax.tree.map(jnp.shape, state.agent.params["params"])
    for part in ("actor", "critic"):
        kernels = [shapes[part][f"Dense_{i}"]["kernel"] for i in range(3)]
        assert kernels == [(1, 64), (64, 64), (64, 1)] and "Dense_3" not in shapes[part]


def test_a_float32_rollout_gives_float32_rows_and_gradients():
    env, state = start(args := ppo.Args(**SMALL))
    state, rollout = collect_rollout(env, state, args)
    _, batch = estimate_advantages(state.agent, rollout, state.obs, args)
    _, metrics = improve(state.agent, batch, jnp.float32(1e-3), args)
    leaves = [*jax.tree.leaves(batch._replace(mask=None)), *metrics.values()]
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}


def test_reward_normalization_discounts_by_the_gamma_of_the_arguments():
    (wrapper,) = (
        w for w in ppo.make_wrappers(ppo.Args(gamma=0.5, norm_reward=True), task(1)) if isinstance(w, ppo.VectorEnvNormReward)
    )
    assert wrapper.gamma == 0.5


def test_a_batch_that_does_not_fit_into_total_timesteps_is_not_begun():
    assert ppo.Args(num_envs=4, num_steps=4, num_minibatches=1, total_timesteps=47).num_iterations == 2


def test_sps_counts_neither_the_first_iteration_nor_the_time_it_compiles_nor_evaluations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ppo.Args(num_envs=4, num_steps=4, num_minibatches=1, total_timesteps=64)
    clock = types.SimpleNamespace(now=1000.0)
    monkeypatch.setattr(ppo.time, "time", lambda: clock.now)

    def evaluate(*_):
        clock.now += 50.0
        return {"mean": 1.0}

    monkeypatch.setattr(ppo, "evaluate", evaluate)
    none = np.zeros((4, 4))
    report = ppo.Report({"losses/loss": np.float32(0)}, {}, {}, none.astype(bool), none)
    with ppo.RunLog(args, ppo.make_run_directory(args), ppo.StopSignal()) as log:
        log.start()
        for seconds in (100.0, 2.0, 6.0):  # the first compiles
            clock.now += seconds
            log.record(report)
            log.evaluate(None)
    assert log.sps == log.summary["SPS"] == 2 * 16 / 8
    assert log.global_step == 48
