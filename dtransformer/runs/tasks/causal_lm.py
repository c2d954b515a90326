"""Language modelling: predict each token of a document from the previous tokens."""

from typing import Any

import keras

from dtransformer.datasets.language_model import LanguageModelBatches
from dtransformer.models import CausalLM
from dtransformer.runs.scores import perplexities
from dtransformer.runs.tasks.documents import DocumentTask


class LanguageModel(DocumentTask):
    """Task that trains a decoder to continue texts (Radford et al., 2019)."""

    kind = CausalLM
    batches_of = LanguageModelBatches

    def results(self, trainer: keras.Model, batches: Any) -> dict[str, float]:
        results = super().results(trainer, batches)
        shards = self.shards["dev"]
        # The first token of a document is predicted only if a start token precedes it.
        num_skipped = int(shards.special_ids.get("start") is None)
        num_ends = (shards.special_ids.get("end") is not None) * shards.num_documents
        num_tokens = shards.num_tokens - num_skipped * shards.num_documents + num_ends
        spans = (ids[num_skipped:] for ids in shards)
        return {**results, **perplexities(results["loss"], spans, num_tokens, self.tokenizer)}


TASK = LanguageModel
