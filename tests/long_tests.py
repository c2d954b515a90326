"""Tests that left the quick suite, besides those with the mark, and what holds their promises.

Of a test that is parametrized some cases stay in the quick suite; they hold what all of them do, for
the others' options come in where other quick tests look for them.
"""

import re
import typing


class Left(typing.NamedTuple):
    """Cases of a test that left the quick suite.

    Args:
        test: its file, below `tests`, and its name.
        stays: a pattern of the cases that stay, searched for in what is in their brackets; "" where
            none does.
        held_by: what holds the promise in the quick suite.
    """

    test: str
    stays: str
    held_by: str


POLICIES = "the other policies; layers have all three against NumPy"
OTHER_CASES = "the cases that stay"

LEFT = [
    # Ranks that fail.
    Left(
        "distributed/test_failures.py::test_a_rank_that_fails_ends_the_job",
        "raise-model|freeze-model",
        "trainers/checkpoint/test_writing.py: killed at every point of a save; "
        "distributed/test_apart.py: ranks that wait for each other",
    ),
    # The command line.
    Left(
        "cli/test_plan_measure.py::test_plan_measure_writes_a_usable_device",
        "",
        "planner/test_plan.py, and distributed/test_planner.py: what is planned is what is measured",
    ),
    Left(
        "cli/test_odd.py::test_unusual_environments_are_one_line_errors",
        "full disk|backend",
        OTHER_CASES,
    ),
    Left(
        "cli/test_generate.py::test_streamed_parts_join_to_the_texts",
        "{}",
        "models/test_continuation.py",
    ),
    Left("cli/test_generate.py::test_stop_token_ends_texts", "", "models/test_continuation.py"),
    Left(
        "cli/test_cli.py::test_doctor_lists_installed_packages",
        "",
        "cli/launching/test_doctor_hosts.py",
    ),
    # Generation: the rules of a search are tested on its scores, in test_logits_rules.py, too.
    Left("models/test_continuation.py::test_greedy", "llama|learned", OTHER_CASES),
    Left(
        "models/test_continuation.py::test_other_tokens_may_end_a_text",
        "",
        "test_an_end_that_is_padding_too_is_found",
    ),
    Left(
        "models/test_continuation.py::test_beams_find_what_is_at_least_as_likely",
        "llama",
        OTHER_CASES,
    ),
    Left(
        "models/test_continuation.py::test_what_is_told_is_what_is_found",
        "temperature",
        OTHER_CASES,
    ),
    Left(
        "models/test_continuation.py::test_no_two_tokens_follow_each_other_twice",
        "",
        "models/test_logits_rules.py",
    ),
    Left(
        "models/test_continuation.py::test_texts_end_and_are_padded",
        "",
        "models/test_generation.py, of encoder–decoders",
    ),
    Left(
        "models/test_generation.py::TestGreedy::test_the_cache_changes_nothing", "deep", OTHER_CASES
    ),
    Left("models/test_generation.py::TestGreedy::test_in_16_bits", "bfloat16", OTHER_CASES),
    Left(
        "models/test_generation.py::TestGreedy::test_ended_rows_are_padded_and_no_column_is_all_padding",
        "beam",
        OTHER_CASES,
    ),
    Left(
        "models/test_generation.py::TestBeamSearch::test_a_wide_beam_finds_everything",
        "-0.0|-3.0",
        OTHER_CASES,
    ),
    Left(
        "models/test_generation.py::TestBeamSearch::test_generate_returns_the_best",
        "0.6",
        OTHER_CASES,
    ),
    Left(
        "models/test_generation.py::TestSampling::test_how_often_each_token_is_drawn",
        "0.5",
        OTHER_CASES,
    ),
    Left(
        "models/test_encoder_decoder_lm.py::test_greedy_search_follows_the_largest_logits",
        "marian",
        OTHER_CASES,
    ),
    # Published weights: what is generated follows from the logits, which all families have.
    Left("models/pretrained/test_published.py::test_what_is_generated", "llama$", OTHER_CASES),
    Left("models/pretrained/test_published.py::test_what_is_translated", "marian", OTHER_CASES),
    Left(
        "models/pretrained/test_published.py::test_what_each_search_finds",
        "^beams_penalty",
        OTHER_CASES,
    ),
    Left(
        "models/pretrained/test_published.py::test_three_steps_of_training",
        "gpt2|t5_gated|mixtral|bart",
        OTHER_CASES,
    ),
    Left("models/pretrained/test_adapters.py::test_three_steps_of_training", "llama", OTHER_CASES),
    Left("models/test_lora.py::test_recompute_changes_nothing", "", "layers/test_recompute.py"),
    Left("models/test_freezing.py::test_recompute_changes_nothing", "", "layers/test_recompute.py"),
    # On ranks and meshes.
    Left(
        "distributed/test_pipeline.py::test_a_placement_of_neighbours_on_one_stage_gives_the_numbers_of_one_process",
        "",
        "zero-bubble layouts of distributed/test_parity.py, whose placement is such",
    ),
    Left("distributed/test_pipeline.py::test_shapes_that_vary_are_traced_twice", "", "parity"),
    Left("distributed/test_pipeline.py::test_a_stage_may_be_frozen", "", "models/test_freezing.py"),
    Left(
        "trainers/engines/test_mesh.py::test_optimizers_clip_by_the_norms_of_unsharded_gradients",
        "",
        "sgd and lamb of distributed/test_parity.py, which clip on meshes",
    ),
    Left(
        "trainers/engines/test_mesh.py::test_rows_that_the_data_axis_does_not_divide",
        "",
        "untied of distributed/test_parity.py, whose batches come in two shapes",
    ),
    Left(
        "trainers/engines/test_mesh.py::test_deep_networks_are_told_of_chunks_before_they_are_compiled",
        "",
        "layers/test_placement.py::test_chunks_of_a_single_stage_minimize_compile_time",
    ),
    Left(
        "models/test_freezing.py::test_gradients_of_frozen_weights_are_not_reduced",
        "",
        "test_on_a_mesh_nothing_is_sent_for_what_is_frozen",
    ),
    Left(
        "parallel/pipeline_parallel/test_shared_chunks.py::test_shared_chunks_are_compiled_once",
        "",
        "parallel/test_shared_blocks.py::test_only_one_block_is_traced_at_any_depth",
    ),
    Left(
        "parallel/context_parallel/test_communication.py::test_sent_elements_match_the_formula",
        "",
        "planner/test_formulas.py; layers/test_context_attention.py",
    ),
    Left(
        "trainers/engines/test_mesh.py::test_dropout_on_the_mesh",
        "",
        "parallel/tensor_parallel/test_dropout.py",
    ),
    Left(
        "trainers/engines/test_mesh.py::test_weights_are_excluded_from_decay_by_name_and_by_themselves",
        "",
        "sgd of distributed/test_parity.py",
    ),
    Left(
        "parallel/context_parallel/test_training.py::test_recompute_repeats_the_dropout_masks",
        "",
        "layers/test_recompute.py, and the layouts of long networks of distributed/test_parity.py",
    ),
    Left(
        "models/pretrained/test_published.py::test_straight_onto_a_mesh",
        "",
        "models/pretrained/test_loading.py::test_on_a_mesh",
    ),
    Left(
        "models/test_encoder_decoder_lm.py::test_one_search_after_the_other_on_a_mesh",
        "",
        "searches on meshes of distributed/test_parity.py",
    ),
    Left(
        "layers/test_blockwise_attention.py::test_blockwise_training_on_a_mesh_matches_reference",
        "",
        "layers/test_context_attention.py, whose blocks are the same",
    ),
    Left(
        "models/test_masked_lm.py::test_both_outputs_on_a_mesh",
        "",
        "bert of distributed/test_parity.py",
    ),
    Left(
        "test_step_walk.py::test_step_calls_every_function_of_its_walk", "One device", OTHER_CASES
    ),
    # Every option of a network in every type.
    Left(
        "models/test_translation.py::test_every_variant_runs_in_every_precision",
        "float32|tied-mixed_bfloat16|untied-mixed_float16",
        POLICIES,
    ),
    Left(
        "models/test_translation.py::test_padding_of_the_source_changes_nothing",
        "float32",
        POLICIES,
    ),
    Left(
        "models/test_translation.py::test_a_later_token_never_changes_earlier_logits",
        "float32",
        POLICIES,
    ),
    Left(
        "models/test_causal_lm.py::test_every_variant_runs_in_every_precision",
        "float32|untied-mixed_bfloat16|tied-mixed_float16",
        POLICIES,
    ),
    Left("models/test_causal_lm.py::test_padding_at_the_end_changes_nothing", "float32", POLICIES),
    Left(
        "models/test_causal_lm.py::test_a_later_token_never_changes_earlier_logits",
        "float32",
        POLICIES,
    ),
    Left("models/test_causal_lm.py::test_it_learns_to_count", "float32", POLICIES),
    Left("models/test_presets.py::test_number_of_parameters", "small|base|7b|xxl", OTHER_CASES),
    Left("models/test_presets.py::test_number_of_parameters_as_printed", "1t|base", OTHER_CASES),
    Left(
        "planner/test_plan.py::test_published_models_have_the_parameters_of_their_networks",
        "small|7b|base",
        OTHER_CASES,
    ),
    Left("layers/test_blocks.py::test_decoder_layer", "shape0|float32", POLICIES),
    Left("layers/test_blocks.py::test_encoder_layer", "shape0|float32", POLICIES),
    Left("layers/test_blocks.py::test_transformer", "float32|bfloat16", POLICIES),
    Left("layers/test_blocks.py::test_decoder", "float32|1-", POLICIES),
    Left(
        "layers/test_blocks.py::test_cached_decoding_matches_full_sequence",
        "float32|post-mixed_bfloat16",
        POLICIES,
    ),
    Left("layers/test_weights.py::test_weight_files_fit_all_layouts", "3-1|3-2", OTHER_CASES),
    Left(
        "layers/test_recompute.py::test_selective_recompute_is_bitwise_equal",
        "attention",
        OTHER_CASES,
    ),
    Left(
        "parallel/test_shared_blocks.py::test_changed_block_is_traced_separately",
        "one_frozen|another_rate",
        OTHER_CASES,
    ),
    Left(
        "parallel/test_shared_blocks.py::test_shared_tracing_does_not_change_results",
        "True-TransformerEncoder|False-TransformerDecoder",
        OTHER_CASES,
    ),
    # Training.
    Left(
        "trainers/engines/test_accumulation.py::test_steps_are_those_of_whole_batches",
        "2-options0",
        OTHER_CASES,
    ),
    Left(
        "trainers/test_expert_load.py::test_recompute_tells_the_same",
        "",
        "layers/test_recompute.py",
    ),
    Left(
        "trainers/test_against_keras.py::test_every_precision_compiled_or_not",
        "float32-True|mixed_bfloat16-False|mixed_float16-False",
        OTHER_CASES,
    ),
    Left(
        "trainers/test_against_keras.py::TestAgainstKeras::test_losses_and_metrics",
        "name|function",
        OTHER_CASES,
    ),
    Left(
        "trainers/test_by_hand.py::TestTheSameInOtherWays::test_fit",
        "steps_per_execution",
        OTHER_CASES,
    ),
    Left(
        "trainers/test_by_hand.py::TestTheSameInOtherWays::test_mixed_precision",
        "float16",
        OTHER_CASES,
    ),
    Left(
        "trainers/test_optimizer_update.py::test_weights_are_those_of_keras",
        "states of other|AdamW-False|all gradients clipped-False|a scalar",
        OTHER_CASES,
    ),
    Left(
        "trainers/test_objective.py::test_history_and_weights_are_those_of_keras",
        "mse-weighted|over weights|a class ignored-weighted|smoothing-weighted",
        OTHER_CASES,
    ),
    Left(
        "trainers/checkpoint/test_resume.py::TestResume::test_it_is_the_uninterrupted_run",
        "6-True|4-False",
        OTHER_CASES,
    ),
    Left(
        "trainers/checkpoint/test_resume.py::TestResume::test_steps_per_epoch", "True", OTHER_CASES
    ),
    Left(
        "trainers/checkpoint/test_format.py::TestFormat::test_every_optimizers_state_travels",
        "Muon|Adafactor|SGD",
        OTHER_CASES,
    ),
    Left(
        "trainers/checkpoint/test_preemption.py::test_a_run_that_is_told_to_stop_goes_on",
        "8-15",
        OTHER_CASES,
    ),
    # The slowest of what is held twice.
    Left(
        "cli/test_generate.py::test_generate_passes_search_options", "", "models/test_generation.py"
    ),
    Left(
        "cli/test_generate.py::test_stream_prints_the_same_text", "", "models/test_continuation.py"
    ),
    Left(
        "runs/test_folder.py::test_the_command_exports_weights_that_belong_to_the_run",
        "",
        "cli/test_cli.py::test_weights_of_a_checkpoint_are_exported",
    ),
    Left(
        "runs/test_folder.py::test_files_of_another_run_are_rejected",
        "run.json|weights|tokenizer|flipped|cut|numbers",
        OTHER_CASES,
    ),
    Left(
        "cli/launching/test_launch.py::test_restarts_a_failed_command",
        "",
        "cli/launching/test_plans.py",
    ),
    Left(
        "models/test_continuation.py::test_several_results_of_a_prompt",
        "",
        "models/test_generation.py",
    ),
    Left(
        "models/test_continuation.py::test_an_end_that_is_padding_too_is_found",
        "",
        "models/test_generation.py, of encoder–decoders",
    ),
    Left(
        "models/test_generation.py::TestGreedy::test_the_default_length_suits_the_source_and_the_positions",
        "",
        "models/test_presets.py; the command line's translations",
    ),
    Left(
        "models/test_generation.py::TestBeamSearch::test_the_penalty_prefers_longer_translations",
        "",
        "test_a_wide_beam_finds_everything, whose scores have the penalty",
    ),
    Left(
        "layers/test_blockwise_attention.py::test_blockwise_matches_reference_in_a_function",
        "",
        "test_like_with_all_scores",
    ),
    Left(
        "layers/test_recompute.py::test_predict_and_evaluate_are_unchanged",
        "",
        "layouts with recompute of distributed/test_parity.py",
    ),
    Left(
        "trainers/test_expert_load.py::test_micro_batches_tell_the_same_and_drop_the_same",
        "",
        "experts in micro-batches of distributed/test_parity.py",
    ),
]


def is_long(nodeid):
    """Return whether a test, by its name in pytest, has left the quick suite."""
    name, _, case = nodeid.removeprefix("tests/").partition("[")
    pattern = _STAYS.get(name)
    return pattern is not None and not (pattern and re.search(pattern, case.removesuffix("]")))


_STAYS = {left.test: left.stays for left in LEFT}
