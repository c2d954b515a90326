"""Evaluate a run or a published folder with EleutherAI's lm-evaluation-harness.

    import lm_eval
    from dtransformer.runs.lm_eval import harness_model

    lm_eval.simple_evaluate(model=harness_model("runs/mine"), tasks=["lambada_openai"])

On several ranks all of them run the same program. Each rank computes a part of the requests, and
every rank receives all results. The package `lm_eval` is imported when a model is created.

Reference: Gao et al., 2024, "The language model evaluation harness", Zenodo 12608602.
"""

import importlib
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dtransformer.errors import InputError, check_installed
from dtransformer.layers.preference import SequenceLogProbability
from dtransformer.models import TextGenerator
from dtransformer.models.generation.text_generator import ids_to_lists
from dtransformer.parallel.collectives.objects import on_all
from dtransformer.parallel.runtime import job
from dtransformer.runs.loading import opened

_LENGTH_MULTIPLE = (
    64  # Rows are padded to a multiple of 64 tokens, so that few lengths are compiled.
)
_SAMPLING_OPTIONS = ("temperature", "top_p", "top_k")  # sampling options of requests


class _HarnessMethods:
    """The three methods of `lm_eval.api.model.LM` for a network and its tokenizer.

    Data ranks divide the requests, so all ranks must call the methods with the same requests.
    """

    def __init__(self, network, tokenizer, batch_size, max_length):
        super().__init__()
        self._network = network
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        self._max_length = max_length
        self._sums = SequenceLogProbability(network.vocab_size)
        self._compiled = tf.function(self._scores)

    def loglikelihood(self, requests: Sequence) -> list[tuple[float, bool]]:
        """Return a (log p, is_greedy) pair for each (context, continuation) request.

        log p is the log probability of the continuation. `is_greedy` is true if each of its tokens is
        the most probable next token.
        """

        def compute(local_requests):
            return self._score([self._pair(*request.args) for request in local_requests])

        # The exchange between ranks turns tuples into lists.
        return [(total, is_greedy) for total, is_greedy in _divide(compute, requests)]

    def loglikelihood_rolling(self, requests: Sequence) -> list[float]:
        """Return the log probability of each text.

        Long texts are scored in windows of `max_length` tokens. Each token counts once.
        """
        return _divide(self._score_windows, requests)

    def _score_windows(self, requests):
        rows = []
        owners = []
        for owner, request in enumerate(requests):
            (text,) = request.args
            max_length = self._max_length
            (ids,) = ids_to_lists(self._tokenizer.encode([text]))
            tokens = [self._start_token(), *ids]
            for start in range(0, len(ids), max_length):
                end = min(start + max_length, len(ids))
                rows.append((tokens[max(0, end - max_length) : end + 1], end - start))
                owners.append(owner)
        totals = np.zeros(len(requests))
        np.add.at(totals, owners, [total for total, _ in self._score(rows)])
        return totals.tolist()

    def generate_until(self, requests: Sequence) -> list[str]:
        """Return the continuation of each context, up to the first of its "until" texts.

        Long contexts are truncated from the left, so that the new tokens fit into `max_length`.
        """
        return _divide(self._generate, requests)

    def _generate(self, requests):
        texts = []
        for context, options in (request.args for request in requests):
            max_new_tokens = options.get("max_gen_toks", options.get("max_new_tokens", 256))
            sampling = {key: options[key] for key in _SAMPLING_OPTIONS if key in options}
            if not options.get("do_sample", bool(sampling.get("temperature"))):
                sampling = {}
            sampling["max_source_length"] = max(self._max_length - max_new_tokens, 1)
            (text,) = TextGenerator(self._network, self._tokenizer, max_new_tokens, **sampling)(
                [context]
            )
            stops = options.get("until") or []
            stops = [stops] if isinstance(stops, str) else stops
            texts.append(re.split("|".join(map(re.escape, stops)), text)[0] if stops else text)
        return texts

    def _start_token(self):
        start = self._network.start_id
        return self._network.end_id if start is None else start

    def _pair(self, context, continuation):
        """Return the ids of a context with its continuation, and the number of continuation ids."""
        spaces = context[len(context.rstrip()) :]  # Tokens of words include the space before them.
        context = context.rstrip()
        continuation = spaces + continuation
        full_ids, context_ids = self._prompts([context + continuation, context])
        if not context:
            (full_ids,) = ids_to_lists(self._tokenizer.encode([continuation]))
            context_ids = [self._start_token()]
            full_ids = [*context_ids, *full_ids]
        count = min(len(full_ids) - len(context_ids), self._max_length)
        return full_ids[-(self._max_length + 1) :], count

    def _prompts(self, texts):
        """Return the ids of texts, with the start tokens that the network was trained with."""
        if hasattr(self._tokenizer, "encode_prompts"):
            return ids_to_lists(self._tokenizer.encode_prompts(texts))
        return [[self._start_token(), *row] for row in ids_to_lists(self._tokenizer.encode(texts))]

    def _score(self, rows):
        """Return a (log p, is_greedy) pair for each row.

        Args:
            rows: List of (ids, count) pairs. The last `count` ids of a row are scored.
        """
        order = sorted(range(len(rows)), key=lambda x: -len(rows[x][0]))
        results = [None] * len(rows)
        for start in range(0, len(rows), self._batch_size):
            batch = order[start : start + self._batch_size]
            length = len(rows[batch[0]][0]) - 1
            shape = self._batch_size, min(length + -length % _LENGTH_MULTIPLE, self._max_length)
            tokens = np.zeros(shape, np.int32)
            segments = np.zeros(shape, np.int32)
            labels = np.full(shape, -100, np.int32)
            for row, index in enumerate(batch):
                ids, count = rows[index]
                size = len(ids) - 1
                tokens[row, :size] = ids[:-1]
                segments[row, :size] = 1
                labels[row, size - count : size] = ids[len(ids) - count :]
            totals, are_likeliest = self._compiled(tokens, segments, labels)
            for index, total, is_likeliest in zip(batch, totals.numpy(), are_likeliest.numpy()):
                results[index] = float(total), bool(is_likeliest)
        return results

    def _scores(self, tokens, segments, labels):
        logits = self._network({"tokens": tokens, "segments": segments}, training=False)
        likeliest = tf.argmax(logits[..., : self._network.vocab_size], -1, "int32")
        return self._sums(logits, labels), tf.reduce_all((likeliest == labels) | (labels < 0), 1)


def _divide(compute, requests):
    """Return the results of all requests, of which each rank computes an equal part.

    Args:
        compute: Function from a list of requests to a list of results.
        requests: List of requests, identical on all ranks.
    """
    size = job.size()
    parts = on_all(lambda: compute(requests[job.rank() :: size]), "lm_eval")
    results = [None] * len(requests)
    for rank, part in enumerate(parts):
        results[rank::size] = part
    return results


def harness_model(
    folder: str | os.PathLike,
    precision: str = "float32",
    batch_size: int = 8,
    max_length: int | None = None,
) -> Any:
    """Return a model for `lm_eval.simple_evaluate`, an `lm_eval.api.model.LM`.

    Texts with a context begin with the special tokens that the tokenizer adds. Texts without a
    context and rolling windows begin with the network's start token, or with its end token if it has
    no start token.

    Args:
        folder: Path of a run folder or a published folder.
        precision: Name of the dtype policy to compute in. Defaults to `"float32"`.
        batch_size: Integer. Rows per batch. Defaults to 8.
        max_length: Integer. Maximum tokens per row. Defaults to the number of learned positions, or
            to 2,048 without learned positions. Larger values are reduced to this default.

    Raises:
        InputError: If `lm_eval` is not installed, the layout has other ranks than data ranks, or the
            folder is unusable.
    """
    check_installed("lm_eval", "Evaluations with the harness")
    if job.mesh() is not None or job.data_shard()[1] != job.size():
        raise InputError(
            "The harness runs on data ranks with one device each, but the layout divides the network. "
            "Remove all degrees except `data_parallel`."
        )
    base = importlib.import_module("lm_eval.api.model").LM
    tokenizer, network = opened(folder, precision)
    default_length = network.arguments.get("max_length") or 2048
    model_class = type("HarnessModel", (_HarnessMethods, base), {})
    return model_class(
        network, tokenizer, batch_size, min(max_length or default_length, default_length)
    )
