"""Generalized advantage estimation, by hand and against a plain loop."""

import jax.numpy as jnp
import numpy as np
import pytest

import ppo_continuous_action_envpool_xla_jax_scan as ppo

GAMMA, LAMBDA = 0.9, 0.5


def column(*entries):
    """One environment's values over time, as [T, 1]."""
    return jnp.asarray(entries, jnp.float64 if isinstance(entries[0], float) else bool)[:, None]


def gae(reward, value, terminated, truncated, gamma=GAMMA, gae_lambda=LAMBDA):
    return np.asarray(ppo.compute_gae(reward, value, terminated, truncated, gamma, gae_lambda))


def plain_loop(reward, value, terminated, truncated, gamma, gae_lambda):
    advantage, following = np.zeros_like(reward), np.zeros(reward.shape[1])
    for t in reversed(range(len(reward))):
        for n in range(reward.shape[1]):
            bootstrap = 0.0 if terminated[t, n] else value[t + 1, n]
            trace = 0.0 if terminated[t, n] or truncated[t, n] else following[n]
            advantage[t, n] = reward[t, n] + gamma * bootstrap - value[t, n] + gamma * gae_lambda * trace
        following = advantage[t]
    return advantage


def test_two_steps_by_hand():
    advantage = gae(column(1.0, 2.0), column(10.0, 20.0, 30.0), column(False, False), column(False, False))
    last = 2 + 0.9 * 30 - 20  # 9
    first = 1 + 0.9 * 20 - 10 + 0.45 * last  # 13.05
    np.testing.assert_allclose(advantage[:, 0], [first, last])


def test_termination_neither_bootstraps_nor_traces():
    advantage = gae(column(1.0, 2.0), column(10.0, 20.0, 30.0), column(True, False), column(False, False))
    np.testing.assert_allclose(advantage[:, 0], [1 - 10, 9])


def test_truncation_bootstraps_but_does_not_trace():
    advantage = gae(column(1.0, 2.0), column(10.0, 20.0, 30.0), column(False, False), column(True, False))
    np.testing.assert_allclose(advantage[:, 0], [1 + 0.9 * 20 - 10, 9])


def test_both_flags_in_one_column_act_at_their_own_steps():
    reward, value = column(1.0, 1.0, 1.0, 1.0), column(1.0, 2.0, 3.0, 4.0, 5.0)
    advantage = gae(reward, value, column(False, True, False, False), column(False, False, False, True))
    last = 1 + 0.9 * 5 - 4
    np.testing.assert_allclose(advantage[:, 0], [1 + 1.8 - 1 + 0.45 * (1 - 2), 1 - 2, 1 + 3.6 - 3 + 0.45 * last, last])


@pytest.mark.parametrize(("terminated", "expected"), [(True, 2.0 - 20), (False, 2 + 0.9 * 30 - 20)])
def test_done_on_the_last_row_looks_past_the_rollout_only_if_truncated(terminated, expected):
    flags = column(False, True), column(False, False)
    advantage = gae(column(1.0, 2.0), column(10.0, 20.0, 30.0), *(flags if terminated else flags[::-1]))
    assert advantage[1, 0] == pytest.approx(expected)


def test_two_episodes_joined_by_a_reset_row_equal_the_two_apart():
    # The first episode terminates, or is truncated with 7 as the value of its last observation; then the reset row.
    for terminated in (True, False):
        end = column(False, True), column(False, False)
        first = gae(column(1.0, 2.0), column(3.0, 4.0, 7.0), *(end if terminated else end[::-1]))
        second = gae(column(5.0, 6.0), column(8.0, 9.0, 10.0), column(False, False), column(False, False))
        end = column(False, True, False, False, False), column(False, False, False, False, False)
        joined = gae(
            column(1.0, 2.0, np.nan, 5.0, 6.0),
            column(3.0, 4.0, 7.0, 8.0, 9.0, 10.0),
            *(end if terminated else end[::-1]),
        )
        np.testing.assert_allclose(joined[[0, 1, 3, 4]], np.concatenate([first, second]))


@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
def test_equals_a_plain_loop(gae_lambda):
    rng = np.random.default_rng(0)
    reward, value = rng.normal(size=(40, 5)), rng.normal(size=(41, 5))
    terminated, truncated = rng.random((40, 5)) < 0.1, rng.random((40, 5)) < 0.1
    truncated &= ~terminated
    ours = gae(*map(jnp.asarray, (reward, value, terminated, truncated)), 0.99, gae_lambda)
    np.testing.assert_allclose(ours, plain_loop(reward, value, terminated, truncated, 0.99, gae_lambda), rtol=1e-12)


def test_follows_the_dtype_of_its_inputs():
    for dtype in (jnp.float32, jnp.float64):
        flags = jnp.zeros((3, 2), bool)
        assert ppo.compute_gae(jnp.ones((3, 2), dtype), jnp.ones((4, 2), dtype), flags, flags, 0.9, 0.9).dtype == dtype
