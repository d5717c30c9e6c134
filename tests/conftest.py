"""Settings of all tests: the script on the path, one XLA thread as in training, fast compilation, no silent broadcasting."""

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("NPROC", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # most tests compile more than they compute
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # the processes of a session compile nothing twice
    COMPILED = tempfile.TemporaryDirectory(prefix="jax-compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module")
def optimized():
    """Compile as training does."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
