"""Searches and logits rules to compare with `transformers`, with our names of the options."""

SEARCHED = "llama"  # The model that runs the searches.
SEARCHES = {
    "penalty": {"repetition_penalty": 1.7},
    "ngrams": {"no_repeat_ngram_size": 2},
    "both": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    "stops": {"stop_ids": [2, 17, 30, 41]},
    "beams": {"beam_size": 4, "num_return_sequences": 3},
    "early": {"beam_size": 3, "early_stopping": True, "num_return_sequences": 2},
    "beams_penalty": {"beam_size": 3, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "beams_stops": {"beam_size": 3, "stop_ids": [2, 17, 30, 41]},
    "min_tokens": {"min_new_tokens": 9},
    "beams_min_tokens": {"beam_size": 3, "min_new_tokens": 9},
    "suppressed": {"suppressed_ids": [*range(20, 50)], "suppressed_first_ids": [*range(3, 13)]},
    "last": {"last_ids": [7, 8], "stop_ids": [2]},
    "beams_last": {"beam_size": 3, "last_ids": [17], "suppressed_ids": [*range(20, 50)]},
}
# Names of the options in `transformers`.
HF_NAMES = {
    "beam_size": "num_beams",
    "stop_ids": "eos_token_id",
    "last_ids": "forced_eos_token_id",
    "suppressed_ids": "suppress_tokens",
    "suppressed_first_ids": "begin_suppress_tokens",
}
# Fields of the generation config of an encoder-decoder.
FOLDER_RULES = {
    "forced_bos_token_id": 9,
    "forced_eos_token_id": 2,
    "min_length": 8,
    "suppress_tokens": [11, 12, 13, 14],
    "begin_suppress_tokens": [*range(15, 45)],
    "bad_words_ids": [[46], [47], [3]],
}
# Rules of `transformers` with the arguments to test on logits [4, 61] and texts [4, 12].
RULES = {
    "RepetitionPenaltyLogitsProcessor": [1.7],
    "NoRepeatNGramLogitsProcessor": [1, 2, 3],
    "TopKLogitsWarper": [1, 7],
    "TopPLogitsWarper": [0.05, 0.5, 0.9],
    "MinPLogitsWarper": [0.01, 0.3],
}
