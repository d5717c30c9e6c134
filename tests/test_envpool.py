"""EnvPool as it really is: its XLA steps, its bounds, its seeds, its threads."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ppo_continuous_action_envpool_xla_jax_scan as ppo


def make(env_id, num_envs=4, seed=1, stream=0, **options):
    return ppo.make_pool(env_id, num_envs, ppo.environment_seeds(num_envs, seed, stream, 0), **options)


@pytest.mark.parametrize("env_id", ["Hopper-v4", "CheetahRun-v1", "Pendulum-v1"])
def test_xla_steps_equal_python_steps_of_a_second_pool(env_id):
    pools = [make(env_id, max_episode_steps=150) for _ in range(2)]
    env, handle = ppo.as_env(pools[0])
    first, second = (jax.tree.map(np.float32, pool.reset()[0]) for pool in pools)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    space, rng, resets = pools[0].action_space, np.random.default_rng(0), 0
    xla_step = jax.jit(lambda handle, action: env.recv(env.send(handle, action)))
    for _ in range(200):
        action = rng.uniform(space.low, space.high, (4, *space.shape)).astype(np.float32)
        handle, step = xla_step(handle, action)
        obs, reward, terminated, truncated, info = pools[1].step(action.astype(space.dtype))
        jax.tree.map(np.testing.assert_array_equal, step.obs, jax.tree.map(np.float32, obs))
        np.testing.assert_array_equal(step.reward, np.float32(reward))
        np.testing.assert_array_equal(step.terminated, terminated)
        np.testing.assert_array_equal(step.truncated, truncated)
        np.testing.assert_array_equal(step.is_reset, info["elapsed_step"] == 0)
        resets += int(step.is_reset.sum())
    assert resets > 0


def test_a_reset_step_follows_each_end_and_has_no_reward():
    env, handle = ppo.as_env(pool := make("HalfCheetah-v4", max_episode_steps=5))
    pool.reset()
    rows = []
    for _ in range(12):
        handle, step = env.recv(env.send(handle, jnp.zeros((4, 6), jnp.float32)))
        rows.append(step)
    np.testing.assert_array_equal([bool(row.truncated.all()) for row in rows], [t % 6 == 4 for t in range(12)])
    np.testing.assert_array_equal([bool(row.is_reset.all()) for row in rows], [t % 6 == 5 for t in range(12)])
    assert all((row.reward == 0).all() for row in rows if row.is_reset.all())
    assert not any(row.terminated.any() for row in rows)


@pytest.mark.parametrize(("env_id", "bound"), [("Humanoid-v4", 0.4), ("InvertedPendulum-v4", 3.0)])
def test_actions_reach_envpool_mapped_to_its_bounds(env_id, bound):
    # Two pools: one is sent agent actions through the wrappers, the other the mapped actions directly.
    ours, raw = make(env_id), make(env_id)
    wrappers = ppo.make_wrappers(ppo.Args(env_id=env_id), ppo.make_task(ours))
    env, handle = ppo.as_env(ours)
    ours.reset(), raw.reset()
    size = ours.action_space.shape[0]
    for value in (-5.0, -1.0, -0.25, 0.5, 1.0, 5.0):
        _, sent = ppo.fold(wrappers, "send", jnp.full((4, size), value, jnp.float32))
        np.testing.assert_allclose(sent, bound * np.clip(value, -1, 1), rtol=1e-6)
        handle, step = env.recv(env.send(handle, sent))
        obs, *_ = raw.step(np.full((4, size), bound * np.clip(value, -1, 1)))
        np.testing.assert_allclose(step.obs, obs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("env_id", "dtype"), [("HalfCheetah-v4", "float64"), ("Pendulum-v1", "float32")])
def test_actions_are_sent_in_the_action_spaces_dtype(env_id, dtype):
    pool = make(env_id)
    assert pool.action_space.dtype == dtype
    env, handle = ppo.as_env(pool)
    jaxpr = str(jax.make_jaxpr(env.send)(handle, jnp.zeros((4, *pool.action_space.shape), jnp.float32)))
    assert ("f64[" in jaxpr) == (dtype == "float64")


def test_observations_and_rewards_arrive_in_float32():
    env, handle = ppo.as_env(pool := make("HalfCheetah-v4"))
    assert pool.reset()[0].dtype == np.float64
    _, step = env.recv(env.send(handle, jnp.zeros((4, 6), jnp.float32)))
    assert step.obs.dtype == step.reward.dtype == step.info["x_velocity"].dtype == jnp.float32
    assert "players" not in step.info


def test_to_float32_leaves_integers_alone():
    assert ppo.to_float32(np.arange(3)).dtype == jnp.int64
    assert ppo.to_float32(np.ones(3)).dtype == jnp.float32


def test_two_seeds_two_streams_and_two_iterations_share_no_environment():
    kinds = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 7)]
    seeds = [ppo.environment_seeds(64, *kind) for kind in kinds]
    assert len(set().union(*seeds)) == 4 * 64
    assert all(0 <= s < 2**31 for row in seeds for s in row)
    assert seeds[0] == [int(s) // 2 for s in np.random.SeedSequence((1, 0, 0)).generate_state(64)]
    first = [make("HalfCheetah-v4", 64, seed).reset()[0] for seed in (1, 2)]
    rows = {row.tobytes() for obs in first for row in obs}
    assert len(rows) == 128


def test_num_threads_is_the_number_of_stepping_threads():
    def threads(num_threads):
        before = len(os.listdir("/proc/self/task"))
        pool = ppo.make_pool("Hopper-v4", 4, ppo.environment_seeds(4, 1, 0, 0), num_threads)
        assert pool.config["num_threads"] == num_threads
        return len(os.listdir("/proc/self/task")) - before

    assert threads(3) - threads(1) == 2


SUITES = """
    Ant-v3 ManipulatorBringBall-v1 FetchReach-v4 MetaWorld/Assembly-v3 myoArmReachFixed-v0 MuJoCoPlayground/SpotGetup-v1
    BipedalWalker-v3 MountainCarContinuous-v0 Parking-v0
""".split()


@pytest.mark.parametrize("env_id", SUITES)  # benchmark/tasks.py tries all tasks
def test_a_task_of_each_suite_trains_an_iteration(env_id):
    args = ppo.Args(env_id=env_id, num_envs=4, num_steps=8, num_minibatches=2, update_epochs=1, total_timesteps=32)
    pool = make(env_id)
    env, handle = ppo.as_env(pool)
    obs = jax.tree.map(ppo.to_float32, pool.reset()[0])
    state = ppo.make_state(args, ppo.make_task(pool), handle, obs)
    state, report = ppo.train_iteration(state, env, args)
    assert not any(report.faults.values()) and state.iteration == 1


def test_environment_options_reach_envpool():
    pool = make("Ant-v4", use_contact_force=True)
    assert pool.observation_space.shape == (111,) and make("Ant-v4").observation_space.shape == (27,)


def test_env_kwargs_are_literals_or_else_strings():
    pairs = ("max_episode_steps=200", "use_contact_force=True", "xml_file=a=b.xml", "scale=-0.5")
    assert ppo.Args(env_kwargs=pairs).env_options == {
        "max_episode_steps": 200,
        "use_contact_force": True,
        "xml_file": "a=b.xml",
        "scale": -0.5,
    }


@pytest.mark.parametrize(
    ("env_id", "options", "message"),
    [
        ("HalfCheeta-v4", {}, "nearest names are HalfCheetah-v4"),
        ("CartPole-v1", {}, "Discrete(2); a vector of continuous actions"),
        ("RubiksCube-v0", {}, "int32); a vector of continuous actions"),
        ("CarRacing-v3", {}, "(96, 96, 3)"),
        ("LqrLqr21-v1", {}, "finite bounds are needed"),  # +-1e10 is what MuJoCo calls unbounded
        ("FrankaKitchen-v1", {}, "one dict of them"),
        ("HalfCheetah-v4", {"colour": 1}, "env_kwargs=colour: no option of HalfCheetah-v4; it takes"),
        ("HalfCheetah-v4", {"num_envs": 1}, "env_kwargs=num_envs: no option"),
        ("HalfCheetah-v4", {"max_episode_steps": "many"}, "another type"),
        ("VizdoomCustom-v1", {}, "EnvPool cannot make it here"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tasks_that_cannot_be_trained_on_are_refused_by_name(env_id, options, message):
    with pytest.raises(ppo.BadInput) as error:
        ppo.check_task(env_id, options)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("options", [{"xml_file": "none.xml"}, {"frame_stack": 0}])
def test_options_that_envpool_rejects_are_refused_in_one_line(options):
    with pytest.raises(ppo.BadInput, match=next(iter(options))) as error:
        make("HalfCheetah-v4", **options)
    assert "\n" not in str(error.value)


def test_first_line_of_an_error_is_never_empty():
    assert ppo.first_line(ValueError("one\ntwo")) == "one" and ppo.first_line(ValueError()) == "ValueError()"


def test_a_backend_that_does_not_exist_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: (_ for _ in ()).throw(RuntimeError("no such backend")))
    with pytest.raises(ppo.BadInput, match="no such backend; set JAX_PLATFORMS=cpu"):
        make("HalfCheetah-v4")


def test_unbounded_actions_are_refused(monkeypatch):
    import envpool

    spec = envpool.make_spec("HalfCheetah-v4")

    class Unbounded:
        config, observation_space = spec.config, spec.observation_space
        action_space = type(spec.action_space)(-np.inf, np.inf, (6,), np.float64)

    monkeypatch.setattr(envpool, "make_spec", lambda *args, **kwargs: Unbounded)
    with pytest.raises(ppo.BadInput, match="finite bounds are needed"):
        ppo.check_task("HalfCheetah-v4", {})


def test_a_tpu_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(ppo.BadInput, match="JAX_PLATFORMS=cpu"):
        make("HalfCheetah-v4")
