"""The mathematics against that of Stable-Baselines3, tianshou, rlax, PyTorch and Gymnasium, run on the same arrays.

`pip install -r tests/requirements-peers.txt && pytest -m peers -n 0 -s tests/test_peers.py` prints each largest difference,
relative to the largest magnitude of the array. Each test imports its peers itself, for other runs do without them.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import ppo_continuous_action_envpool_xla_jax_scan as ppo
from compiled import improve

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("optimized")]
GAMMA, LAMBDA = 0.99, 0.95


def agree(what, ours, theirs, bound):
    """Assert that two pytrees of arrays differ by less than `bound`, relative to the largest magnitude of each array."""
    ours, theirs = (jax.tree.map(np.asarray, tree) for tree in (ours, theirs))
    assert all(x.shape == y.shape for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)), what
    difference = max(jax.tree.leaves(jax.tree.map(lambda x, y: np.abs(x - y).max() / np.abs(y).max(), ours, theirs)))
    print(f"\n{what}: {difference:.1e}", end="")
    assert difference < bound, what


class Recording(NamedTuple):
    """What EnvPool answered to random actions, in float64; rewards as the script sees them, rounded to float32."""

    obs: np.ndarray  # [T + 1, N, O] the first ones, then the answers
    reward: np.ndarray  # [T, N]
    terminated: np.ndarray  # [T, N] bool
    truncated: np.ndarray  # [T, N] bool
    is_reset: np.ndarray  # [T, N] bool

    @property
    def steps(self):
        """The answers, as the script's wrappers take them."""
        return ppo.Step(*map(jnp.asarray, (self.obs[1:], *self[1:])), info={})

    def vector_env(self):
        """The same answers from Gymnasium's own vector environment: it too resets one step late ("next-step autoreset")."""
        return gym.vector.SyncVectorEnv([lambda n=n: Replay(self, n) for n in range(self.reward.shape[1])])


@functools.cache
def record(env_id, num_envs, num_steps, max_episode_steps):
    pool = ppo.make_pool(env_id, num_envs, ppo.environment_seeds(num_envs, 1, 0, 0), max_episode_steps=max_episode_steps)
    rng, first_obs, rows = np.random.default_rng(0), pool.reset()[0], []
    for _ in range(num_steps):
        obs, reward, *flags, info = pool.step(rng.uniform(-1, 1, (num_envs, *pool.action_space.shape)))
        rows.append((obs, np.float64(np.float32(reward)), *flags, info["elapsed_step"] == 0))
    obs, *rest = map(np.stack, zip(*rows, strict=True))
    return Recording(np.concatenate([first_obs[None], obs]), *rest)


def hopper(num_envs=6):
    """Terminations and truncations, about as many."""
    recording = record("Hopper-v4", num_envs, 256, 22)
    assert min(recording.terminated.sum(), recording.truncated.sum()) >= 3
    return recording


class Replay(gym.Env):
    """One environment of a recording. What a recording's reset step brought, `reset` brings."""

    def __init__(self, recording, n):
        self.recording, self.n, self.t = recording, n, -1
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, recording.obs.shape[2:], np.float64)
        self.action_space = gym.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        assert self.t < 0 or self.recording.is_reset[self.t, self.n]
        self.t += 1
        return self.recording.obs[self.t, self.n], {}

    def step(self, action):
        answer = [x[self.t, self.n] for x in self.recording[1:]]
        self.t += 1
        assert not answer.pop()
        return self.recording.obs[self.t, self.n], *answer, {}


# Generalized advantage estimation


def random_stream():
    """reward [T, N], value [T + 1, N] and the flags terminated, truncated and is_reset [T, N]; both ends, at the edges too."""
    rng, (t, n) = np.random.default_rng(0), (64, 7)
    ended, is_reset = np.zeros((2, t, n), bool)
    for row in range(t):
        is_reset[row] = ended[row - 1] if row else False
        ended[row] = (rng.random(n) < 0.15) & ~is_reset[row]
    ended[-1, :2], is_reset[-1, :2] = True, False
    ended[-2, :2] = False
    terminated = ended & (rng.random((t, n)) < 0.5)
    terminated[-1, :2] = True, False
    return rng.normal(size=(t, n)), rng.normal(size=(t + 1, n)) * 3, terminated, ended & ~terminated, is_reset


def recorded_stream():
    recording = hopper()
    agent = ppo.make_agent(ppo.Args(), jax.random.PRNGKey(0), recording.obs.shape[-1], 1)
    value = agent.network.apply(agent.params, jnp.float32(recording.obs), method="value")
    return recording.reward, np.float64(value), *recording[2:]


def kept_rows(n, reward, value, terminated, truncated, is_reset):
    """Environment n without its reset rows: reward, value, the value of the true successor, terminated, truncated [K]."""
    keep = ~is_reset[:, n]
    return [x[:, n][keep] for x in (reward, value[:-1], value[1:], terminated, truncated)]


def stable_baselines3_gae(*stream):
    """Knows one kind of end and never bootstraps there: the value after a truncation is added to the reward, as its
    `collect_rollouts` does. Resets within the step that ends an episode: rows of our reset steps are dropped."""
    import torch
    from stable_baselines3.common.buffers import RolloutBuffer

    advantages = []
    for n in range(stream[0].shape[1]):
        reward, value, next_value, terminated, truncated = kept_rows(n, *stream)
        box, ended = gym.spaces.Box(-1, 1, (1,)), terminated | truncated
        buffer = RolloutBuffer(len(reward), box, box, "cpu", LAMBDA, GAMMA)
        buffer.rewards = (reward + GAMMA * np.where(truncated, next_value, 0))[:, None]
        buffer.values, buffer.advantages = value[:, None], np.zeros((len(reward), 1))  # in float64, other than its own
        buffer.episode_starts = np.concatenate([[1.0], ended[:-1]])[:, None]
        buffer.compute_returns_and_advantage(torch.tensor(next_value[-1:]), ended[-1:])
        advantages.append(buffer.advantages[:, 0])
    return np.concatenate(advantages)


def tianshou_gae(*stream):
    """Has both flags and a successor of its own in each row: its observations are our values here. Reset rows are dropped."""
    from tianshou.algorithm.algorithm_base import Algorithm
    from tianshou.data import Batch, VectorReplayBuffer

    num_steps, num_envs = stream[0].shape
    buffer = VectorReplayBuffer(num_steps * num_envs, num_envs)
    for n in range(num_envs):
        for rew, v, v_next, terminated, truncated in zip(*kept_rows(n, *stream), strict=True):
            row = dict(obs=v, act=0, rew=rew, terminated=terminated, truncated=truncated, obs_next=v_next, info={})
            buffer.add(Batch({key: np.asarray(x)[None] if key != "info" else x for key, x in row.items()}), buffer_ids=[n])
    indices = buffer.sample_indices(0)  # all, in order
    batch = buffer[indices]
    values = dict(v_s_=batch.obs_next, v_s=batch.obs)
    return Algorithm.compute_episodic_return(batch, buffer, indices, **values, gamma=GAMMA, gae_lambda=LAMBDA)[1]


def rlax_gae(reward, value, terminated, truncated, is_reset):
    """Discount and lambda of each step: a termination makes the one zero, either end the other. Takes reset rows as we do."""
    import rlax

    discount, trace = GAMMA * (1.0 - terminated), LAMBDA * (1.0 - (terminated | truncated))
    gae = jax.vmap(rlax.truncated_generalized_advantage_estimation, in_axes=1, out_axes=1)
    advantage = np.asarray(gae(*map(jnp.asarray, (reward, discount, trace, value))))
    return advantage.T[~is_reset.T]


@pytest.mark.parametrize("stream", [random_stream, recorded_stream])
@pytest.mark.parametrize("peer", [stable_baselines3_gae, tianshou_gae, rlax_gae])
def test_gae_equals_that_of(peer, stream):
    reward, value, terminated, truncated, is_reset = stream()
    for flag in (terminated, truncated, is_reset):
        assert flag.any()
    ours = ppo.compute_gae(*map(jnp.asarray, (reward, value, terminated, truncated)), GAMMA, LAMBDA)
    theirs = peer(reward, value, terminated, truncated, is_reset)
    agree(f"{peer.__name__}, {stream.__name__}", np.asarray(ours).T[~is_reset.T], theirs, 1e-12)


# Densities


def torch_gaussian(mean, log_std):
    import torch

    mean, log_std = (torch.tensor(np.asarray(x)) for x in (mean, log_std))
    return torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1)


@pytest.mark.parametrize("scale", [1, 1e4])
def test_log_prob_and_entropy_equal_those_of_torch_and_distrax(scale):
    import distrax
    import torch

    rng = np.random.default_rng(0)
    mean, log_std, action = rng.normal(size=(3, 500, 6))
    log_std, action = jnp.asarray(log_std * 2), jnp.asarray(mean + scale * action)
    theirs = torch_gaussian(mean, log_std)
    agree(
        f"torch log_prob, {scale}",
        ppo.gaussian_log_prob(action, mean, log_std),
        theirs.log_prob(torch.tensor(np.asarray(action))),
        1e-12,
    )
    agree("torch entropy", ppo.gaussian_entropy(log_std), theirs.entropy(), 1e-12)
    theirs = distrax.MultivariateNormalDiag(jnp.asarray(mean), jnp.exp(log_std))
    agree(f"distrax log_prob, {scale}", ppo.gaussian_log_prob(action, mean, log_std), theirs.log_prob(action), 1e-12)
    agree("distrax entropy", ppo.gaussian_entropy(log_std), theirs.entropy(), 1e-12)


def test_approx_kl_estimates_the_exact_kl_from_the_old_policy_to_the_new():
    """Within five standard errors over 333,000 actions, some 1.5 %, which KL(new, old) misses by far. A third is masked."""
    import torch

    network, samples, key = ppo.Network(3), 500_000, jax.random.PRNGKey(0)
    old = network.init(key, jnp.zeros((1, 4)))
    new = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(key, x.shape), old)
    new["params"]["actor"]["log_std"] -= 0.15
    obs = jnp.tile(jax.random.normal(key, (8, 4)), (samples // 8, 1))
    mean, log_std = network.apply(old, obs[:8], method="policy")
    mean, log_std = (jnp.tile(x, (samples // 8, 1)) for x in (mean, log_std))
    action = mean + jnp.exp(log_std) * jax.random.normal(jax.random.PRNGKey(1), mean.shape)
    log_prob = ppo.gaussian_log_prob(action, mean, log_std)
    mask = jnp.arange(samples) % 3 > 0
    rows = ppo.Batch(obs, jnp.where(mask[:, None], action, 99), log_prob, *jnp.zeros((3, samples)), mask)
    approx_kl = ppo.ppo_loss(new, network, rows, ppo.Args())[1]["losses/approx_kl"]

    before, after = (torch_gaussian(*network.apply(params, obs[:8], method="policy")) for params in (old, new))
    exact, reverse = (float(torch.distributions.kl_divergence(*pair).mean()) for pair in ((before, after), (after, before)))
    new_mean, new_log_std = (jnp.tile(x, (samples // 8, 1)) for x in network.apply(new, obs[:8], method="policy"))
    log_ratio = np.asarray(ppo.gaussian_log_prob(action, new_mean, new_log_std) - log_prob)[mask]
    error = np.std(np.expm1(log_ratio) - log_ratio) / math.sqrt(mask.sum()) / exact
    agree(f"approx_kl ({exact:.4f}, reversed {reverse:.4f}, standard error {error:.1e})", approx_kl, exact, 5 * error)
    assert 5 * error < 0.02 < 0.1 < abs(reverse / exact - 1)


# Adam


@pytest.mark.parametrize(("exactly", "bound"), [(False, 1e-6), (True, 1e-12)], ids=["as-it-is", "compensated"])
def test_fifty_clipped_adam_steps_equal_those_of_torch(exactly, bound, monkeypatch):
    """PyTorch clips to max_norm / (norm + 1e-6): shorter by up to 2e-6 of a gradient's length than ours, for norms above 0.5.
    Compensated, its max_norm is a little larger, so that the scale is 0.5 / norm as ours."""
    import torch

    rng, args, shapes = np.random.default_rng(0), ppo.Args(), {"a": (5, 4), "b": (4,), "c": (4, 2)}
    params = {
        name: jnp.zeros(shape, jnp.float64) for name, shape in shapes.items()
    }  # near 1, rounding would hide the last digits of a step
    theirs = {name: torch.nn.Parameter(torch.tensor(np.asarray(x))) for name, x in params.items()}
    adam = torch.optim.Adam(theirs.values(), eps=1e-5)
    opt_state = ppo.make_optimizer(args).init(ravel_pytree(params)[0])
    agent = ppo.AgentState(None, params, opt_state, ppo.RunningMeanStd.create())
    # A loss whose gradient is the "minibatch", for `improve` to descend.
    monkeypatch.setattr(
        ppo, "ppo_loss", lambda params, network, grads, args: (ravel_pytree(params)[0] @ ravel_pytree(grads)[0], {})
    )
    norms = []
    for step in range(50):
        rate = ppo.learning_rate(ppo.Args(total_timesteps=2048 * 60), step)
        grads = {name: rng.normal(size=shape) * 10 ** rng.uniform(-3, 0) for name, shape in shapes.items()}
        agent, metrics = improve(agent, jax.tree.map(jnp.asarray, grads), rate, args)
        for name, parameter in theirs.items():
            parameter.grad = torch.tensor(grads[name])
        norms.append(float(metrics["losses/grad_norm"]))
        limit = 0.5 * (1 + 1e-6 / norms[-1]) if exactly and norms[-1] > 0.5 else 0.5
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), limit)
        assert norms[-1] == pytest.approx(float(norm), rel=1e-12)
        adam.param_groups[0]["lr"] = float(rate)
        adam.step()
    assert 10 < (np.array(norms) > 0.5).sum() < 40
    name = f"Adam, {'compensated' if exactly else 'as it is'}, {sum(np.array(norms) > 0.5)} of 50 clipped"
    agree(name, agent.params, {name: x.detach().numpy() for name, x in theirs.items()}, bound)


# Wrappers


def through(wrapper, recording):
    """The wrapper, its first observations and all it answers, in float64."""
    wrapper, first_obs = wrapper.reset(jnp.asarray(recording.obs[0]))
    if hasattr(wrapper, "discounted_return"):
        wrapper = wrapper.replace(discounted_return=wrapper.discounted_return.astype(jnp.float64))
    wrapper, steps = jax.lax.scan(lambda wrapper, step: wrapper.recv(step), wrapper, recording.steps)
    return wrapper, first_obs, steps


def test_norm_obs_equals_gymnasiums_normalize_observation():
    """Gymnasium starts from a count of 1e-4, set to our 0 here, answers in float32 and does not clip. Its statistics too
    see the first observation that a reset step brings. One observation is made a hundredfold, to be clipped."""
    recording = hopper()
    factor = np.ones((257, 6, 1))
    factor[200, 0] = 100
    recording = recording._replace(obs=recording.obs * factor)
    env = gym.wrappers.vector.NormalizeObservation(recording.vector_env())
    env.obs_rms.count = 0
    theirs = [env.reset()[0]] + [env.step(env.action_space.sample())[0] for _ in recording.reward]
    wrapper, first_obs, steps = through(ppo.VectorEnvNormObs(ppo.RunningMeanStd.create((11,))), recording)
    ours = np.concatenate([first_obs[None], steps.obs])
    assert (np.abs(theirs) > 10).any()
    agree("NormalizeObservation, observations", ours, np.clip(theirs, -10, 10), 1e-7)
    statistics = [wrapper.rms.mean, wrapper.rms.var, wrapper.rms.count], [env.obs_rms.mean, env.obs_rms.var, env.obs_rms.count]
    agree("NormalizeObservation, statistics", *map(list, statistics), 1e-10)


@pytest.mark.parametrize(
    "recording",
    [functools.partial(hopper, 1), functools.partial(record, "HalfCheetah-v4", 4, 60, 7)],
    ids=["hopper", "cheetah"],
)
def test_norm_reward_equals_stable_baselines3s_vec_normalize(recording):
    """It resets within the step that ends an episode, so that environments get out of step with ours unless they end
    together, as one alone and HalfCheetah's do. It starts from a count of 1e-4, set to our 0 here."""
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    recording = recording()
    env = VecNormalize(
        DummyVecEnv([lambda n=n: Replay(recording, n) for n in range(recording.reward.shape[1])]), norm_obs=False, gamma=GAMMA
    )
    env.ret_rms.count = 0
    env.reset()
    wrapper, _, steps = through(ppo.VectorEnvNormReward.create(GAMMA), recording)
    keep = ~recording.is_reset.any(1)
    theirs = np.stack([env.step(np.zeros((env.num_envs, 1)))[1] for _ in range(keep.sum())])
    agree("VecNormalize, rewards", steps.reward[keep], theirs, 1e-6)
    agree("VecNormalize, variance", wrapper.rms.var, env.ret_rms.var, 1e-12)


@pytest.mark.parametrize("corrected", [False, True])
def test_norm_reward_equals_gymnasiums_normalize_reward_but_for_what_it_does_at_an_episodes_end(corrected):
    """Gymnasium forgets the return so far *in* a terminated step, whose return is then its own reward alone, and goes on
    from the last return in the next episode, after a truncation with all of it. Hence equal up to the first end as it is;
    to the last row where no end is called a termination and a reset step's return is set to zero. A count of 1e-4 as above."""
    recording = hopper()
    end = (recording.terminated | recording.truncated).any(1).argmax()
    told = recording._replace(
        terminated=np.zeros_like(recording.terminated), truncated=recording.terminated | recording.truncated
    )
    env = gym.wrappers.vector.NormalizeReward((told if corrected else recording).vector_env(), GAMMA)
    env.return_rms.count, env.accumulated_reward = 0, np.zeros(env.num_envs)  # in float64
    env.reset()
    theirs = []
    for is_reset in recording.is_reset:
        theirs.append(env.step(env.action_space.sample())[1])
        if corrected:
            env.accumulated_reward[is_reset] = 0
    wrapper, _, steps = through(ppo.VectorEnvNormReward.create(GAMMA), recording)
    rows = slice(None) if corrected else slice(end)
    ours, theirs = np.asarray(steps.reward), np.clip(theirs, -10, 10)
    name = f"NormalizeReward, {'corrected' if corrected else 'as it is'}"
    agree(f"{name}, {len(ours[rows])} rows", ours[rows], theirs[rows], 1e-10)
    if corrected:
        agree("NormalizeReward, variance", wrapper.rms.var, env.return_rms.var, 1e-10)
    else:
        print(f"\n{name}, all rows: {np.abs(ours - theirs).max() / np.abs(theirs).max():.1e}", end="")
        print(f"; deviation {env.return_rms.var**0.5:.3f}, ours {wrapper.rms.var**0.5:.3f}", end="")


# The network and its loss


def by_name(actor, critic, log_std, read):
    """What `read` finds in PyTorch's layers and deviation, under the script's names; kernels as [in, out]."""

    def dense(layers):
        return {f"Dense_{i}": {"kernel": read(x.weight).T, "bias": read(x.bias)} for i, x in enumerate(layers)}

    return {"params": {"actor": dense(actor) | {"log_std": read(log_std).reshape(-1)}, "critic": dense(critic)}}


def linear(*modules):
    import torch

    return [layer for module in modules for layer in module.modules() if isinstance(layer, torch.nn.Linear)]


def write(params, *modules):
    """Write the script's parameters into PyTorch's."""
    import torch

    jax.tree.map(lambda x, y: y.copy_(torch.tensor(np.asarray(x))), params, by_name(*modules, lambda x: x.data))


def read(*modules):
    """Gradients and parameters, under the script's names."""
    return by_name(*modules, lambda x: x.grad.numpy()), by_name(*modules, lambda x: x.detach().numpy())


def stable_baselines3_ppo(args, params, rows, epochs):
    """`PPO.train` over one minibatch, the whole of its rollout buffer, as often as there are epochs."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import Logger

    size, env = len(rows.obs), gym.Env()
    env.observation_space = gym.spaces.Box(-np.inf, np.inf, rows.obs.shape[1:])
    env.action_space = gym.spaces.Box(-1, 1, rows.action.shape[1:])
    model = PPO(
        "MlpPolicy",
        env,
        learning_rate=args.learning_rate,
        n_steps=size,
        batch_size=size,
        n_epochs=epochs,
        clip_range=args.clip_coef,
        normalize_advantage=args.norm_adv,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef,
        max_grad_norm=args.max_grad_norm,
        device="cpu",
    )
    policy, buffer, parts = model.policy, model.rollout_buffer, model.policy.mlp_extractor
    modules = linear(parts.policy_net, policy.action_net), linear(parts.value_net, policy.value_net), policy.log_std
    write(params, *modules)
    buffer.observations[:, 0], buffer.actions[:, 0], buffer.log_probs[:, 0] = rows.obs, rows.action, rows.log_prob
    buffer.values[:, 0], buffer.advantages[:, 0], buffer.returns[:, 0] = rows.value, rows.advantage, rows.target
    buffer.full = True
    model.set_logger(Logger(None, []))
    model.train()
    logged = model.logger.name_to_value
    names = dict(policy_loss="policy_gradient_loss", clipfrac="clip_fraction")
    names |= {name: name for name in ("loss", "value_loss", "approx_kl", "explained_variance")}
    metrics = {ours: logged[f"train/{theirs}"] for ours, theirs in names.items()}
    return metrics | {"entropy": -logged["train/entropy_loss"]}, *read(*modules)


def tianshou_ppo(args, params, rows, epochs):
    """`PPO._update_with_batch` on the networks of its MuJoCo example, over one minibatch as often as there are epochs."""
    import torch
    from tianshou.algorithm import PPO
    from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Batch
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic

    body = functools.partial(Net, state_shape=rows.obs.shape[1:], hidden_sizes=(64, 64), activation=torch.nn.Tanh)
    actor = ContinuousActorProbabilistic(preprocess_net=body(), action_shape=rows.action.shape[1:], unbounded=True)
    critic = ContinuousCritic(preprocess_net=body())
    policy = ProbabilisticActorPolicy(
        actor=actor,
        dist_fn=lambda loc_scale: torch.distributions.Independent(torch.distributions.Normal(*loc_scale), 1),
        action_space=gym.spaces.Box(-1, 1, rows.action.shape[1:]),
        action_scaling=False,
    )
    model = PPO(
        policy=policy,
        critic=critic,
        optim=AdamOptimizerFactory(lr=args.learning_rate, eps=1e-5),
        eps_clip=args.clip_coef,
        value_clip=args.clip_vloss,
        advantage_normalization=args.norm_adv,
        recompute_advantage=False,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef,
        max_grad_norm=args.max_grad_norm,
    )
    modules = linear(actor.preprocess, actor.mu), linear(critic.preprocess, critic.last), actor.sigma_param
    write(params, *modules)
    names = dict(obs="obs", act="action", logp_old="log_prob", adv="advantage", returns="target", v_s="value")
    batch = Batch({theirs: torch.tensor(getattr(rows, ours)) for theirs, ours in names.items()}, info=Batch())
    stats = model._update_with_batch(batch, None, epochs)
    names = dict(policy_loss="actor_loss", value_loss="vf_loss", entropy="ent_loss", loss="loss")
    return {ours: getattr(stats, theirs).mean for ours, theirs in names.items()}, *read(*modules)


def start(args, size=96):
    """An agent and a minibatch: policy and values have moved since, either way; a quarter is masked nonsense."""
    agent, rng = ppo.make_agent(args, jax.random.PRNGKey(0), 11, 3), np.random.default_rng(0)
    agent = agent.replace(params=jax.tree.map(lambda x: x + jnp.float32(0.05 * rng.normal(size=x.shape)), agent.params))
    obs, noise, others = rng.normal(size=(size, 11)), rng.normal(size=(size, 3)), rng.normal(size=(4, size))
    (mean, log_std), value = agent.network.apply(agent.params, jnp.float32(obs))
    action = mean + jnp.exp(log_std) * noise
    # Ratios that go with the advantages, and targets off zero: sums that cancel would compare nothing but float32's rounding.
    log_prob = ppo.gaussian_log_prob(action, mean, log_std) + 0.2 * (others[0] + others[2])
    mask, rows = np.arange(size) % 4 > 0, (obs, action, log_prob, value + 0.3 * others[1], others[2], others[3] + 1)
    return agent, ppo.Batch(*(np.float32(np.where(np.expand_dims(mask, tuple(range(1, x.ndim))), x, 7)) for x in rows), mask)


@pytest.mark.parametrize(
    ("peer", "flags"),
    [
        (peer, flags)
        for peer in (stable_baselines3_ppo, tianshou_ppo)
        for flags in ({}, dict(ent_coef=0.02, vf_coef=0.7), dict(clip_coef=0.4), dict(norm_adv=True), dict(clip_vloss=True))
        if not (peer is stable_baselines3_ppo and "clip_vloss" in flags)  # which it clips without the maximum
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_loss_metrics_gradient_and_ten_steps_equal_those_of(peer, flags):
    """In float32, as the peers insist. They get no masked rows. `norm_adv` divides by the population's deviation here, by the
    sample's there: with their `vf_coef` made smaller by as much, all their loss is ours but for that factor."""
    args = ppo.Args(**flags)
    agent, batch = start(args)
    rows = ppo.Batch(*(x[batch.mask] for x in batch))
    factor = math.sqrt(len(rows.obs) / (len(rows.obs) - 1)) if args.norm_adv else 1.0
    grads, ours = jax.grad(ppo.ppo_loss, has_aux=True)(agent.params, agent.network, batch, args)
    ours["losses/explained_variance"] = ppo.explained_variance(*map(jnp.asarray, (batch.value, batch.target, batch.mask)))
    assert 0.1 < ours["losses/clipfrac"] < 0.9 and optax.tree.norm(grads) > args.max_grad_norm

    unclipped = dataclasses.replace(args, max_grad_norm=1e9, vf_coef=args.vf_coef / factor)
    metrics, their_grads, _ = peer(unclipped, agent.params, rows, 1)
    metrics |= {name: metrics[name] * factor for name in ("loss", "policy_loss")}
    name = f"{peer.__name__}, {flags}"
    agree(f"{name}: metrics", {key: ours[f"losses/{key}"] for key in metrics}, metrics, 1e-5)
    agree(f"{name}: gradient", grads, jax.tree.map(lambda x: x * factor, their_grads), 1e-5)
    if not args.norm_adv:
        _, _, theirs = peer(args, agent.params, rows, 10)
        params = agent.params
        for _ in range(10):
            agent, _ = improve(agent, batch, jnp.float64(args.learning_rate), args)
        moved, their_move = (
            jax.tree.map(lambda x, y: x - y, jax.tree.map(np.asarray, x), params) for x in (agent.params, theirs)
        )
        agree(f"{name}: move of ten steps", moved, their_move, 2e-4)


@pytest.mark.parametrize(("obs_size", "action_size"), [(11, 3), (376, 17), (4, 1)])
def test_initial_kernels_have_the_singular_values_that_torch_gives_them(obs_size, action_size):
    import torch

    params = ppo.make_agent(ppo.Args(), jax.random.PRNGKey(0), obs_size, action_size).params["params"]
    for part, gains in dict(actor=(math.sqrt(2), math.sqrt(2), 0.01), critic=(math.sqrt(2),) * 3).items():
        for i, gain in enumerate(gains):
            kernel = np.asarray(params[part][f"Dense_{i}"]["kernel"])
            ours = np.linalg.svd(kernel, compute_uv=False)
            theirs = torch.linalg.svdvals(torch.nn.init.orthogonal_(torch.empty(kernel.T.shape), gain)).numpy()
            agree(f"singular values, {part} {kernel.shape}", ours, theirs, 1e-5)
            agree("gain", ours, np.full(len(ours), gain), 1e-5)
