"""Span corruption: predict missing spans of documents, as T5 was trained."""

from dtransformer.datasets.span_corruption import SpanCorruptionBatches, span_counts, text_length
from dtransformer.models import EncoderDecoderLM
from dtransformer.runs.tasks.documents import DocumentTask


class SpanCorruption(DocumentTask):
    """Task that trains an encoder–decoder to predict missing spans (Raffel et al., 2020)."""

    kind = EncoderDecoderLM
    batches_of = SpanCorruptionBatches

    def get_batch_options(self) -> dict:
        options = self.config.data
        return {"rate": options.mask_rate, "mean_span": options.mean_span}

    def vocab_size(self) -> int:
        """Return the vocabulary size of the tokenizer plus one sentinel id per span of a row."""
        options = self.config.data
        spans = options.mask_rate, options.mean_span
        text = text_length(options.length, *spans, int(self.tokenizer.end_id is not None))
        return self.tokenizer.vocab_size + span_counts(text, *spans)[1]


TASK = SpanCorruption
