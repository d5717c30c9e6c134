"""An iteration as a whole: masks, early stopping, return statistics, dtypes, and flags that shape training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_continuous_action_envpool_xla_jax_scan as ppo
from compiled import collect_rollout, estimate_advantages, improve, update_agent
from fake import bandit_observe, bandit_reward, make_fake, task, train_fake

SMALL = dict(num_envs=8, num_steps=8, num_minibatches=4, update_epochs=2, total_timesteps=8 * 8 * 3)


def start(args, length=3, terminates=True):
    env, handle, obs = make_fake(args.num_envs, bandit_observe, bandit_reward, length, terminates)
    return env, ppo.make_state(args, task(1), handle, obs)


@functools.cache
def rollout_of(args):
    env, state = start(args)
    return collect_rollout(env, state, args)


def update(args, change=lambda rollout: rollout, key=0, rate=1e-3):
    state, rollout = rollout_of(args)
    return update_agent(state.agent, change(rollout), state.obs, jnp.float64(rate), jax.random.PRNGKey(key), args)


def leaves_equal(a, b):
    return all((x == y).all() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_rollout_rows_line_up_with_the_environments_answers():
    args = ppo.Args(**SMALL, norm_obs=False)
    state, rollout = rollout_of(args)
    sent = np.clip(rollout.action[..., 0], -1, 1)
    expected = np.where(rollout.is_reset, 0, -((sent - rollout.obs[..., 0]) ** 2))
    np.testing.assert_allclose(rollout.reward, expected, atol=1e-6)
    np.testing.assert_array_equal(rollout.is_reset[1:], (rollout.terminated | rollout.truncated)[:-1])
    assert rollout.is_reset.sum() == 8 * 2 and rollout.terminated.sum() == 8 * 2
    assert state.obs.shape == (8, 1)


def test_actions_deviate_from_the_mean_by_the_policys_deviation_each_on_its_own():
    args = ppo.Args(**SMALL)
    env, handle, obs = make_fake(args.num_envs, bandit_observe, bandit_reward, 3, True, action_size=2)
    state = ppo.make_state(args, task(1, 2), handle, obs)
    _, rollout = collect_rollout(env, state, args)
    evaluated = ppo.act(state.agent, rollout.obs, jax.random.PRNGKey(1))  # as evaluations with sampled actions do
    mean, log_std = state.agent.network.apply(state.agent.params, rollout.obs, method="policy")
    for action in (rollout.action, evaluated):
        noise = (action - mean) / jnp.exp(log_std)  # [8 steps, 8 environments, 2]
        assert abs(noise.mean()) < 0.25 and abs(noise.std() - 1) < 0.25  # of 128: three and four standard errors
        assert all(noise.std(axis).min() > 1e-3 for axis in range(3))  # no two share theirs


def test_another_seed_begins_with_another_network_and_another_key():
    (_, one), (_, two) = (start(ppo.Args(**SMALL, seed=seed)) for seed in (1, 2))
    assert (one.key != two.key).any() and not leaves_equal(one.agent.params, two.agent.params)


def test_stored_actions_are_neither_clipped_nor_mapped():
    args = ppo.Args(**SMALL)
    _, rollout = rollout_of(args)
    assert jnp.abs(rollout.action).max() > 1


@pytest.mark.parametrize("norm_adv", [False, True])
def test_nan_in_reset_rows_leaves_parameters_and_metrics_bitwise_unchanged(norm_adv):
    args = ppo.Args(**SMALL, norm_adv=norm_adv)

    def poison(rollout):
        bad = rollout.is_reset
        assert bad.any()
        return rollout._replace(
            reward=jnp.where(bad, jnp.nan, rollout.reward),
            log_prob=jnp.where(bad, jnp.nan, rollout.log_prob),
            action=jnp.where(bad[..., None], jnp.nan, rollout.action),
        )

    assert leaves_equal(update(args), update(args, poison))


def test_all_rows_reset_leaves_the_agent_as_it_was():
    args = ppo.Args(**SMALL)
    state, _ = rollout_of(args)
    agent, metrics = update(args, lambda rollout: rollout._replace(is_reset=jnp.ones_like(rollout.is_reset)))
    assert leaves_equal(agent.params, state.agent.params) and leaves_equal(agent.return_rms, state.agent.return_rms)
    assert metrics["losses/loss"] == 0


def test_ratio_is_one_before_the_first_step_clipped_actions_included():
    args = ppo.Args(**SMALL)
    state, rollout = rollout_of(args)
    assert (jnp.abs(rollout.action) > 1).any()
    mean, log_std = state.agent.network.apply(state.agent.params, rollout.obs, method="policy")
    ratio = jnp.exp(ppo.gaussian_log_prob(rollout.action, mean, log_std) - rollout.log_prob)
    np.testing.assert_allclose(ratio, 1, atol=1e-5)


def test_every_float_of_the_state_is_float32_but_the_running_statistics():
    args = ppo.Args(**SMALL, norm_reward=True)
    env, state = start(args)
    for _ in range(2):
        for path, leaf in jax.tree.leaves_with_path(state):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                expected = "float64" if "rms" in jax.tree_util.keystr(path) else "float32"
                assert leaf.dtype == expected, jax.tree_util.keystr(path)
        state, _ = ppo.train_iteration(state, env, args)
    _, rollout = collect_rollout(env, state, args)
    assert {leaf.dtype for leaf in jax.tree.leaves(rollout) if jnp.issubdtype(leaf.dtype, jnp.floating)} == {
        jnp.dtype("float32")
    }


def test_target_kl_stops_the_rest_of_the_iteration_but_annealing_goes_on():
    args = ppo.Args(**SMALL, target_kl=1e-9)
    env, state = start(args)
    rates, steps = [], []
    for _ in range(3):
        before = int(state.agent.opt_state[1].count)
        state, report = ppo.train_iteration(state, env, args)
        steps.append(int(state.agent.opt_state[1].count) - before)
        rates.append(float(report.metrics["charts/learning_rate"]))
    assert steps == [1, 1, 1]  # the first minibatch has ratio 1, the second exceeds the limit
    np.testing.assert_allclose(rates, [3e-4, 2e-4, 1e-4])


def test_after_a_stop_nothing_changes_and_metrics_are_of_the_executed_minibatches():
    args = ppo.Args(**SMALL, target_kl=1e-9)
    state, rollout = rollout_of(args)
    agent, metrics = update(args)
    first_estimate, batch = estimate_advantages(state.agent, rollout, state.obs, args)
    # The second epoch would have updated the return statistics again.
    assert agent.return_rms.count == first_estimate.return_rms.count == batch.mask.sum()
    epoch_key = jax.random.split(jax.random.PRNGKey(0), args.update_epochs)[0]
    order = ppo.random_order(epoch_key, args.batch_size).reshape(args.num_minibatches, -1)
    minibatch = jax.tree.map(lambda x: x[order[0]], batch)
    improved, expected = improve(first_estimate, minibatch, jnp.float64(1e-3), args)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-4, abs=1e-7), name
    for ours, theirs in zip(jax.tree.leaves(agent.params), jax.tree.leaves(improved.params), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_a_target_kl_below_the_first_minibatchs_stops_before_any_step():
    args = ppo.Args(**SMALL, target_kl=0.01)
    state, _ = rollout_of(args)
    agent, metrics = update(args, lambda rollout: rollout._replace(log_prob=rollout.log_prob + 1))
    assert leaves_equal(agent.params, state.agent.params)
    assert agent.opt_state[1].count == 0 and metrics["losses/loss"] == 0


def test_return_statistics_take_unmasked_raw_returns_after_scaling_with_the_old_ones():
    args = ppo.Args(**SMALL)
    state, rollout = rollout_of(args)
    old = state.agent.replace(return_rms=state.agent.return_rms.replace(var=jnp.float64(4.0), count=jnp.float64(10.0)))
    agent, batch = estimate_advantages(old, rollout, state.obs, args)
    value = old.network.apply(old.params, rollout.obs, method="value").reshape(-1)
    keep = np.asarray(batch.mask)
    returns = (batch.target * 2.0)[keep]  # raw: in units of the old deviation, sqrt(4)
    np.testing.assert_allclose(returns, (batch.advantage + 2.0 * value)[keep], rtol=1e-5, atol=1e-6)
    expected = old.return_rms.update(returns, jnp.ones(len(returns), bool))
    assert agent.return_rms.mean == pytest.approx(float(expected.mean), rel=1e-5)
    assert agent.return_rms.var == pytest.approx(float(expected.var), rel=1e-5)
    assert agent.return_rms.count == 10 + keep.sum()


def test_without_norm_return_targets_are_raw_returns():
    args = ppo.Args(**SMALL, norm_return=False)
    state, rollout = rollout_of(args)
    agent = state.agent.replace(return_rms=state.agent.return_rms.replace(var=jnp.float64(100.0)))
    assert agent.return_scale(args) == 1.0 and agent.return_scale(ppo.Args()) == pytest.approx(10.0)
    _, batch = estimate_advantages(agent, rollout, state.obs, args)
    np.testing.assert_allclose(batch.target, jnp.where(batch.mask, batch.advantage + batch.value, 0), rtol=1e-5, atol=1e-6)


def test_masked_rows_of_a_batch_are_zero():
    state, rollout = rollout_of(args := ppo.Args(**SMALL))
    _, batch = estimate_advantages(state.agent, rollout, state.obs, args)
    assert batch.mask.dtype == bool and batch.mask.sum() == 64 - 16
    for leaf in jax.tree.leaves(batch):
        assert (leaf[~batch.mask] == 0).all()


def test_explained_variance_is_of_the_critic_before_the_updates():
    args = ppo.Args(**SMALL)
    state, rollout = rollout_of(args)
    _, batch = estimate_advantages(state.agent, rollout, state.obs, args)
    expected = ppo.explained_variance(batch.value, batch.target, batch.mask)
    assert update(args)[1]["losses/explained_variance"] == pytest.approx(float(expected), rel=1e-4)


def test_epochs_shuffle_differently():
    once, twice = (ppo.Args(**SMALL | {"update_epochs": n, "num_minibatches": 64}, learning_rate=1e-3) for n in (1, 2))
    assert not leaves_equal(update(once)[0].params, update(twice)[0].params)
    orders = [ppo.random_order(key, 64) for key in jax.random.split(jax.random.PRNGKey(0), 2)]
    assert (orders[0] != orders[1]).any()
    assert not leaves_equal(update(once, key=0)[0].params, update(once, key=1)[0].params)


BASE = ppo.Args(**SMALL, seed=1)
CHANGES = dict(
    seed=2,
    total_timesteps=SMALL["total_timesteps"] * 2,
    learning_rate=1e-3,
    anneal_lr=False,
    gamma=0.5,
    gae_lambda=0.5,
    num_minibatches=2,
    update_epochs=3,
    norm_adv=True,
    clip_coef=1e-3,
    clip_vloss=True,
    ent_coef=0.1,
    vf_coef=1.0,
    max_grad_norm=1e-3,
    target_kl=1e-9,
    norm_return=False,
    recompute_advantage=False,
    norm_obs=False,
    norm_reward=True,
    num_steps=16,
    num_envs=16,
)


@functools.cache
def trained(args):
    env, state = start(args)
    for _ in range(2):
        state, _ = ppo.train_iteration(state, env, args)
    return state.agent.params


@pytest.mark.parametrize("flag", CHANGES)
def test_flag_changes_what_is_learned(flag):
    extra = {"clip_coef": 1e-3} if flag == "clip_vloss" else {}  # values move little in two iterations
    base = dataclasses.replace(BASE, **extra)
    assert not leaves_equal(trained(base), trained(dataclasses.replace(base, **{flag: CHANGES[flag]})))


def test_every_flag_that_shapes_training_is_in_the_list():
    others = "exp_name track wandb_project_name wandb_entity env_id env_kwargs num_threads save_model checkpoint_frequency"
    others = f"{others} resume evaluate eval_episodes eval_frequency eval_deterministic capture_video".split()
    assert {field.name for field in dataclasses.fields(ppo.Args)} == CHANGES.keys() | set(others)


def test_the_same_arguments_learn_the_same():
    env, state = start(BASE)
    again, _ = ppo.train_iteration(state, env, BASE)
    state, _ = ppo.train_iteration(state, env, BASE)
    assert leaves_equal(again, state)


def test_faults_name_what_is_not_finite():
    args = BASE

    def reward(t, context, action):
        return jnp.where(t == 1, jnp.nan, 0.0) * context

    env, handle, obs = make_fake(args.num_envs, bandit_observe, reward, 3, True)
    state = ppo.make_state(args, task(1), handle, obs)
    _, report = ppo.train_iteration(state, env, args)
    assert {name for name, fault in report.faults.items() if fault} == {"reward", "loss", "parameter"}
    env, state = start(args)
    _, report = ppo.train_iteration(state, env, args)
    assert not any(report.faults.values())
    broken = state.replace(obs=state.obs.at[0].set(jnp.nan))
    assert ppo.train_iteration(broken, env, args)[1].faults["observation"]


def test_the_logged_action_std_is_the_policys_mean_deviation():
    env, state = start(args := ppo.Args(**SMALL))
    state, report = ppo.train_iteration(state, env, args)
    log_std = np.asarray(state.agent.params["params"]["actor"]["log_std"])
    np.testing.assert_allclose(report.metrics["charts/action_std"], np.exp(log_std).mean(), rtol=1e-6)


def test_episode_means_are_of_finished_episodes_and_nan_of_none():
    args = ppo.Args(**SMALL)
    # Episodes of ten steps: of 24 steps, the tenth ends one, the eleventh resets, the 21st ends another.
    _, reports = train_fake(args, lambda t, c: c[:, None], lambda t, c, a: jnp.ones_like(c), 10, False)
    assert [int(report.metrics["charts/num_episodes"]) for report in reports] == [0, 8, 8]
    assert [report.ended.sum() for report in reports] == [0, 8, 8]
    assert all(np.isnan(value) for value in reports[0].episode_means.values())
    for report in reports[1:]:
        assert all(value == 10 for value in report.episode_means.values())  # returns and lengths, last and average
        np.testing.assert_array_equal(report.episode_return[report.ended], 10)


def test_averages_leave_out_environments_that_have_finished_nothing():
    rollout = rollout_of(ppo.Args(**SMALL))[1]
    none = jnp.zeros((8, 8), jnp.int32)
    info = {"returned_episode_return": none.at[-1, 5].set(12), "returned_episode_length": none.at[-1, 5].set(3)}
    means = ppo.episode_means(rollout._replace(info=rollout.info | info))
    assert means["charts/avg_episodic_return"] == 12 and means["charts/avg_episodic_length"] == 3


def test_success_rate_is_the_share_of_finished_episodes_whose_last_step_succeeded():
    rollout = rollout_of(ppo.Args(**SMALL))[1]
    ended = rollout.terminated | rollout.truncated
    success = ~ended | (jnp.arange(8) < 2)[None]  # all succeed on the way, a quarter to the end
    for key in ("success", "is_success"):
        means = ppo.episode_means(rollout._replace(info=rollout.info | {key: success}))
        assert means["charts/success_rate"] == 0.25
    assert "charts/success_rate" not in ppo.episode_means(rollout)
