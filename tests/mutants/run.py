"""Which test catches each mutant: patches the script in a copy, runs a fast subset of the tests there, prints a table.

    python tests/mutants/run.py                  all of them; exits with the number that nothing catches
    python tests/mutants/run.py adam log_std     those whose names hold one of these
    python tests/mutants/run.py none             the script as it is: the subset passes, and this is what it takes

A patch begins with what is wrong in it and the tests that run first; then follows the difference.
"""

import os
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
    test_envpool.py::test_a_reset_step_follows_each_end_and_has_no_reward
    test_run.py::test_summary_averages_the_last_hundred_episodes
    test_reference.py::test_wrappers_in_float64_normalize_as_recomputed
    test_reference.py::test_the_rollout_in_float32_is_the_recomputed_one
    test_reference.py::test_float64_equals_the_recomputed_iteration
    test_reference.py::test_float32_equals_the_recomputed_iteration[hopper-target_kl]
    test_reference.py::test_float32_equals_the_recomputed_iteration[cheetah-defaults]
    test_models.py::test_every_array_survives_the_file_with_its_dtype
    test_models.py::test_ten_iterations_saved_loaded_and_ten_more_equal_twenty
    test_models.py::test_a_file_that_is_no_sound_model_is_refused_in_one_line
    test_models.py::test_resume_goes_on_in_the_same_directory_with_the_saved_arguments
    test_models.py::test_resumed_runs_meet_fresh_environments
    test_models.py::test_an_evaluation_is_the_policy_stepped_by_hand_for_the_first_episodes_of_each_environment
    test_models.py::test_evaluation_moves_neither_statistics_nor_parameters
    test_models.py::test_write_atomically_keeps_the_old_file_when_writing_fails
    test_models.py::test_is_due_at_the_end_and_every_so_many_iterations
    test_models.py::test_a_loaded_policy_takes_the_mean_by_the_saved_statistics
    test_models.py::test_policy_takes_dicts_and_maps_to_the_bounds
    test_update.py::test_the_logged_action_std_is_the_policys_mean_deviation
    test_update.py::test_episode_means_are_of_finished_episodes_and_nan_of_none
    test_update.py::test_actions_deviate_from_the_mean_by_the_policys_deviation_each_on_its_own
    test_update.py::test_another_seed_begins_with_another_network_and_another_key
    test_update.py::test_averages_leave_out_environments_that_have_finished_nothing
    test_update.py::test_success_rate_is_the_share_of_finished_episodes_whose_last_step_succeeded
    test_run.py::test_faults_end_the_run_by_name_after_logging_it
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
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    with tempfile.TemporaryDirectory() as compiled:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled  # what a mutant leaves as it is compiles once
        for name, what, caught, seconds in map(try_mutant, names or words):
            missed += caught.startswith("**")
            print(f"| {name.removesuffix('.patch')} | {what} | {caught} | {seconds:.0f} |", flush=True)
    print(f"\n{len(names)} mutants, {missed} not caught")
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
