"""What is generated here and by `transformers`, by our names of the options."""

SEARCHED = "llama"  # the model that does it
SEARCHES = {
    "penalty": {"repetition_penalty": 1.7},
    "ngrams": {"no_repeat_ngram_size": 2},
    "both": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    "stops": {"stop_ids": [2, 17, 30, 41]},
    "beams": {"beam_size": 4, "num_return_sequences": 3},
    "early": {"beam_size": 3, "early_stopping": True, "num_return_sequences": 2},
    "beams_penalty": {"beam_size": 3, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "beams_stops": {"beam_size": 3, "stop_ids": [2, 17, 30, 41]},
}
# Each on logits [4, 61] and texts [4, 12]: the name in `transformers`, and its arguments.
RULES = {
    "RepetitionPenaltyLogitsProcessor": [1.7],
    "NoRepeatNGramLogitsProcessor": [1, 2, 3],
    "TopKLogitsWarper": [1, 7],
    "TopPLogitsWarper": [0.05, 0.5, 0.9],
    "MinPLogitsWarper": [0.01, 0.3],
}
