"""Running statistics and masked means, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_continuous_action_envpool_xla_jax_scan as ppo


def test_running_statistics_match_numpy_far_from_zero():
    stream = np.random.default_rng(0).normal(1e4, 1e-2, (50, 64, 3))
    rms = ppo.RunningMeanStd.create((3,))
    for batch in stream:
        rms = rms.update(jnp.asarray(batch), jnp.ones(64, bool))
    np.testing.assert_allclose(rms.mean, stream.mean((0, 1)), rtol=1e-12)
    np.testing.assert_allclose(np.sqrt(rms.var), stream.std((0, 1)), rtol=1e-8)
    assert rms.count == 50 * 64


def test_first_batch_replaces_the_initial_statistics():
    rms = ppo.RunningMeanStd.create().update(jnp.array([1.0, 3.0]), jnp.ones(2, bool))
    assert rms.mean == 2.0 and rms.var == 1.0 and rms.count == 2.0
    rms = ppo.RunningMeanStd.create().update(jnp.array([5.0, 5.0]), jnp.ones(2, bool))
    assert rms.mean == 5.0 and rms.var == 0.0


def test_masked_rows_do_not_count_even_if_nan():
    x, mask = jnp.array([[1.0, 10.0], [np.nan, np.nan], [3.0, 30.0]]), jnp.array([True, False, True])
    rms = ppo.RunningMeanStd.create((2,)).update(x, mask)
    np.testing.assert_allclose(rms.mean, [2.0, 20.0])
    np.testing.assert_allclose(rms.var, [1.0, 100.0])
    assert rms.count == 2.0


@pytest.mark.parametrize("batches", [0, 1])
def test_all_masked_batch_changes_no_statistics(batches):
    rms = ppo.RunningMeanStd.create((2,))
    for _ in range(batches):
        rms = rms.update(jnp.array([[1.0, 2.0], [3.0, 5.0]]), jnp.ones(2, bool))
    after = rms.update(jnp.full((2, 2), np.nan), jnp.zeros(2, bool))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), rms, after))


def test_statistics_are_float64_whatever_they_are_fed():
    rms = ppo.RunningMeanStd.create((2,)).update(jnp.ones((4, 2), jnp.float32), jnp.ones(4, bool))
    assert {leaf.dtype for leaf in jax.tree.leaves(rms)} == {jnp.dtype("float64")}


def test_std_has_an_epsilon_inside_the_root():
    rms = ppo.RunningMeanStd.create().replace(var=jnp.zeros((), jnp.float64))
    assert rms.std == pytest.approx(1e-4)


def test_masked_mean_of_nothing_is_zero_and_of_nan_outside_the_mask_is_finite():
    assert ppo.masked_mean(jnp.array([np.nan, 1.0]), jnp.zeros(2, bool)) == 0.0
    assert ppo.masked_mean(jnp.array([np.nan, 1.0, 2.0]), jnp.array([False, True, True])) == 1.5


def test_explained_variance_is_one_for_perfect_values_zero_for_a_constant_and_guarded():
    target, mask = jnp.array([1.0, 2.0, 3.0, 99.0]), jnp.array([True, True, True, False])
    assert ppo.explained_variance(target, target, mask) == 1.0
    assert ppo.explained_variance(jnp.zeros(4), target, mask) == 0.0
    assert ppo.explained_variance(2 * target, target, mask) == pytest.approx(0.0)
    assert ppo.explained_variance(jnp.arange(4.0), jnp.ones(4), mask) == 0.0
    assert ppo.explained_variance(target, target, jnp.zeros(4, bool)) == 0.0


def test_random_order_is_a_permutation_that_the_key_decides():
    orders = [np.asarray(ppo.random_order(jax.random.PRNGKey(seed), 2048)) for seed in (0, 0, 1)]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(2048))
    assert (orders[0] == orders[1]).all() and (orders[0] != orders[2]).mean() > 0.99


def test_random_order_is_uniform():
    keys = jax.random.split(jax.random.PRNGKey(0), 6000)
    orders = np.asarray(jax.vmap(lambda key: ppo.random_order(key, 3))(keys))
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 6 and abs(counts - 1000).max() < 5 * np.sqrt(1000)


def test_all_finite_sees_one_bad_entry_anywhere():
    tree = {"a": jnp.ones((2, 3)), "b": [jnp.zeros(2, jnp.int32)]}
    assert ppo.all_finite(tree)
    for bad in (np.nan, np.inf):
        assert not ppo.all_finite(tree | {"a": jnp.ones((2, 3)).at[1, 2].set(bad)})
