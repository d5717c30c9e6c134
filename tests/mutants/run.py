"""Which test catches each mutant: patches the script in a copy, runs a fast subset of the tests there, prints a table.

    python tests/mutants/run.py                  all of them; exits with the number that nothing catches
    python tests/mutants/run.py adam log_std     those whose names hold one of these
    python tests/mutants/run.py none             the script as it is: the subset passes, and this is what it takes

A patch begins with what is wrong in it and the test file that runs first; then follows the difference.
"""

import concurrent.futures
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SCRIPT = "ppo_continuous_action_envpool_xla_jax_scan.py"
SUBSET = """
    test_statistics.py
    test_gae.py
    test_wrappers.py
    test_agent.py
    test_mutants_found.py
    test_envpool.py::test_two_seeds_two_streams_and_two_iterations_share_no_environment
    test_run.py::test_summary_averages_the_last_hundred_episodes
    test_reference.py::test_wrappers_in_float64_normalize_as_recomputed
    test_reference.py::test_the_rollout_in_float32_is_the_recomputed_one
    test_reference.py::test_float64_equals_the_recomputed_iteration
    test_reference.py::test_float32_equals_the_recomputed_iteration[hopper-target_kl]
    test_reference.py::test_float32_equals_the_recomputed_iteration[cheetah-defaults]
    test_update.py::test_rollout_rows_line_up_with_the_environments_answers
    test_update.py::test_every_float_of_the_state_is_float32_but_the_running_statistics
    test_update.py::test_target_kl_stops_the_rest_of_the_iteration_but_annealing_goes_on
""".split()


def try_mutant(name: str) -> tuple[str, str, str, float]:
    """Name, what is wrong, the first failing test, and the seconds until it failed."""
    lines = (HERE / name).read_text().splitlines() if name != "none" else ["nothing", "first: test_statistics.py"]
    first = lines[1].removeprefix("first: ")
    subset = sorted(SUBSET, key=lambda test: not test.startswith(first))
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / SCRIPT, folder)
        shutil.copy(ROOT / "pyproject.toml", folder)
        shutil.copytree(ROOT / "tests", Path(folder, "tests"), ignore=shutil.ignore_patterns("mutants", "__pycache__"))
        if name != "none":
            patch = subprocess.run(["patch", "-s", "-i", str(HERE / name), SCRIPT], cwd=folder, capture_output=True, text=True)
            if patch.returncode:
                return name, lines[0], "**does not apply**", 0.0
        start = time.time()
        pytest = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
        output = subprocess.run([*pytest, *(f"tests/{t}" for t in subset)], cwd=folder, capture_output=True, text=True)
    failure = re.search(r"^FAILED tests/(.*?)(?: - .*)?$", output.stdout, re.M)  # an error in collection is no catch
    caught = failure[1] if failure else "**nothing**" if output.returncode == 0 else f"**pytest: {output.stdout[-200:]}**"
    return name, lines[0], caught, time.time() - start


def main(words: list[str]) -> int:
    names = sorted(path.name for path in HERE.glob("*.patch") if not words or any(word in path.name for word in words))
    print("| mutant | what is wrong | caught by | s |\n|-|-|-|-|", flush=True)
    missed = 0
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        for name, what, caught, seconds in executor.map(try_mutant, names or words):
            missed += caught.startswith("**")
            print(f"| {name.removesuffix('.patch')} | {what} | {caught} | {seconds:.0f} |", flush=True)
    print(f"\n{len(names)} mutants, {missed} not caught")
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
