"""Properties that hold for any input, searched by Hypothesis: estimation, statistics, wrappers and the command line.

Numbers are float64 where the functions follow their inputs' dtype, so that tolerances are those of rounding.
"""

import contextlib
import functools
import io
import itertools
import json
import pathlib
import tempfile
import types

import envpool
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import ppo_continuous_action_envpool_xla_jax_scan as ppo
from compiled import estimate_advantages
from fake import make_fake

# The same cases each time. To explain a failure takes minutes, and shrinking it says enough.
PHASES = [phase for phase in Phase if phase != Phase.explain]
SETTINGS = dict(deadline=None, derandomize=True, phases=PHASES, suppress_health_check=[HealthCheck.too_slow])
FLOATS = st.floats(-100, 100, allow_subnormal=False)
ANYTHING = FLOATS | st.sampled_from([np.nan, np.inf, -np.inf])
FRACTIONS = st.floats(0, 1, allow_subnormal=False)
T, N = 6, 3

# ---------------------------------------------------------------------------------------------------------------------
# Estimation


def arrays(dtype, shape, elements):
    return hnp.arrays(dtype, shape, elements=elements, fill=st.nothing())  # no two entries are one draw


@st.composite
def streams(draw, floats=FLOATS):
    """reward, value, terminated, truncated of T steps in N environments, as `compute_gae` takes them."""
    end = draw(arrays(np.int8, (T, N), st.sampled_from([0, 0, 0, 1, 2])))
    return draw(arrays(np.float64, (T, N), floats)), draw(arrays(np.float64, (T + 1, N), floats)), end == 1, end == 2


def permute(tree, order):
    return jax.tree.map(lambda x: x[:, order], tree)


gae_jit = jax.jit(ppo.compute_gae)


def gae(stream, gamma=0.9, gae_lambda=0.8):
    return np.asarray(gae_jit(*stream, gamma, gae_lambda))


def discounted_return(reward, value, terminated, truncated, gamma):
    """Of one environment, to its episode's end or the last row, and the value there."""
    total, weight = 0.0, 1.0
    for t in range(len(reward)):
        total, weight = total + weight * reward[t], weight * gamma
        if terminated[t]:
            return total
        if truncated[t]:
            break
    return total + weight * value[t + 1]


@settings(max_examples=100, **SETTINGS)
@given(streams(), FRACTIONS)
def test_lambda_one_gives_the_discounted_return_less_the_value_and_zero_the_one_step_error(stream, gamma):
    reward, value, terminated, _ = stream
    returns = [[discounted_return(*(x[t:, n] for x in stream), gamma) for n in range(N)] for t in range(T)]
    np.testing.assert_allclose(gae(stream, gamma, 1.0), np.array(returns) - value[:-1], rtol=0, atol=1e-11)
    error = reward + gamma * np.where(terminated, 0, value[1:]) - value[:-1]
    np.testing.assert_allclose(gae(stream, gamma, 0.0), error, rtol=0, atol=1e-12)


@settings(max_examples=100, **SETTINGS)
@given(streams(), streams(ANYTHING), st.integers(0, T - 1), st.integers(0, N - 1), st.booleans())
def test_nothing_feels_what_follows_its_episodes_end_not_even_whether_it_follows(stream, other, t, n, terminates):
    reward, value, terminated, truncated = stream
    terminated[t, n], truncated[t, n] = terminates, not terminates
    before = gae(stream)
    cut = gae([reward[: t + 1], value[: t + 2], terminated[: t + 1], truncated[: t + 1]])
    np.testing.assert_allclose(cut[:, n], before[: t + 1, n], rtol=0, atol=1e-12)
    for x, y, first in zip(stream, other, (t + 1, t + 1 if terminates else t + 2, t + 1, t + 1), strict=True):
        x[first:, n] = y[first:, n]
    after = gae(stream)
    np.testing.assert_array_equal(after[: t + 1, n], before[: t + 1, n])
    np.testing.assert_array_equal(np.delete(after, n, axis=1), np.delete(before, n, axis=1))


@settings(max_examples=100, **SETTINGS)
@given(streams(), st.floats(1e-6, 1e6) | st.floats(-1e6, -1e-6), FRACTIONS, FRACTIONS)
def test_rewards_and_values_in_other_units_give_advantages_in_those(stream, c, gamma, gae_lambda):
    reward, value, *ends = stream
    scaled = gae([c * reward, c * value, *ends], gamma, gae_lambda)
    np.testing.assert_allclose(scaled, c * gae(stream, gamma, gae_lambda), rtol=0, atol=1e-11 * abs(c))


ARGS = ppo.Args(num_envs=N, num_steps=T, num_minibatches=1, total_timesteps=N * T)


@functools.cache
def agent():
    """An agent in float64."""
    agent = jax.device_get(ppo.make_agent(ARGS, jax.random.PRNGKey(0), 4, 2))
    return agent.replace(params=jax.tree.map(np.float64, agent.params))


def estimate(agent, rollout, last_obs):
    """In NumPy, where indexing compiles nothing."""
    return jax.device_get(estimate_advantages(agent, rollout, last_obs, ARGS))


def flags(stream):
    """terminated, truncated, is_reset: of a stream as EnvPool would have it, which ends no episode that it just resets."""
    terminated, truncated, is_reset = *stream[2:], np.zeros((T, N), bool)
    for t in range(1, T):
        is_reset[t] = (terminated | truncated)[t - 1] & ~is_reset[t - 1]
    return terminated & ~is_reset, truncated & ~is_reset, is_reset


def make_rollout(stream, seed):
    """A rollout with the rewards and ends of a stream, and the observations that follow it."""
    rng = np.random.default_rng(seed)
    obs, action, log_prob = (rng.normal(size=shape) for shape in ((T + 1, N, 4), (T, N, 2), (T, N)))
    return ppo.Rollout(obs[:-1], action, log_prob, stream[0], *flags(stream), {}), obs[-1]


def assert_close(ours, theirs, tolerance):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), ours, theirs)


@settings(max_examples=100, **SETTINGS)
@given(streams(), st.integers(0, 2**31), st.permutations(range(N)))
def test_environments_in_another_order_get_the_same_advantages_in_that_order(stream, seed, order):
    np.testing.assert_array_equal(gae(permute(stream, order)), gae(stream)[:, order])
    rollout, last_obs = make_rollout(stream, seed)
    (after, batch), (permuted_after, permuted) = (
        estimate(agent(), permute(rollout, o), last_obs[o]) for o in (list(range(N)), order)
    )
    batch, permuted = (jax.tree.map(lambda x: x.reshape(T, N, *x.shape[1:]), b) for b in (batch, permuted))
    assert_close(permuted, permute(batch, order), 1e-11)
    assert_close(permuted_after.return_rms, after.return_rms, 1e-11)


@settings(max_examples=100, **SETTINGS)
@given(streams(), st.integers(0, 2**31), st.floats(1e-3, 1e3))
def test_a_reward_in_other_units_moves_advantages_by_them_and_the_critics_targets_not_at_all(stream, seed, c):
    rollout, last_obs = make_rollout(stream, seed)
    rms = agent().return_rms.replace(var=np.float64(c**2 * (1 + 1e-8) - 1e-8))  # c times the deviation, epsilon included
    after, batch = estimate(agent(), rollout, last_obs)
    other_after, other = estimate(agent().replace(return_rms=rms), rollout._replace(reward=c * rollout.reward), last_obs)
    assert_close(other._replace(advantage=other.advantage / c), batch, 1e-9)
    assert_close(other_after.return_rms.mean / c, after.return_rms.mean, 1e-9)
    np.testing.assert_allclose(other_after.return_rms.var, c**2 * after.return_rms.var, rtol=1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# Statistics and wrappers

update = jax.jit(ppo.RunningMeanStd.update)


@settings(max_examples=100, **SETTINGS)
@given(
    arrays(np.float64, (12, 2), FLOATS),
    arrays(bool, 12, st.booleans()),
    st.sets(st.integers(1, 11)),
    st.sampled_from([0, 1e4, -1e8]),
    st.sampled_from([1, 1e-3]),
)
def test_running_statistics_are_numpys_of_the_kept_rows_however_the_stream_is_cut(x, mask, cuts, offset, scale):
    x = offset + scale * x
    fed = np.where(mask[:, None], x, np.nan)  # what is not kept may be anything
    rms = ppo.RunningMeanStd.create((2,))
    for begin, end in itertools.pairwise([0, *sorted(cuts), 12]):
        rms = update(rms, fed[begin:end], mask[begin:end])
    kept = x[mask].astype(np.longdouble)
    assert rms.count == len(kept)
    if len(kept):
        rounding = 4e-15 * np.abs(kept).max(0)
        np.testing.assert_array_less(np.abs(np.asarray(rms.mean) - kept.mean(0)), rounding + 1e-300)
        # The variance starts as 1, and keeps that number's rounding.
        np.testing.assert_array_less(np.abs(np.asarray(rms.var) - kept.var(0)), rounding * (kept.std(0) + rounding) + 1e-15)
    else:
        assert (rms.mean == 0).all() and (rms.var == 1).all()


@jax.jit
def receive(stream_of_steps):
    """A stream of steps through the two wrappers that keep something of each environment."""
    wrappers = ppo.VectorEnvRecordStatistics.create(), ppo.VectorEnvNormReward.create(0.9)
    wrappers, _ = ppo.fold(wrappers, "reset", stream_of_steps.obs[0])
    return jax.lax.scan(lambda wrappers, step: ppo.fold(wrappers, "recv", step), wrappers, stream_of_steps)


@settings(max_examples=100, **SETTINGS)
@given(streams(), st.permutations(range(N)))
def test_environments_in_another_order_are_recorded_and_normalized_alike(stream, order):
    steps = ppo.Step(np.zeros((T, N, 1), np.float32), stream[0].astype(np.float32), *flags(stream), {})
    ((_, norm), seen), ((_, permuted_norm), permuted) = jax.device_get((receive(steps), receive(permute(steps, order))))
    for name, values in seen.info.items():
        np.testing.assert_array_equal(permuted.info[name], values[:, order], err_msg=name)
    np.testing.assert_allclose(permuted.reward, seen.reward[:, order], rtol=1e-6)
    np.testing.assert_array_equal(permuted_norm.discounted_return, norm.discounted_return[order])
    assert_close(permuted_norm.rms, norm.rms, 1e-11)


WRAPPERS = {
    "statistics": ppo.VectorEnvRecordStatistics.create(),
    "flatten": ppo.VectorEnvFlattenObs(),
    "clip": ppo.VectorEnvClipAct(np.float32([-1, 0]), np.float32([1, 3])),
    "norm_obs": ppo.VectorEnvNormObs(ppo.RunningMeanStd.create((6,))),
    "norm_reward": ppo.VectorEnvNormReward.create(0.9),
}
ORDERS = [order for size in range(6) for order in itertools.permutations(WRAPPERS, size)]
OBSERVATIONS = {
    "vector": jnp.zeros((N, 6), jnp.float32),
    "matrix": jnp.zeros((N, 2, 3), jnp.float32),
    "dict": {"b": jnp.zeros((N, 3), jnp.float32), "a": jnp.zeros(N, jnp.float32), "c": jnp.zeros((N, 1, 2), jnp.float32)},
}


def is_vector_where_it_is_normalized(order, kind):
    return kind == "vector" or "norm_obs" not in order or "flatten" in order[: order.index("norm_obs")]


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)


@settings(max_examples=200, **SETTINGS)
@given(
    st.tuples(st.sampled_from(ORDERS), st.sampled_from(list(OBSERVATIONS))).filter(
        lambda case: is_vector_where_it_is_normalized(*case)
    ),
    st.booleans(),
)
def test_wrappers_in_any_order_keep_their_shapes_so_that_a_scan_can_carry_them(case, frozen):
    order, kind = case
    wrappers = tuple(WRAPPERS[name] for name in order)
    wrappers = ppo.freeze(wrappers) if frozen else wrappers

    def follow():
        def act(carry, _):
            wrappers, sent = ppo.fold(carry[0], "send", jnp.zeros((N, 2), jnp.float32))
            none = jnp.zeros(N, bool)
            step = ppo.Step(
                OBSERVATIONS[kind], jnp.zeros(N, jnp.float32), none, none, none, {"elapsed_step": jnp.zeros(N, jnp.int32)}
            )
            wrappers, step = ppo.fold(wrappers, "recv", step)
            return (wrappers, step.obs), (sent, step)

        first = ppo.fold(wrappers, "reset", OBSERVATIONS[kind])
        return first, *jax.lax.scan(act, first, length=2)

    first, last, (sent, steps) = shapes(jax.eval_shape(follow))
    assert first == last and [type(wrapper) for wrapper in first[0]] == [type(wrapper) for wrapper in wrappers]
    assert first[1] == (((N, 6), "float32") if "flatten" in order else shapes(OBSERVATIONS[kind]))
    assert sent == ((2, N, 2), "float32") and steps.reward == ((2, N), "float32")
    recorded = {"episode_return", "episode_length", "returned_episode_return", "returned_episode_length"}
    assert steps.info.keys() == {"elapsed_step"} | (recorded if "statistics" in order else set())
    assert set(steps[2:5]) == {((2, N), "bool")} and set(steps.info.values()) <= {
        ((2, N), dtype) for dtype in ("int32", "float32")
    }


# ---------------------------------------------------------------------------------------------------------------------
# Command line


class Builds(Exception):
    """The arguments have passed all that `main` does before an iteration runs, and the iteration has been traced."""


def make_without_simulators(env_id, env_type, num_envs, num_threads, env_seed, **options):
    """What `envpool.make` would return, as far as training needs it before it compiles."""
    spec = envpool.make_spec(env_id, **options)
    spaces = ppo.obs_spaces(spec.observation_space)
    obs = {key: np.zeros((num_envs, *space.shape), space.dtype) for key, space in spaces.items()}
    assert env_type == "gymnasium" and len(env_seed) == num_envs and 0 <= num_threads <= num_envs
    pool = types.SimpleNamespace(reset=lambda: (obs.get("", obs), {}), config=spec.config._asdict())
    pool.observation_space, pool.action_space = spec.observation_space, spec.action_space
    return pool


make_state, train_iteration = ppo.make_state, ppo.train_iteration


def trace_state(args, task, handle=None, obs=None):
    return jax.eval_shape(lambda: make_state(args, task, None, obs))


def trace_iteration(state, pool, args):
    """Trace an iteration among fake environments of the pool's sizes. What it returns must fit the next one."""
    obs, action_size = jax.tree.map(ppo.to_float32, pool.reset()[0]), len(pool.action_space.low)

    def iterate():
        env, handle, _ = make_fake(args.num_envs, lambda t, c: obs, lambda t, c, action: action[:, 0], 5, True)
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state.replace(handle=None))
        handle |= {"action": jnp.zeros((args.num_envs, action_size), jnp.float32)}
        return blank, *train_iteration(blank.replace(handle=handle), env, args)

    before, after, report = jax.eval_shape(iterate)
    assert shapes(after.replace(handle=None)) == shapes(before)
    assert {metric.shape for metric in report.metrics.values()} == {()}
    assert report.ended.shape == (args.num_steps, args.num_envs)
    raise Builds


def start_wandb(args, run_name):
    """W&B's own check of names, without its server."""
    import wandb

    wandb.Settings(project=args.wandb_project_name, entity=args.wandb_entity, run_id=run_name, run_name=run_name)


def choose_actions(state, deterministic):
    raise Builds


STUBS = dict(as_env=lambda pool: (pool, None), make_state=trace_state, train_iteration=trace_iteration)
STUBS |= dict(start_wandb=start_wandb, choose_actions=choose_actions, return_free_memory=lambda: None)
MODEL, TEXT = "saved/agent.cleanrl_model", "text.cleanrl_model"
SAVED = dict(num_envs=8, num_steps=8, num_minibatches=4, total_timesteps=64 * 20, env_id="Hopper-v4")


@functools.cache
def saved_model():
    """The bytes of a model file, after one iteration of twenty."""
    args, bounds = ppo.Args(**SAVED), np.ones(3, np.float32)
    task = ppo.Task({"": (11,)}, -bounds, bounds)
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), trace_state(args, task))
    with tempfile.TemporaryDirectory() as folder:
        ppo.save_model(f"{folder}/model", ppo.Model(args, task, state.replace(iteration=np.ones((), np.int32))))
        return pathlib.Path(folder, "model").read_bytes()


def files():
    return {str(path): path.is_file() and path.read_bytes() for path in pathlib.Path().rglob("*")}


def read(stream):
    stream.flush()
    return stream.buffer.getvalue().decode()


def outcome(argv):
    """Whether the command line "builds" what it is asked for, or "refuses" it in one message and leaves no file."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(stack.enter_context(tempfile.TemporaryDirectory())))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, stub in STUBS.items():
            patch.setattr(ppo, name, stub)
        patch.setattr(envpool, "make", make_without_simulators)
        patch.setattr(jax, "clear_caches", lambda: None)  # or each case would trace all of JAX's own functions anew
        patch.setenv("WANDB_MODE", "offline")
        pathlib.Path("saved").mkdir()
        pathlib.Path(MODEL).write_bytes(saved_model())
        pathlib.Path(TEXT).write_text("no model")
        before = files()
        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            status, framed = ppo.main(argv), False
        except Builds:
            for path in pathlib.Path().glob("runs/*/summary.json"):
                json.loads(path.read_text())
            assert read(err) == ""
            return "builds"
        except SystemExit as end:  # tyro's way, its message in a frame
            status, framed = end.code, True
        assert files() == before
        message = read(err)
        if status == 0 and framed:
            return "helps"
        assert status == 2
        if framed:
            assert message.startswith("╭") and message.count("╭") == 1, message
        else:
            assert message.startswith("error: ") and message.endswith("\n") and len(message.splitlines()) == 1, message
        return "refuses"


def flag(names, values):
    """One of the flags that are named, and a value."""
    return st.builds(lambda name, value: [f"--{name}={value}"], st.sampled_from(names.split()), values)


def pair(keys, values):
    return flag("env-kwargs", st.builds("{}={}".format, st.sampled_from(keys.split()), values))


def words(flags, number):
    """The words of at most so many flags."""
    return st.lists(flags, max_size=number).map(lambda drawn: list(itertools.chain(*drawn)))


def switch(names):
    return st.sampled_from([[f"--{no}{name}"] for name in names.split() for no in ("", "no-")])


def without(*characters):
    return st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters="".join(characters)), max_size=20)


WHOLE, COUNT = st.integers(0, 10**30), st.integers(1, 10**30)
COEFFICIENTS = "learning-rate clip-coef ent-coef vf-coef max-grad-norm target-kl"
TASKS = """
    Ant-v3 ManipulatorBringBall-v1 FetchReach-v4 MetaWorld/Assembly-v3 myoArmReachFixed-v0 MuJoCoPlayground/SpotGetup-v1
    BipedalWalker-v3 MountainCarContinuous-v0 Parking-v0 CheetahRun-v1 HalfCheetah-v4 Pendulum-v1
""".split()
SWITCHES = "norm-obs norm-reward anneal-lr norm-adv clip-vloss norm-return recompute-advantage".split()
FREE = st.one_of(  # what a resumed run or an evaluation may change too
    switch("save-model eval-deterministic track capture-video"),
    flag("checkpoint-frequency eval-frequency", WHOLE),
    flag("eval-episodes", COUNT),
    flag("wandb-entity wandb-project-name", without("/\\#?%:")),
)
FIXED = st.one_of(
    flag(COEFFICIENTS, st.floats(0, 1e38, exclude_min=True)),
    flag("gamma gae-lambda", st.floats(0, 1)),
    flag("target-kl wandb-entity", st.none()),
    flag("update-epochs", st.integers(1, 10**6)),
    flag("seed", st.integers(0, 2**31 - 1)),
    flag("exp-name", without("#?:;,")),
    flag("env-id", st.sampled_from(TASKS)),
    flag("env-kwargs", st.integers(1, 2**31 - 1).map("max_episode_steps={}".format)),
)


@st.composite
def new_runs(draw):
    """Arguments of a new run that all can be."""
    envs, steps = draw(st.sampled_from([1, 2, 3, 8, 64, 500])), draw(st.sampled_from([1, 2, 5, 32, 100]))
    batch = envs * steps
    minibatches = draw(st.sampled_from([m for m in range(1, batch + 1) if batch % m == 0]))
    threads, total = draw(st.integers(0, envs)), draw(st.integers(batch, batch * 2**31 - 1))
    sizes = f"--num-envs {envs} --num-steps {steps} --num-minibatches {minibatches} --num-threads {threads}".split()
    switches = draw(st.tuples(*(switch(name) for name in SWITCHES)))
    return [*draw(words(FREE | FIXED, 8)), *itertools.chain(*switches), *sizes, f"--total-timesteps={total}"]


RESUMED = st.builds(
    lambda total, free: ["--resume", MODEL, f"--total-timesteps={total}", *free], st.integers(128, 2**37 - 1), words(FREE, 4)
)
EVALUATED = words(FREE, 4).map(lambda free: ["--evaluate", MODEL, *free])
IDS = envpool.list_all_envs()
NO_NUMBER = st.sampled_from(["", " ", "nan", "inf", "-inf", "1e400", "-1e400", "-1e-300", "-1", "x", "0x10", "1,5", "--"])
ODD = """
    - -- = -h -1 0 None True nan 1e400 9_9 a/b .. a=b=c [red] [/red] %s {} ( [ \\ \0 \x1b[31m \u0663 \u2028 \udcff \u00e9
""".strip().split(" ")
WORDS = st.sampled_from([*ODD, "", " ", "\n", "a\nb=1", "9" * 5000, "(" * 500]) | st.text(max_size=8) | st.integers().map(str)
NAMES = " ".join(ppo.Args.__dataclass_fields__).replace("_", "-")
ILLEGAL = st.one_of(
    flag("num-envs num-steps num-minibatches update-epochs eval-episodes", st.integers(max_value=0) | NO_NUMBER),
    flag("checkpoint-frequency eval-frequency num-threads seed total-timesteps", st.integers(max_value=-1) | NO_NUMBER),
    flag("num-threads num-minibatches seed", st.integers(2**31)),
    flag("num-minibatches", st.sampled_from([7, 14, 35])),  # divides no product of the sizes above
    flag("total-timesteps", st.integers(50_000 * 2**31)),
    flag(COEFFICIENTS, st.floats(max_value=0, exclude_max=True) | NO_NUMBER),
    flag("gamma gae-lambda", st.floats(1, exclude_min=True) | NO_NUMBER),
    flag("update-epochs", st.integers(2**31)),
    st.just([f"--{name}={2**16}" for name in ("num-envs", "num-steps", "num-minibatches")] + [f"--total-timesteps={2**32}"]),
    flag("max-grad-norm", st.just(0)),
    flag("norm-obs track no-such-flag", WORDS),
    st.sampled_from("seed env-id gamma wandb-entity exp-name resume evaluate".split()).map(lambda name: [f"--{name}"]),
    flag("exp-name", st.sampled_from(["a\nb", "\udcff", "\x1b", "\u2028", "x" * 250, "\U0001f916" * 60])),
    flag("env-id", (WORDS | st.builds("{}{}".format, st.sampled_from(IDS), WORDS)).filter(lambda name: name not in IDS)),
    st.just(["--env-id", "two\nlines"]),
    flag("env-id", st.sampled_from(["CartPole-v1", "RubiksCube-v0", "CarRacing-v3", "FrankaKitchen-v1", "Pong-v5"])),
    flag("env-kwargs", WORDS.filter(lambda word: not word.partition("=")[0].isidentifier())),
    pair("env_id num_envs num_threads env_seed seed colour a-b", WORDS),
    pair("max_episode_steps frame_skip", st.integers(max_value=0) | st.sampled_from(["many", "", "None", "[1]", "{}", "1.5"])),
    st.just(["--env-kwargs", "max_episode_steps=9", "max_episode_steps=9"]),
    flag("resume evaluate", st.sampled_from([TEXT, "saved", ".", "/dev/null", "no/such", MODEL + "/"]) | WORDS),
    st.just(["--resume", MODEL, "--evaluate", MODEL]),
    flag("wandb-project-name wandb-entity", st.sampled_from(["a\nb", "\udcff"])),
    flag("wandb-project-name", st.sampled_from([f"a{c}b" for c in "/\\#?%:"])).map(lambda argv: ["--track", *argv]),
    flag("exp-name", st.sampled_from([f"a{c}b" for c in "#?:;,"])).map(lambda argv: ["--track", *argv]),
)
ANY = st.one_of(
    flag(NAMES, WORDS),
    flag("env-id", st.sampled_from(IDS)),
    pair("max_episode_steps frame_skip reward_threshold xml_file", WORDS),
    st.sampled_from(NAMES.split()).map(lambda name: [f"--{name}"]),
    WORDS.map(lambda word: [word]),
)


@settings(max_examples=30, **SETTINGS)
@given(st.one_of(new_runs(), new_runs(), new_runs(), RESUMED, EVALUATED))
def test_legal_arguments_build(argv):
    assert outcome(argv) == "builds"


@settings(max_examples=300, **SETTINGS)
@given(new_runs(), ILLEGAL)
def test_one_illegal_argument_is_refused_in_one_message_and_leaves_no_file(argv, illegal):
    assert outcome(argv + illegal) == "refuses"


@settings(max_examples=200, **SETTINGS)
@given(words(ANY, 3))
def test_any_words_whatever_build_or_are_refused(argv):
    outcome(argv)
