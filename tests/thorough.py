"""Which cases `make test` leaves to `make test-all` (pytest --all), which CI runs.

Some tests try one claim on many models, plans or signals, and take most of the time: of these, `make test` runs the
first cases only. Tests that make a claim of their own are not here. What is marked `thorough` is left out, too.
"""

from __future__ import annotations

from collections import Counter

import pytest

# A test, and how many of its cases `make test` runs: about two seconds' worth on a slow machine, one at least.
FEW: dict[str, int] = {
    "benchmarks/test_overhead.py::test_contestants_reach_the_same_losses": 1,
    "comm/test_communicator.py::test_ring": 13,
    "comm/test_mpi_start.py::test_a_rank_that_raises_ends_the_job": 1,
    "comm/test_mpi_start.py::test_more_than_two_to_the_31_elements": 1,
    "comm/test_table.py::test_every_movement_of_every_dtype": 3,
    "comm/test_table.py::test_the_table_has_no_hole": 1,
    "comm/test_watchdog.py::test_a_hang_is_told_in_one_sentence": 1,
    "comm/test_watchdog.py::test_ranks_may_go_on_without_one_that_has_left": 1,
    "comm/test_watchdog.py::test_ranks_that_are_always_in_some_call_of_torch_do_not_hang": 1,
    "comm/test_watchdog.py::test_with_check_a_difference_is_told_at_once": 1,
    "comm/test_watchdog.py::test_without_check_another_shape_is_told_also_of_a_rank_that_it_killed": 1,
    "comm/test_watchdog.py::test_without_check_the_timeout_tells_of_the_odd_rank": 1,
    "equivalence/test_contrastive.py::test_a_plan_changes_nothing": 3,
    "equivalence/test_foreign.py::test_a_plan_changes_nothing": 1,
    "equivalence/test_habits.py::test_the_result_is_that_of_one_device": 1,
    "equivalence/test_habits.py::test_the_result_is_that_of_one_device_with_data_parallelism": 1,
    "equivalence/test_habits.py::test_what_cannot_be_right_is_refused": 1,
    "equivalence/test_handwritten.py::test_models_of_hugging_face_under_sequence_parallelism": 1,
    "equivalence/test_handwritten.py::test_nearly_all_parameters_are_sharded": 4,
    "equivalence/test_handwritten.py::test_the_result_is_that_of_one_device": 1,
    "equivalence/test_mutations.py::test_a_planted_fault_is_caught": 3,
    "equivalence/test_optimizers.py::test_a_plan_changes_nothing": 1,
    "equivalence/test_own_loss.py::test_a_plan_changes_nothing": 1,
    "equivalence/test_plans.py::test_a_plan_changes_nothing": 12,
    "equivalence/test_plans.py::test_on_mpi_too": 1,
    "equivalence/test_precision.py::test_a_plan_changes_nothing_but_rounding": 4,
    "equivalence/test_precision.py::test_one_rank_overflows_and_all_skip_the_step": 2,
    "equivalence/test_precision.py::test_roundings_of_parameters_are_proved_in_float64": 5,
    "equivalence/test_precision.py::test_scales_are_those_of_gradscaler": 1,
    "equivalence/test_precision.py::test_the_state_goes_to_other_plans": 1,
    "equivalence/test_random_plans.py::test_a_random_stack": 1,
    "equivalence/test_random_plans.py::test_a_random_transformer": 1,
    "examples/test_blocks.py::test_blocks_run_and_print_what_the_page_says": 7,
    "examples/test_every_example.py::test_the_examples_that_no_page_runs": 1,
    "examples/test_seed_000.py::test_a_command": 5,
    "examples/test_seed_001.py::test_programs_print_what_they_say": 3,
    "examples/test_seed_004.py::test_strategies_give_the_result_of_one_device": 1,
    "explain/test_plan_program.py::test_a_large_model_is_shown_as_a_small_one_is": 1,
    "explain/test_plan_program.py::test_a_simulated_rank_communicates_as_real_ranks_do": 1,
    "explain/test_plan_program.py::test_all_communication_is_listed": 1,
    "explain/test_plan_program.py::test_every_op_of_one_device_is_found_on_a_rank": 1,
    "graph/test_models.py::test_every_option_of_every_op": 1,
    "graph/test_program.py::test_the_result_of_one_device": 1,
    "graph/test_program.py::test_under_any_placements": 1,
    "graph/test_program_odd.py::test_the_result_of_one_device": 2,
    "graph/test_rules.py::test_options_give_the_op": 5,
    "graph/test_search.py::test_no_more_is_said_than_in_the_layout_by_hand": 1,
    "graph/test_trace.py::test_unpacked_projections_compute_the_same": 2,
    "launch/test_ending.py::test_a_signal_to_the_launcher_ends_everything": 1,
    "launch/test_ending.py::test_ranks_with_a_grace_period_may_save_first": 1,
    "launch/test_failures.py::test_an_exception_is_shown_from_the_users_script_on": 1,
    "launch/test_failures.py::test_first_failure_alone": 1,
    "launch/test_mpi.py::test_a_rank_that_ends_last_is_left_to_end": 1,
    "launch/test_mpi.py::test_first_failure_alone": 1,
    "launch/test_mpi.py::test_it_works": 1,
    "launch/test_mpi.py::test_restart": 1,
    "launch/test_mpi.py::test_what_a_rank_sent_before_it_ended_arrives": 1,
    "launch/test_remote.py::test_mpi_over_two_hosts": 1,
    "launch/test_remote.py::test_nothing_is_left_on_any_host": 1,
    "launch/test_remote.py::test_preflight_names_the_cause": 3,
    "launch/test_remote.py::test_the_first_failure_names_its_host": 1,
    "launch/test_remote.py::test_the_pages_commands": 1,
    "mesh/test_reshard.py::test_all_pairs_on_a_line": 4,
    "mesh/test_side_effects.py::test_what_a_model_keeps_is_not_of_a_trial": 3,
    "parallel/test_compile.py::test_a_compiled_model_is_recognised": 1,
    "parallel/test_compile.py::test_a_plan_changes_nothing": 2,
    "parallel/test_context.py::test_attention": 3,
    "parallel/test_context.py::test_masks_of_ranks_with_few_tokens": 6,
    "parallel/test_context_models.py::test_model": 1,
    "parallel/test_expert.py::test_ranks": 8,
    "parallel/test_expert.py::test_with_context_parallelism": 1,
    "parallel/test_filling.py::test_a_rank_never_has_more_than_its_own_and_a_tensor_more": 1,
    "parallel/test_filling.py::test_values_are_those_of_one_process": 1,
    "parallel/test_float8.py::test_plans_round_as_one_device_does": 3,
    "parallel/test_found_by_chance.py::test_blocks_that_are_not_called": 1,
    "parallel/test_found_by_chance.py::test_losses_may_divide_sums_by_sizes_of_the_batch": 1,
    "parallel/test_found_by_chance.py::test_torchs_attention_drops_the_same_weights_whoever_has_them": 2,
    "parallel/test_generate.py::test_generate_gives_the_tokens_of_one_device": 1,
    "parallel/test_generate.py::test_generate_through_a_pipeline": 1,
    "parallel/test_generate.py::test_other_ways_to_generate": 1,
    "parallel/test_hugging_face.py::test_a_plan_that_holds_is_used_as_it_is": 5,
    "parallel/test_hugging_face.py::test_a_published_plan_is_tried": 1,
    "parallel/test_hugging_face.py::test_mixtures_and_latent_attention": 2,
    "parallel/test_hugging_face.py::test_trains_as_the_plain_model": 2,
    "parallel/test_loop.py::test_a_gan": 1,
    "parallel/test_loop.py::test_own_loop_agrees_with_one_device": 4,
    "parallel/test_loop.py::test_own_loop_on_four_ranks": 1,
    "parallel/test_loop.py::test_steps_on_local_batches": 1,
    "parallel/test_low_precision.py::test_bfloat16_parameters_beside_other_strategies": 4,
    "parallel/test_marked.py::test_verify_takes_marked_stages": 1,
    "parallel/test_optimizer_scope.py::test_strangers_under_zero": 1,
    "parallel/test_pipeline.py::test_a_hugging_face_model_as_it_is": 1,
    "parallel/test_pipeline.py::test_the_result_is_that_of_one_process": 3,
    "parallel/test_pipeline_runtime.py::test_activations_are_kept_as_long_as_the_schedule_says_and_no_longer": 2,
    "parallel/test_pipeline_runtime.py::test_dropout_and_recomputation": 2,
    "parallel/test_pipeline_runtime.py::test_frozen_parameters_get_no_gradient_and_stop_none": 1,
    "parallel/test_pipeline_runtime.py::test_three_ranks": 1,
    "parallel/test_pipeline_skips.py::test_the_result_is_that_of_one_process": 2,
    "parallel/test_pipeline_skips.py::test_under_other_plans": 1,
    "parallel/test_pipeline_split.py::test_stages_in_a_row_compute_what_the_model_computes": 10,
    "parallel/test_pipeline_values.py::test_values_read_on_one_stage_are_those_of_all": 1,
    "parallel/test_predict.py::test_outputs_are_those_of_one_device": 2,
    "parallel/test_samples.py::test_random_numbers_follow_the_samples_wherever_they_lie": 1,
    "parallel/test_searched.py::test_what_is_found_gives_the_result_of_one_device": 2,
    "parallel/test_sequence.py::test_dropout_masks_do_not_depend_on_tp": 2,
    "parallel/test_sequence.py::test_gpt": 1,
    "parallel/test_zero.py::test_every_optimizer": 2,
    "parallel/test_zero.py::test_meshes": 1,
    "parallel/test_zero.py::test_sizes_and_microbatches": 1,
    "parallel/test_zero_branches.py::test_ranks_may_take_different_ways": 1,
    "parallel/test_zero_branches.py::test_views_of_parameters_outlive_their_unit": 1,
    "plan/test_transfers.py::test_between_real_ranks": 1,
    "planner/test_planning.py::test_bad_words_are_refused": 4,
    "planner/test_race.py::test_the_measured_fastest_trains_as_if_it_had_been_given": 1,
    "quantum/test_schedule.py::test_exchanges": 4,
    "train/test_engine.py::test_every_rank_sees_what_one_process_sees": 1,
    "train/test_engine.py::test_perplexity_is_that_of_the_loss": 1,
    "train/test_engine.py::test_under_every_plan_the_same_module_is_named_and_the_same_state_kept": 1,
    "train/test_saving.py::test_hugging_face_weights": 1,
    "train/test_saving.py::test_together_ranks_write_everything_once": 1,
    "verify/test_float64.py::test_a_mixture_as_built_by_default": 1,
    "verify/test_run_errors.py::test_a_refusal_in_the_middle_of_a_step": 2,
    "verify/test_self_check.py::test_a_planted_fault_stops_the_run": 6,
    "verify/test_self_check.py::test_a_sound_plan_is_proved_and_the_check_leaves_no_trace": 5,
}


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    seen: Counter[str] = Counter()
    found = []
    for item in items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        seen[name] += 1
        if item.get_closest_marker("thorough") or seen[name] > FEW.get(name, seen[name]):
            found.append(item)
    return found


def unknown(items: list[pytest.Item]) -> list[str]:
    """Names in FEW that are no tests: for a run of all files."""
    return sorted(FEW.keys() - {item.nodeid.partition("[")[0].removeprefix("tests/") for item in items})
