"""Each wrapper alone, and the order in which they fold."""

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_continuous_action_envpool_xla_jax_scan as ppo
from fake import task


def step(obs=((0.0,), (0.0,)), reward=(0.0, 0.0), terminated=(0, 0), truncated=(0, 0), is_reset=(0, 0), info=None):
    flags = (jnp.array(flag, bool) for flag in (terminated, truncated, is_reset))
    return ppo.Step(jnp.asarray(obs, jnp.float32), jnp.asarray(reward, jnp.float32), *flags, info or {})


class Tagger(ppo.EnvWrapper):
    """Multiply by ten and add a digit, both ways: the digits tell the order."""

    digit: float
    steps: jax.Array

    def reset(self, obs):
        return self.replace(steps=self.steps + 1), 10 * obs + self.digit

    def send(self, action):
        return self.replace(steps=self.steps + 10), 10 * action + self.digit

    def recv(self, step):
        return self.replace(steps=self.steps + 100), step._replace(reward=10 * step.reward + self.digit)


def test_base_wrapper_is_the_identity():
    wrapper, obs = ppo.EnvWrapper(), jnp.ones((2, 1))
    assert wrapper.reset(obs) == (wrapper, obs)
    assert wrapper.send(obs) == (wrapper, obs)
    answer = step()
    assert wrapper.recv(answer) == (wrapper, answer)


def test_fold_goes_outwards_for_reset_and_recv_and_inwards_for_send():
    wrappers = tuple(Tagger(float(digit), jnp.zeros((), jnp.int32)) for digit in (1, 2, 3))
    wrappers, obs = ppo.fold(wrappers, "reset", jnp.zeros(()))
    wrappers, action = ppo.fold(wrappers, "send", jnp.zeros(()))
    wrappers, answer = ppo.fold(wrappers, "recv", step())
    assert obs == 123 and action == 321 and (answer.reward == 123).all()
    assert [wrapper.digit for wrapper in wrappers] == [1, 2, 3]
    assert all(wrapper.steps == 111 for wrapper in wrappers)


def test_fold_of_no_wrappers_is_the_identity():
    assert ppo.fold((), "send", 5) == ((), 5)


def test_record_statistics_counts_neither_the_reset_step_nor_its_reward():
    wrapper, _ = ppo.VectorEnvRecordStatistics.create().reset(jnp.zeros((2, 1)))
    answers = [
        step(reward=(1, 10)),
        step(reward=(2, 20), terminated=(1, 0)),
        step(reward=(np.nan, 30), is_reset=(1, 0)),
        step(reward=(4, 40), truncated=(0, 1)),
        step(reward=(5, 50), is_reset=(0, 1), truncated=(1, 0)),
    ]
    infos = []
    for answer in answers:
        wrapper, answer = wrapper.recv(answer)
        infos.append(answer.info)
    np.testing.assert_array_equal([i["episode_return"] for i in infos], [[1, 10], [3, 30], [0, 60], [4, 100], [9, 0]])
    np.testing.assert_array_equal([i["episode_length"] for i in infos], [[1, 1], [2, 2], [0, 3], [1, 4], [2, 0]])
    np.testing.assert_array_equal(infos[2]["returned_episode_return"], [3, 0])
    np.testing.assert_array_equal(infos[4]["returned_episode_return"], [9, 100])
    np.testing.assert_array_equal(infos[4]["returned_episode_length"], [2, 4])


def test_record_statistics_keeps_the_info_it_is_given():
    wrapper, _ = ppo.VectorEnvRecordStatistics.create().reset(jnp.zeros((2, 1)))
    assert wrapper.recv(step(info={"success": 1}))[1].info["success"] == 1


def test_reset_sizes_per_environment_state_and_keeps_what_was_learned():
    record, _ = ppo.VectorEnvRecordStatistics.create(3).reset({"a": jnp.zeros((5, 2))})
    assert record.episode_return.shape == record.returned_episode_length.shape == (5,)
    norm_reward = ppo.VectorEnvNormReward.create(0.9).reset(jnp.zeros((2, 1)))[0].recv(step(reward=(1, 3)))[0]
    resized, _ = norm_reward.reset(jnp.zeros((7, 1)))
    assert resized.discounted_return.shape == (7,) and (resized.discounted_return == 0).all()
    assert resized.rms.mean == norm_reward.rms.mean == 2.0
    norm_obs = ppo.VectorEnvNormObs(ppo.RunningMeanStd.create((1,))).reset(jnp.ones((2, 1)))[0]
    assert norm_obs.reset(jnp.ones((4, 1)))[0].rms.count == 6


def test_flatten_obs_joins_keys_in_sorted_order_and_makes_columns_of_scalars():
    obs = {"velocity": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "height": jnp.array([5.0, 6.0])}
    wrapper = ppo.VectorEnvFlattenObs()
    expected = [[5, 1, 2], [6, 3, 4]]
    np.testing.assert_array_equal(wrapper.reset(obs)[1], expected)
    np.testing.assert_array_equal(wrapper.recv(step()._replace(obs=obs))[1].obs, expected)


def test_flatten_obs_leaves_vectors_and_flattens_matrices():
    vector, matrix = jnp.arange(6.0).reshape(2, 3), jnp.arange(12.0).reshape(2, 3, 2)
    np.testing.assert_array_equal(ppo.VectorEnvFlattenObs().reset(vector)[1], vector)
    np.testing.assert_array_equal(ppo.VectorEnvFlattenObs().reset(matrix)[1], matrix.reshape(2, 6))


def test_clip_act_maps_the_unit_box_to_the_bounds():
    wrapper = ppo.VectorEnvClipAct(jnp.array([-0.4, 0.0]), jnp.array([0.4, 10.0]))
    actions = jnp.array([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0], [0.5, 0.5], [-7.0, 7.0]])
    expected = [[-0.4, 0.0], [0.0, 5.0], [0.4, 10.0], [0.2, 7.5], [-0.4, 10.0]]
    np.testing.assert_allclose(wrapper.send(actions)[1], expected, rtol=1e-6)


def test_norm_obs_normalizes_with_statistics_that_have_seen_the_batch():
    wrapper = ppo.VectorEnvNormObs(ppo.RunningMeanStd.create((1,)))
    wrapper, obs = wrapper.reset(jnp.array([[1.0], [3.0]], jnp.float32))
    np.testing.assert_allclose(obs, [[-1.0], [1.0]], rtol=1e-6)
    wrapper, answer = wrapper.recv(step(obs=[[5.0], [7.0]]))
    np.testing.assert_allclose(answer.obs[:, 0], (np.array([5, 7]) - 4) / np.sqrt(5), rtol=1e-6)
    assert answer.obs.dtype == jnp.float32 and wrapper.rms.count == 4


def test_norm_obs_clips_to_ten():
    rms = ppo.RunningMeanStd(jnp.zeros(1), jnp.ones(1), jnp.array(1e12))
    _, obs = ppo.VectorEnvNormObs(rms).reset(jnp.array([[100.0], [-100.0]]))
    np.testing.assert_array_equal(obs, [[10], [-10]])


def test_norm_obs_learns_from_the_first_observation_that_a_reset_step_brings():
    wrapper = ppo.VectorEnvNormObs(ppo.RunningMeanStd.create((1,)))
    wrapper, _ = wrapper.recv(step(obs=[[1.0], [3.0]], is_reset=(1, 1)))
    assert wrapper.rms.count == 2 and wrapper.rms.mean == 2


def test_norm_reward_divides_by_the_deviation_of_discounted_returns():
    wrapper, _ = ppo.VectorEnvNormReward.create(0.5).reset(jnp.zeros((2, 1)))
    seen = []
    for answer in [
        step(reward=(1, 2)),  # discounted returns 1, 2
        step(reward=(3, 4), terminated=(1, 0)),  # 3.5, 5
        step(reward=(np.nan, 6), is_reset=(1, 0)),  # masked, 8.5
        step(reward=(7, 8)),  # 7, 12.25
    ]:
        wrapper, normalized = wrapper.recv(answer)
        seen.append(np.asarray(normalized.reward))
    returns = [1, 2, 3.5, 5, 8.5, 7, 12.25]
    np.testing.assert_allclose(wrapper.rms.var, np.var(returns), rtol=1e-6)
    np.testing.assert_allclose(seen[1], [3, 4] / np.std(returns[:4]), rtol=1e-5)
    np.testing.assert_allclose(seen[3], [7, 8] / np.std(returns), rtol=1e-5)


def test_norm_reward_clips_to_ten():
    wrapper = ppo.VectorEnvNormReward(ppo.RunningMeanStd(*map(jnp.float64, (0, 1, 1e12))), jnp.zeros(2, jnp.float32), 0.9)
    np.testing.assert_array_equal(wrapper.recv(step(reward=(100, -100)))[1].reward, [10, -10])


@pytest.mark.parametrize(("flag", "wrapper"), [("norm_obs", ppo.VectorEnvNormObs), ("norm_reward", ppo.VectorEnvNormReward)])
def test_flags_choose_the_wrappers(flag, wrapper):
    for wanted in (False, True):
        wrappers = ppo.make_wrappers(ppo.Args(**{flag: wanted}), task(3))
        assert any(isinstance(w, wrapper) for w in wrappers) == wanted


def test_statistics_are_innermost_and_see_raw_rewards():
    wrappers = ppo.make_wrappers(ppo.Args(norm_reward=True), task(3))
    assert isinstance(wrappers[0], ppo.VectorEnvRecordStatistics)


def test_obs_spaces_are_those_of_a_dict_or_the_one():
    box = gym.spaces.Box(-1, 1, (3,))
    assert ppo.obs_spaces(box) == {"": box}
    assert dict(ppo.obs_spaces(gym.spaces.Dict(a=box))) == {"a": box}
    assert ppo.Task({"a": (3,), "b": ()}, np.zeros(1), np.ones(1)).obs_size == 4
