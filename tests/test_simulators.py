"""EnvPool's MuJoCo tasks are Gymnasium's: the same actions from the same state give the same observations, rewards and ends.

EnvPool carries a MuJoCo of its own: 1.2.5 has 3.6.0. Where pip's is the same, all tasks agree to 1e-6, relatively, for 50
steps, but HalfCheetah: there a nudge of 1e-16 may grow to 5e-4 in 50 steps, and does so in Gymnasium alone too. Where pip's
is newer, what floats free agrees for two steps: MuJoCo 4.0.0 turns free bodies otherwise in RK4, and since 3.8.1 the
humanoids' solver, PGS, leaves its 50 sweeps, which do not converge, with other forces.
"""

import ctypes
import os
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from envpool.mujoco import mujoco_gym_envpool

import ppo_continuous_action_envpool_xla_jax_scan as ppo

TASKS = (
    "Ant HalfCheetah Hopper Humanoid HumanoidStandup InvertedDoublePendulum InvertedPendulum Pusher Reacher Swimmer Walker2d"
).split()
FREE_BODIES = "Ant Humanoid HumanoidStandup".split()  # whose root is a free joint
SAME_MUJOCO = ctypes.CDLL(mujoco_gym_envpool.__file__).mj_version() == mujoco.mj_version()


def make(env_id, num_envs, seed=1, **options):
    return ppo.make_pool(env_id, num_envs, ppo.environment_seeds(num_envs, seed, 0, 0), 1, **options)


def play(pool, num_steps, num_envs):
    """Random actions [T, N, A], and five columns [T + 1, N, ...] of EnvPool's answers, the first observations before them."""
    space, no = pool.action_space, np.zeros(num_envs, bool)
    actions = np.random.default_rng(0).uniform(space.low, space.high, (num_steps, num_envs, *space.shape))
    obs, info = pool.reset()
    rows = [(obs, np.zeros(num_envs), no, no, info["elapsed_step"])]
    for action in actions:
        *answer, info = pool.step(action)
        rows.append((*answer, info["elapsed_step"]))
    return actions, [np.array(column) for column in zip(*rows, strict=True)]


def recover_state(task, env, obs):
    """The positions and velocities that a first observation shows.

    It leaves out x, or x and y, of what walks and swims, and EnvPool tells them nowhere: 0, for only their differences count.
    """
    match task:
        case "Reacher":  # two cosines, two sines, the target, two velocities; the target rests
            return np.r_[np.arctan2(obs[2:4], obs[:2]), obs[4:6]], np.r_[obs[6:8], 0, 0]
        case "InvertedDoublePendulum":  # the cart, two sines, two cosines, velocities
            return np.r_[obs[0], np.arctan2(obs[1:3], obs[3:5])], obs[5:8]
        case "Pusher":  # the arm, its velocities, fingertip, object, goal; both rest, and slide along y before x
            slides = [obs[i : i + 2] - env.model.body(name).pos[:2] for i, name in ((17, "object"), (20, "goal"))]
            return np.r_[obs[:7], slides[0][::-1], slides[1][::-1]], np.r_[obs[7:14], np.zeros(4)]
    hidden = env.observation_structure.get("skipped_qpos", 0)
    state = np.r_[np.zeros(hidden), obs]
    return state[: env.model.nq], state[env.model.nq :][: env.model.nv]


def relative(a, b):
    return (abs(a - b) / np.maximum(1, abs(b))).max()


def compare(task, ours=None, theirs=None, num_steps=50, num_envs=8):
    """Play in EnvPool and replay in Gymnasium, each with its options: four columns, a row for each step and environment.

    They are the step's number in its episode, the relative differences of observation and reward, whether both flags agree.
    """
    pool, env = make(f"{task}-v5", num_envs, **(ours or {})), gymnasium.make(f"{task}-v5", **(theirs or {}))
    assert pool.config["max_episode_steps"] == env.spec.max_episode_steps
    np.testing.assert_array_equal(np.float32(pool.action_space.low), env.action_space.low)
    np.testing.assert_array_equal(np.float32(pool.action_space.high), env.action_space.high)
    actions, columns = play(pool, num_steps, num_envs)
    inner, rows = env.unwrapped, []
    for i in range(num_envs):
        for t, (obs, reward, *flags, age) in enumerate(zip(*(column[:, i] for column in columns), strict=True)):
            if age == 0:  # the first row, and those that only reset
                env.reset(seed=0)
                mujoco.mj_resetData(inner.model, inner.data)  # forgets the forces that warm-start the solver
                inner.set_state(*recover_state(task, inner, obs))
                its_obs, its_reward, *its_flags = inner._get_obs(), 0, False, False
            else:
                its_obs, its_reward, *its_flags, _ = env.step(actions[t - 1, i])
            rows.append((age, relative(obs, its_obs), relative(reward, its_reward), flags == its_flags))
    env.close()
    return np.array(rows).T


def agree(columns, num_steps=50, obs_tolerance=1e-6, reward_tolerance=1e-6):
    _, obs, reward, same_flags = columns[:, columns[0] <= num_steps]
    return bool(obs.max() < obs_tolerance and reward.max() < reward_tolerance and same_flags.all())


def model_files(task):
    """The files of EnvPool's and of Gymnasium's model."""
    config, env = make(f"{task}-v5", 1).config, gymnasium.make(f"{task}-v5").unwrapped
    return Path(config["base_path"], "mujoco/assets_gym", config["xml_file"].replace(".", "_envpool.")), Path(env.fullpath)


def plain_models(task, directory):
    """Options that give each side its own model, but for Euler steps and a solver that converges instead of RK4 and PGS."""
    options = []
    for name, file in zip(("ours", "theirs"), model_files(task), strict=True):
        text = file.read_text().replace('integrator="RK4"', 'integrator="Euler"').replace('solver="PGS"', 'solver="Newton"')
        assert text != file.read_text()
        path = directory.resolve() / f"{name}.xml"
        path.write_text(text)
        options.append({"xml_file": os.path.relpath(path, file.parent.resolve()) if name == "ours" else str(path)})
    return options  # EnvPool looks below its own folder only


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # MuJoCo leaves its warnings in MUJOCO_LOG.TXT


@pytest.mark.parametrize("task", TASKS)
def test_models_are_gymnasiums_to_the_last_byte(task):
    compiled = []
    for file in model_files(task):
        model = mujoco.MjModel.from_xml_path(str(file))
        compiled.append(np.zeros(mujoco.mj_sizeModel(model), np.uint8))
        mujoco.mj_saveModel(model, None, compiled[-1])
    np.testing.assert_array_equal(*compiled)


@pytest.mark.parametrize("task", TASKS)
def test_the_same_actions_do_in_envpool_what_they_do_in_gymnasium(task):
    columns = compare(task)
    if task == "HalfCheetah":
        assert agree(columns, 15)
    elif task in FREE_BODIES and not SAME_MUJOCO:  # contacts amplify; the next test goes on
        assert agree(columns, 2, 1e-1, 1e-3)
    else:
        assert agree(columns)


@pytest.mark.parametrize("task", FREE_BODIES)
def test_free_bodies_agree_for_50_steps_in_any_mujoco_without_rk4_and_pgs(task, tmp_path):
    assert agree(compare(task, *plain_models(task, tmp_path)))


@pytest.mark.parametrize(
    ("task", "option"),
    [
        ("Ant", {"ctrl_cost_weight": 0.501}),
        ("Ant", {"contact_cost_weight": 4.9e-4}),
        ("Ant", {"healthy_z_max": 0.9}),
        ("Humanoid", {"forward_reward_weight": 1.251}),
        ("Humanoid", {"contact_cost_weight": 5.1e-7}),
        ("HumanoidStandup", {"ctrl_cost_weight": 0.101}),
        ("HalfCheetah", {"forward_reward_weight": 1.001}),
        ("Hopper", {"frame_skip": 5}),
        ("Pusher", {"near_cost_weight": 0.501}),
        ("Walker2d", {"xml_file": "walker2d.xml"}),  # v4's, one of whose feet slips more
    ],
)
def test_another_coefficient_limit_frame_skip_or_model_is_noticed(task, option, tmp_path):
    ours, theirs = plain_models(task, tmp_path) if task in FREE_BODIES else ({}, {})
    assert not agree(compare(task, ours | option, theirs), 15)


@pytest.mark.parametrize("env_id", ["HalfCheetah-v4", "HalfCheetah-v5"])
def test_ten_episodes_of_half_cheetah_in_a_row_are_cut_off_at_1000_steps(env_id):
    env, handle = ppo.as_env(pool := make(env_id, 2))
    statistics, _ = ppo.VectorEnvRecordStatistics.create().reset(pool.reset()[0])

    def act(carry, key):
        handle, statistics = carry
        handle, step = env.recv(env.send(handle, jax.random.uniform(key, (2, 6), jnp.float32, -1, 1)))
        statistics, step = statistics.recv(step)
        return (handle, statistics), step._replace(obs=None)

    _, steps = jax.device_get(jax.lax.scan(act, (handle, statistics), jax.random.split(jax.random.PRNGKey(0), 10 * 1001)))
    t = np.repeat(np.arange(10 * 1001)[:, None] % 1001, 2, axis=1)
    np.testing.assert_array_equal(steps.truncated, t == 999)
    np.testing.assert_array_equal(steps.is_reset, t == 1000)
    np.testing.assert_array_equal(steps.reward == 0, t == 1000)
    np.testing.assert_array_equal(steps.info["elapsed_step"], (t + 1) % 1001)
    np.testing.assert_array_equal(steps.info["episode_length"], (t + 1) % 1001)
    assert not steps.terminated.any()
    assert steps.info["returned_episode_length"][steps.truncated].tolist() == [1000] * 20


@pytest.mark.parametrize("env_id", [*(f"{task}-v5" for task in TASKS), "Pendulum-v1", "FetchReach-v4"])
def test_first_observations_of_64_environments_and_two_seeds_all_differ(env_id):
    rows = set()
    for seed in (1, 2):
        _, obs = ppo.VectorEnvFlattenObs().reset(jax.tree.map(np.float32, make(env_id, 64, seed).reset()[0]))
        rows |= {row.tobytes() for row in np.asarray(obs)}
    assert len(rows) == 128
