"""Tests of the long suite without the mark `long`, and the quick tests of the same promises.

Some cases of a parametrized test may stay in the quick suite. They check the promise of all cases.
`LONG_TESTS` and `long_tests.tsv` list the tests. A new row belongs in the table.
"""

import csv
import pathlib
import re
import typing


class LongTest(typing.NamedTuple):
    """Cases of a test that belong to the long suite.

    Args:
        test: Path below `tests` and name of the test.
        quick_cases: Pattern of the cases that stay in the quick suite, searched in the parameters' id.
            `""` moves all cases.
        quick_test: Quick test of the same promise.
    """

    test: str
    quick_cases: str
    quick_test: str


POLICIES = "the other policies; layers have all three against NumPy"
OTHER_CASES = "the cases that stay"

LONG_TESTS = [
    # Ranks that fail.
    LongTest(
        "distributed/test_failures.py::test_failed_rank_ends_the_job",
        "freeze-model",
        "trainers/checkpoint/test_writing.py: killed at every point of a save; "
        "parallel/watchdog/test_links.py: ranks that are killed or silent",
    ),
    # The command line.
    LongTest(
        "cli/test_plan_measure.py::test_plan_measure_writes_a_usable_device",
        "",
        "planner/test_plan.py; distributed/test_planner.py compares plans with measurements",
    ),
    LongTest("cli/test_generate.py::test_stop_token_ends_texts", "", "models/test_continuation.py"),
    LongTest(
        "cli/test_cli.py::test_doctor_lists_installed_packages",
        "",
        "cli/launching/test_doctor_hosts.py",
    ),
    # Generation. test_logits_rules.py also tests the rules of a search, on its scores.
    LongTest(
        "models/test_continuation.py::test_stop_ids_end_a_text",
        "",
        "cli/test_end_tokens.py",
    ),
    LongTest(
        "models/test_continuation.py::test_beam_search_is_at_least_as_likely_as_greedy_search",
        "llama",
        OTHER_CASES,
    ),
    LongTest(
        "models/test_continuation.py::test_on_tokens_receives_every_generated_token",
        "temperature",
        OTHER_CASES,
    ),
    LongTest(
        "models/test_continuation.py::test_no_repeat_ngram_size_forbids_repeated_pairs",
        "",
        "models/test_logits_rules.py",
    ),
    LongTest(
        "models/test_continuation.py::test_texts_stop_at_the_end_token_and_are_padded",
        "",
        "models/test_generation.py, of encoder–decoders",
    ),
    LongTest(
        "models/test_generation.py::TestGreedy::test_cached_search_matches_full_forward_passes",
        "deep",
        OTHER_CASES,
    ),
    LongTest(
        "models/test_generation.py::TestGreedy::test_16_bit_search_finds_tokens_near_the_best",
        "bfloat16",
        OTHER_CASES,
    ),
    LongTest(
        "models/test_generation.py::TestGreedy::test_ended_rows_are_padded_and_no_column_is_all_padding",
        "beam",
        OTHER_CASES,
    ),
    LongTest(
        "models/test_generation.py::TestBeamSearch::test_generate_returns_the_best_translation",
        "0.6",
        OTHER_CASES,
    ),
    LongTest(
        "models/test_encoder_decoder_lm.py::test_greedy_search_follows_the_largest_logits",
        "marian",
        OTHER_CASES,
    ),
    # Published weights. All families compare logits, which determine the generated texts.
    LongTest(
        "models/pretrained/test_published.py::test_generated_texts_match_transformers",
        "llama$",
        OTHER_CASES,
    ),
    LongTest(
        "models/pretrained/test_published.py::test_translations_match_transformers",
        "marian",
        OTHER_CASES,
    ),
    LongTest(
        "models/pretrained/test_published.py::test_searches_match_transformers",
        "^beams_penalty",
        OTHER_CASES,
    ),
    LongTest(
        "models/test_lora.py::test_recompute_does_not_change_losses", "", "layers/test_recompute.py"
    ),
    LongTest(
        "models/test_freezing.py::test_recompute_does_not_change_losses",
        "",
        "layers/test_recompute.py",
    ),
    # On ranks and meshes.
    LongTest(
        "distributed/test_pipeline.py::test_neighboring_chunks_on_one_stage_match_one_process",
        "",
        "zero-bubble layouts of distributed/test_parity.py, whose placement is such",
    ),
    LongTest("distributed/test_pipeline.py::test_varying_shapes_are_traced_twice", "", "parity"),
    LongTest(
        "distributed/test_pipeline.py::test_frozen_stage_matches_one_process",
        "",
        "models/test_freezing.py",
    ),
    LongTest(
        "trainers/engines/test_mesh.py::test_optimizers_clip_by_the_norms_of_unsharded_gradients",
        "",
        "sgd and lamb of distributed/test_parity.py, which clip on meshes",
    ),
    LongTest(
        "trainers/engines/test_mesh.py::test_batches_that_the_data_axis_does_not_divide",
        "",
        "untied of distributed/test_parity.py, whose batches come in two shapes",
    ),
    LongTest(
        "trainers/engines/test_mesh.py::test_deep_networks_warn_about_pipeline_chunks_before_compilation",
        "",
        "layers/test_placement.py::test_chunks_of_a_single_stage_minimize_compile_time",
    ),
    LongTest(
        "models/test_freezing.py::test_gradients_of_frozen_weights_are_not_reduced",
        "",
        "planner/test_plan.py::test_frozen_weights_have_no_gradients_and_states",
    ),
    LongTest(
        "parallel/pipeline_parallel/test_shared_chunks.py::test_shared_chunks_are_compiled_once",
        "",
        "parallel/test_shared_blocks.py::test_only_one_block_is_traced_at_any_depth",
    ),
    LongTest(
        "parallel/context_parallel/test_communication.py::test_sent_elements_match_the_formula",
        "",
        "planner/test_formulas.py; layers/test_context_attention.py",
    ),
    LongTest(
        "trainers/engines/test_mesh.py::test_dropout_losses_on_a_mesh_match_one_process",
        "",
        "parallel/tensor_parallel/test_dropout.py",
    ),
    LongTest(
        "trainers/engines/test_mesh.py::test_weights_are_excluded_from_decay_by_name_or_variable",
        "",
        "sgd of distributed/test_parity.py",
    ),
    LongTest(
        "parallel/context_parallel/test_training.py::test_recompute_repeats_the_dropout_masks",
        "",
        "layers/test_recompute.py, and the layouts of long networks of distributed/test_parity.py",
    ),
    LongTest(
        "models/pretrained/test_published.py::test_models_loaded_onto_a_mesh_match_transformers",
        "",
        "models/pretrained/test_loading.py::test_mesh_loads_only_local_shards",
    ),
    LongTest(
        "models/test_encoder_decoder_lm.py::test_consecutive_searches_on_a_mesh",
        "",
        "searches on meshes of distributed/test_parity.py",
    ),
    LongTest(
        "layers/test_blockwise_attention.py::test_blockwise_training_on_a_mesh_matches_reference",
        "",
        "layers/test_context_attention.py, whose blocks are the same",
    ),
    LongTest(
        "models/test_masked_lm.py::test_both_outputs_on_a_mesh",
        "",
        "bert of distributed/test_parity.py",
    ),
    LongTest(
        "distributed/test_pipeline.py::test_keras_metrics_match_one_process",
        "",
        "keras_fit:tokens of distributed/test_keras_fit.py, whose pipeline has metrics",
    ),
    LongTest(
        "distributed/test_language_model.py::test_language_model_loss_decreases",
        "",
        "models/test_causal_lm.py::test_learns_to_count",
    ),
    LongTest(
        "distributed/test_keras_models.py::test_embedding_with_sparse_gradients_trains_under_xla",
        "",
        "trainers/test_xla.py; test_texts",
    ),
    LongTest(
        "distributed/test_host_waits.py::test_mesh_steps_read_only_scalars_on_the_host",
        "",
        "test_data_parallel_steps_read_nothing_on_the_host; "
        "a mesh of ranks in distributed/test_clusters.py",
    ),
    LongTest(
        "models/test_lora.py::test_adapter_communication_matches_the_formula",
        "",
        "planner/test_formulas.py; parallel/tensor_parallel/test_communication.py",
    ),
    LongTest(
        "runs/test_embedding.py::test_losses_on_a_mesh_match_one_device",
        "",
        "runs/test_predict.py::test_vectors_are_pooled_and_normalized_as_in_training",
    ),
    LongTest(
        "trainers/engines/test_mesh.py::test_micro_batches_on_a_mesh",
        "",
        "layouts with micro-batches of distributed/test_parity.py",
    ),
    LongTest(
        "parallel/tensor_parallel/test_rules.py::test_docs_patterns_match_one_device_on_a_mesh",
        "",
        "test_shard_method_overrides_rules_of_one_layer",
    ),
    # Networks.
    LongTest("models/test_causal_lm.py::test_learns_to_count", "float32", POLICIES),
    LongTest("models/test_presets.py::test_rounded_number_of_parameters", "1t|base", OTHER_CASES),
    # Training.
    LongTest(
        "trainers/engines/test_accumulation.py::test_micro_batches_match_full_batches",
        "2-options0",
        OTHER_CASES,
    ),
    LongTest(
        "trainers/test_expert_load.py::test_recompute_does_not_change_the_expert_load",
        "",
        "layers/test_recompute.py",
    ),
    LongTest(
        "trainers/test_by_hand.py::TestEquivalentRuns::test_fit_matches_numpy",
        "steps_per_execution",
        OTHER_CASES,
    ),
    LongTest(
        "trainers/checkpoint/test_preemption.py::test_interrupted_run_resumes_identically",
        "8-15",
        OTHER_CASES,
    ),
    # Slow tests of promises that have two tests.
    LongTest(
        "cli/test_generate.py::test_generate_passes_search_options", "", "models/test_generation.py"
    ),
    LongTest(
        "cli/test_generate.py::test_stream_prints_the_same_text", "", "models/test_continuation.py"
    ),
    LongTest(
        "runs/test_folder.py::test_export_command_writes_the_weights_of_the_run",
        "",
        "cli/test_cli.py::test_weights_of_a_checkpoint_are_exported",
    ),
    LongTest(
        "runs/test_folder.py::test_files_of_another_run_are_rejected",
        "run.json|weights|flipped|cut|numbers",
        OTHER_CASES,
    ),
    LongTest(
        "cli/launching/test_launch.py::test_restarts_a_failed_command",
        "",
        "cli/launching/test_plans.py",
    ),
    LongTest(
        "models/test_continuation.py::test_num_return_sequences_gives_distinct_texts",
        "",
        "models/test_generation.py",
    ),
    LongTest(
        "models/test_continuation.py::test_end_token_equal_to_padding_is_generated",
        "",
        "models/test_generation.py, of encoder–decoders",
    ),
    LongTest(
        "models/test_generation.py::TestGreedy::test_default_length_depends_on_the_source_and_the_positions",
        "",
        "models/test_presets.py; the command line's translations",
    ),
    LongTest(
        "models/test_generation.py::TestBeamSearch::test_length_penalty_prefers_longer_translations",
        "",
        "test_wide_beam_finds_all_translations, whose scores have the penalty",
    ),
    LongTest(
        "layers/test_blockwise_attention.py::test_blockwise_matches_reference_in_a_function",
        "",
        "test_blockwise_matches_reference",
    ),
    LongTest(
        "layers/test_recompute.py::test_predict_and_evaluate_are_unchanged",
        "",
        "layouts with recompute of distributed/test_parity.py",
    ),
    LongTest(
        "trainers/test_expert_load.py::test_micro_batches_do_not_change_the_expert_load",
        "",
        "experts in micro-batches of distributed/test_parity.py",
    ),
]


def _read_table():
    """Return the rows of `long_tests.tsv`."""
    with open(pathlib.Path(__file__).with_suffix(".tsv"), encoding="utf-8") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [
            LongTest(
                row["test"],
                row["quick_cases"],
                row["quick_test_of_the_same_promise"] or OTHER_CASES,
            )
            for row in rows
        ]


LONG_TESTS += _read_table()


def is_long(nodeid):
    """Return whether a test belongs to the long suite, by its id in pytest."""
    name, _, case = nodeid.removeprefix("tests/").partition("[")
    pattern = _QUICK_CASES.get(name)
    return pattern is not None and not (pattern and re.search(pattern, case.removesuffix("]")))


_QUICK_CASES = {row.test: row.quick_cases for row in LONG_TESTS}
