"""Networks, densities and the optimizer's schedule."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ppo_continuous_action_envpool_xla_jax_scan as ppo
from compiled import improve


@pytest.fixture(scope="module")
def agent():
    return ppo.make_agent(ppo.Args(), jax.random.PRNGKey(0), obs_size=5, action_size=2)


def test_log_prob_of_a_diagonal_gaussian_by_hand():
    # Standard normal at 0 and a deviation of 2 at one deviation from the mean.
    mean, log_std = jnp.array([0.0, 1.0]), jnp.log(jnp.array([1.0, 2.0]))
    expected = -0.5 * math.log(2 * math.pi) + (-0.5 - math.log(2) - 0.5 * math.log(2 * math.pi))
    assert ppo.gaussian_log_prob(jnp.array([0.0, 3.0]), mean, log_std) == pytest.approx(expected)


def test_log_prob_integrates_to_one():
    x = jnp.linspace(-20, 20, 40001)[:, None]
    density = jnp.exp(ppo.gaussian_log_prob(x, jnp.full_like(x, 0.3), jnp.full_like(x, 0.7)))
    assert density.sum() * 1e-3 == pytest.approx(1, abs=1e-6)


def test_entropy_is_the_mean_of_minus_log_prob():
    log_std = jnp.array([0.2, -0.4])
    x = jnp.exp(log_std)[None] * jax.random.normal(jax.random.PRNGKey(0), (400_000, 2))
    sampled = -ppo.gaussian_log_prob(x, jnp.zeros_like(x), jnp.broadcast_to(log_std, x.shape)).mean()
    assert ppo.gaussian_entropy(log_std) == pytest.approx(float(sampled), abs=0.01)


def test_shapes_of_actor_and_critic(agent):
    (mean, log_std), value = agent.network.apply(agent.params, jnp.ones((3, 4, 5), jnp.float32))
    assert mean.shape == log_std.shape == (3, 4, 2) and value.shape == (3, 4)
    policy = agent.network.apply(agent.params, jnp.ones((3, 4, 5), jnp.float32), method="policy")
    np.testing.assert_array_equal(policy[0], mean)
    np.testing.assert_array_equal(agent.network.apply(agent.params, jnp.ones((3, 4, 5), jnp.float32), method="value"), value)


def test_initial_weights_are_orthogonal_with_the_published_gains(agent):
    gains = {
        "actor": {"Dense_0": math.sqrt(2), "Dense_1": math.sqrt(2), "Dense_2": 0.01},
        "critic": {"Dense_0": math.sqrt(2), "Dense_1": math.sqrt(2), "Dense_2": math.sqrt(2)},
    }
    for part, layers in gains.items():
        for layer, gain in layers.items():
            weights = agent.params["params"][part][layer]
            np.testing.assert_allclose(np.linalg.svd(weights["kernel"], compute_uv=False), gain, rtol=1e-4)
            assert (weights["bias"] == 0).all()
    assert (agent.params["params"]["actor"]["log_std"] == -0.5).all()


def test_actor_and_critic_share_no_parameter(agent):
    obs = jnp.ones((1, 5), jnp.float32)
    value_grads = jax.grad(lambda p: agent.network.apply(p, obs, method="value").sum())(agent.params)["params"]
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(value_grads["actor"]))
    assert any((leaf != 0).any() for leaf in jax.tree.leaves(value_grads["critic"]))


def test_dense_has_the_asked_gain():
    params = ppo.dense(8, 3.0).init(jax.random.PRNGKey(0), jnp.ones((1, 8), jnp.float32))["params"]
    np.testing.assert_allclose(params["kernel"] @ params["kernel"].T, 9 * np.eye(8), atol=1e-5)


def test_learning_rate_falls_linearly_from_its_full_value_and_never_below_zero():
    args = ppo.Args(total_timesteps=4 * 2048, learning_rate=1e-3)
    rates = [float(ppo.learning_rate(args, jnp.int32(iteration))) for iteration in range(6)]
    np.testing.assert_allclose(rates, [1e-3, 0.75e-3, 0.5e-3, 0.25e-3, 0, 0], atol=1e-12)


def test_learning_rate_stays_without_annealing():
    args = ppo.Args(total_timesteps=4 * 2048, learning_rate=1e-3, anneal_lr=False)
    assert all(ppo.learning_rate(args, jnp.int32(iteration)) == 1e-3 for iteration in range(6))


def test_optimizer_clips_the_joint_gradient_then_takes_adams_first_step():
    optimizer = ppo.make_optimizer(ppo.Args(max_grad_norm=0.5))
    grads = jnp.array([30.0, 40.0, 0.0])
    direction, _ = optimizer.update(grads, optimizer.init(grads))
    clipped = np.array([0.3, 0.4, 0.0])  # of norm 0.5
    np.testing.assert_allclose(direction, clipped / (np.abs(clipped) + 1e-5), rtol=1e-5)


def test_improve_moves_against_the_clipped_gradient_and_reports_its_norm_before_clipping(agent):
    batch = make_batch(agent)
    args = ppo.Args(max_grad_norm=0.1)
    improved, metrics = improve(agent, batch, jnp.float64(1e-3), args)
    grads = jax.jit(jax.grad(lambda p: ppo.ppo_loss(p, agent.network, batch, args)[0]))(agent.params)
    assert metrics["losses/grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-5)
    scale = min(1.0, 0.1 / float(optax.tree.norm(grads)))
    params, grads = jax.device_get((agent.params, grads))
    expected = jax.tree.map(lambda p, g: p - 1e-3 * scale * g / (abs(scale * g) + 1e-5), params, grads)
    for ours, theirs in zip(jax.tree.leaves(improved.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def make_batch(agent, rows=16):
    keys = jax.random.split(jax.random.PRNGKey(1), 6)
    obs, action = jax.random.normal(keys[0], (rows, 5), jnp.float32), jax.random.normal(keys[1], (rows, 2), jnp.float32)
    (mean, log_std), value = agent.network.apply(agent.params, obs)
    log_prob = ppo.gaussian_log_prob(action, mean, log_std) + 0.3 * jax.random.normal(keys[2], (rows,), jnp.float32)
    advantage, target = (jax.random.normal(key, (rows,), jnp.float32) for key in keys[3:5])
    return ppo.Batch(obs, action, log_prob, value + 0.3, advantage, target, jnp.arange(rows) % 4 != 0)


def plain_loss(agent, batch, args):
    """The loss as the papers write it, in NumPy, over the unmasked rows."""
    (mean, log_std), value = jax.device_get(agent.network.apply(agent.params, batch.obs))
    keep = np.asarray(batch.mask)
    std = np.exp(log_std)
    log_prob = (-((batch.action - mean) ** 2) / (2 * std**2) - np.log(std) - np.log(np.sqrt(2 * np.pi))).sum(-1)[keep]
    ratio = np.exp(log_prob - batch.log_prob[keep])
    advantage, target, old = (np.asarray(x)[keep] for x in (batch.advantage, batch.target, batch.value))
    value = value[keep]
    if args.norm_adv:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = np.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = np.maximum(-advantage * ratio, -advantage * clipped).mean()
    error = (value - target) ** 2
    if args.clip_vloss:
        error = np.maximum(error, (old + np.clip(value - old, -args.clip_coef, args.clip_coef) - target) ** 2)
    entropy = (0.5 + 0.5 * np.log(2 * np.pi) + log_std[keep]).sum(-1).mean()
    return {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": error.mean(),
        "losses/entropy": entropy,
        "losses/loss": policy_loss + args.vf_coef * error.mean() - args.ent_coef * entropy,
        "losses/old_approx_kl": -np.log(ratio).mean(),
        "losses/approx_kl": (ratio - 1 - np.log(ratio)).mean(),
        "losses/clipfrac": (np.abs(ratio - 1) > args.clip_coef).mean(),
    }


@pytest.mark.parametrize(
    "flags",
    [{}, {"norm_adv": True}, {"clip_vloss": True}, {"ent_coef": 0.1, "vf_coef": 2.0}, {"clip_coef": 0.05}],
    ids=str,
)
def test_loss_and_diagnostics_equal_the_papers_formulas_over_unmasked_rows(agent, flags):
    args, batch = ppo.Args(**flags), make_batch(agent)
    loss, metrics = ppo.ppo_loss(agent.params, agent.network, batch, args)
    expected = plain_loss(agent, batch, args)
    assert metrics.keys() == expected.keys() and loss == metrics["losses/loss"]
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name


def test_entropy_bonus_pushes_the_deviation_up(agent):
    batch = make_batch(agent)._replace(advantage=jnp.zeros(16, jnp.float32))
    grads = jax.grad(lambda p: ppo.ppo_loss(p, agent.network, batch, ppo.Args(ent_coef=1.0))[0])(agent.params)
    np.testing.assert_allclose(grads["params"]["actor"]["log_std"], -1.0, rtol=1e-5)


@pytest.mark.parametrize("norm_adv", [False, True])
def test_a_wholly_masked_minibatch_has_no_loss_and_no_gradient(agent, norm_adv):
    batch = jax.tree.map(jnp.zeros_like, make_batch(agent))
    grads, metrics = jax.grad(ppo.ppo_loss, has_aux=True)(agent.params, agent.network, batch, ppo.Args(norm_adv=norm_adv))
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(grads))
    assert all(value == 0 for value in metrics.values())
