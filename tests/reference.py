"""One iteration of PPO in plain float64 NumPy, as DESIGN.md section 3 and the papers have it. Shares no code with the script.

Parameters and Adam's moments are flat dicts, such as {"actor/Dense_0/kernel": [O, 64]}; rows that only reset are dropped, not
masked. Letters: T steps, N environments, B = T * N, M rows of a minibatch, O, A.
"""

from typing import NamedTuple

import numpy as np


class Moments(NamedTuple):
    """Mean, population variance and number of the rows seen so far."""

    mean: np.ndarray
    var: np.ndarray
    count: float

    @property
    def std(self):
        return np.sqrt(self.var + 1e-8)

    def seen(self, rows):
        """The moments after some more rows [B, ...], by the law of total variance."""
        if len(rows) == 0:
            return self
        new = len(rows) / (self.count + len(rows))
        mean = (1 - new) * self.mean + new * rows.mean(0)
        within = (1 - new) * self.var + new * rows.var(0)
        between = (1 - new) * (self.mean - mean) ** 2 + new * (rows.mean(0) - mean) ** 2
        return Moments(mean, within + between, self.count + len(rows))


UNSEEN = Moments(np.float64(0), np.float64(1), 0.0)


class Steps(NamedTuple):
    """T actions of N environments, and what came of them."""

    obs: np.ndarray  # [T + 1, N, O] what the agent saw, the last one after the rollout
    action: np.ndarray  # [T, N, A] as sampled
    log_prob: np.ndarray  # [T, N] when sampled
    reward: np.ndarray  # [T, N]
    terminated: np.ndarray  # [T, N] bool
    truncated: np.ndarray  # [T, N] bool
    is_reset: np.ndarray  # [T, N] bool


class Learner(NamedTuple):
    """What an iteration changes."""

    params: dict[str, np.ndarray]
    first: dict[str, np.ndarray]  # Adam's moments
    second: dict[str, np.ndarray]
    count: int  # of Adam's steps
    returns: Moments


# Streams


def normalize_observations(moments, raw):
    """Raw observations [T, N, O] as the agent sees them, each batch counted before it is normalized."""
    seen = []
    for batch in raw:
        moments = moments.seen(batch)
        seen.append(np.clip((batch - moments.mean) / moments.std, -10, 10))
    return moments, np.array(seen)


def normalize_rewards(moments, discounted, reward, is_reset, gamma):
    """Rewards [T, N] over the running deviation of the discounted return [N], as in baselines' VecNormalize."""
    scaled = []
    for row, resets in zip(reward, is_reset, strict=True):
        discounted = discounted * gamma + row
        discounted[resets] = 0
        moments = moments.seen(discounted[~resets])
        scaled.append(np.clip(row / moments.std, -10, 10))
    return moments, discounted, np.array(scaled)


def finished_episodes(episode_return, episode_length, steps):
    """Returns and lengths of the episodes that end, given those [N] of the running ones. `steps.reward` is raw."""
    ends = []
    for n in range(steps.reward.shape[1]):
        total, length = episode_return[n], episode_length[n]
        for t in range(len(steps.reward)):
            if steps.is_reset[t, n]:
                total, length = 0, 0
                continue
            total, length = total + steps.reward[t, n], length + 1
            if steps.terminated[t, n] or steps.truncated[t, n]:
                ends.append((total, length))
    return np.array(ends).reshape(-1, 2).T


# Networks: two hidden layers of tanh


def forward(params, name, obs):
    """Outputs [M, ...] of a network, and the inputs of its layers."""
    inputs = [obs]
    for i in range(2):
        inputs.append(np.tanh(inputs[i] @ params[f"{name}/Dense_{i}/kernel"] + params[f"{name}/Dense_{i}/bias"]))
    return inputs[2] @ params[f"{name}/Dense_2/kernel"] + params[f"{name}/Dense_2/bias"], inputs


def backward(params, name, inputs, d_output):
    """Gradients of a network's parameters, given those of its outputs [M, ...]."""
    grads = {}
    for i in (2, 1, 0):
        grads[f"{name}/Dense_{i}/kernel"] = inputs[i].T @ d_output
        grads[f"{name}/Dense_{i}/bias"] = d_output.sum(0)
        d_output = d_output @ params[f"{name}/Dense_{i}/kernel"].T * (1 - inputs[i] ** 2)  # unused after the first layer
    return grads


def log_density(params, obs, action):
    """Log-probability [M] of actions, the standardized actions [M, A] and the actor's inner values."""
    mean, inputs = forward(params, "actor", obs)
    log_std = params["actor/log_std"]
    z = (action - mean) / np.exp(log_std)
    return (-(z**2) / 2 - log_std - np.log(2 * np.pi) / 2).sum(-1), z, inputs


def values(params, obs):
    return forward(params, "critic", obs.reshape(-1, obs.shape[-1]))[0].reshape(obs.shape[:-1])


# Advantages


def advantages(value, steps, gamma, gae_lambda):
    """Sums of discounted one-step errors (Schulman et al. 2016, equation 16) [T, N], given values [T + 1, N]."""
    result = np.zeros(steps.reward.shape)
    error = steps.reward + gamma * value[1:] * ~steps.terminated - value[:-1]
    ended = steps.terminated | steps.truncated
    for t, n in zip(*np.nonzero(~steps.is_reset), strict=True):
        for later in range(t, len(error)):
            result[t, n] += (gamma * gae_lambda) ** (later - t) * error[later, n]
            if ended[later, n]:
                break
    return result


def estimate(learner, steps, args):
    """The learner, and values, advantages and targets [B]; values and targets are in the critic's units."""
    scale = learner.returns.std if args.norm_return else 1.0
    value = values(learner.params, steps.obs)
    advantage = advantages(value * scale, steps, args.gamma, args.gae_lambda)
    raw_return = advantage + value[:-1] * scale
    learner = learner._replace(returns=learner.returns.seen(raw_return[~steps.is_reset]))
    return learner, (value[:-1].reshape(-1), advantage.reshape(-1), raw_return.reshape(-1) / scale)


# Loss (Schulman et al. 2017, equations 7 and 9) and its gradient


def loss_and_gradient(params, obs, action, log_prob, value, advantage, target, args):
    """Metrics and gradient on M rows that count. The gradient of no rows is zero."""
    rows, clip = max(len(obs), 1), args.clip_coef
    if args.norm_adv and len(obs):
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    new_log_prob, z, actor_inputs = log_density(params, obs, action)
    log_ratio = new_log_prob - log_prob
    ratio = np.exp(log_ratio)
    clipped_ratio = np.clip(ratio, 1 - clip, 1 + clip)
    active = ratio * advantage <= clipped_ratio * advantage  # where the minimum is, or equals, the unclipped surrogate
    d_log_prob = np.where(active, -ratio * advantage, 0) / rows

    new_value, critic_inputs = forward(params, "critic", obs)
    new_value = new_value[:, 0]
    error = new_value - target
    squared, d_value = error**2, 2 * error
    if args.clip_vloss:
        near_error = value + np.clip(new_value - value, -clip, clip) - target
        worse = near_error**2 > squared
        squared = np.where(worse, near_error**2, squared)
        d_value = np.where(worse, 2 * near_error * (np.abs(new_value - value) < clip), d_value)

    std = np.exp(params["actor/log_std"])
    entropy = np.log(std * np.sqrt(2 * np.pi * np.e)).sum() * bool(len(obs))
    policy_loss = -np.minimum(ratio * advantage, clipped_ratio * advantage).sum() / rows
    value_loss = squared.sum() / rows
    grads = backward(params, "actor", actor_inputs, d_log_prob[:, None] * z / std)
    grads |= backward(params, "critic", critic_inputs, args.vf_coef * d_value[:, None] / rows)
    grads["actor/log_std"] = (d_log_prob[:, None] * (z**2 - 1)).sum(0) - args.ent_coef * bool(len(obs))
    metrics = {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/loss": policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy,
        "losses/old_approx_kl": -log_ratio.sum() / rows,
        "losses/approx_kl": ((ratio - 1) - log_ratio).sum() / rows,
        "losses/clipfrac": (np.abs(ratio - 1) > clip).sum() / rows,
        "losses/grad_norm": np.sqrt(sum((g**2).sum() for g in grads.values())),
    }
    return metrics, grads


def adam(learner, grads, rate):
    """A step of Adam (Kingma and Ba 2015, algorithm 1)."""
    count = learner.count + 1
    first = {name: 0.9 * learner.first[name] + 0.1 * g for name, g in grads.items()}
    second = {name: 0.999 * learner.second[name] + 0.001 * g**2 for name, g in grads.items()}
    params = {
        name: p - rate * (first[name] / (1 - 0.9**count)) / (np.sqrt(second[name] / (1 - 0.999**count)) + 1e-5)
        for name, p in learner.params.items()
    }
    return learner._replace(params=params, first=first, second=second, count=count)


# The iteration


def annealed_rate(args, iteration):
    """The learning rate of iteration k = 1 ... K."""
    iterations = args.total_timesteps // (args.num_envs * args.num_steps)
    return args.learning_rate * ((iterations - (iteration - 1)) / iterations if args.anneal_lr else 1)


def improve(learner, steps, iteration, orders, args):
    """The learner after all minibatches of `orders` [epochs, minibatches, M], the mean metrics, and each one's KL."""
    rate = annealed_rate(args, iteration)
    obs, action = (x.reshape(-1, x.shape[-1]) for x in (steps.obs[:-1], steps.action))
    log_prob, counts = steps.log_prob.reshape(-1), ~steps.is_reset.reshape(-1)
    executed, divergences, explained = [], [], None
    for epoch, minibatches in enumerate(orders):
        if args.recompute_advantage or epoch == 0:
            learner, (value, advantage, target) = estimate(learner, steps, args)
        if explained is None:
            explained = 1 - (target - value)[counts].var() / target[counts].var()
        for minibatch in minibatches:
            rows = minibatch[counts[minibatch]]
            batch = (obs[rows], action[rows], log_prob[rows], value[rows], advantage[rows], target[rows])
            metrics, grads = loss_and_gradient(learner.params, *batch, args)
            divergences.append(metrics["losses/approx_kl"])
            if args.target_kl is not None and metrics["losses/approx_kl"] > args.target_kl:
                return learner, average(executed) | {"losses/explained_variance": explained}, divergences
            shrink = min(1, args.max_grad_norm / max(metrics["losses/grad_norm"], 1e-300))
            learner = adam(learner, {name: g * shrink for name, g in grads.items()}, rate)
            executed.append(metrics)
    return learner, average(executed) | {"losses/explained_variance": explained}, divergences


def average(metrics):
    return {name: float(np.mean([m[name] for m in metrics])) for name in metrics[0]} if metrics else {}
