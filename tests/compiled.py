"""The script's pure functions, compiled: operation by operation they would take longer than most tests."""

import jax

import ppo_continuous_action_envpool_xla_jax_scan as ppo

collect_rollout = jax.jit(ppo.collect_rollout, static_argnames=("env", "args"))
estimate_advantages = jax.jit(ppo.estimate_advantages, static_argnames="args")
improve = jax.jit(ppo.improve, static_argnames="args")
update_agent = jax.jit(ppo.update_agent, static_argnames="args")
