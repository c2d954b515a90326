"""Span corruption: spans of a document that are missing, which T5 is trained on."""

from dtransformer.datasets.span_corruption import SpanCorruptionBatches, span_counts, text_length
from dtransformer.models import EncoderDecoderLM
from dtransformer.runs.tasks.documents import DocumentTask


class SpanCorruption(DocumentTask):
    """An encoder–decoder that fills in what is missing (Raffel et al., 2020)."""

    kind, batches_of = EncoderDecoderLM, SpanCorruptionBatches

    def options_of_batches(self) -> dict:
        options = self.config.data
        return {"rate": options.mask_rate, "mean_span": options.mean_span}

    def vocab_size(self) -> int:
        """Return the number of ids with those of the sentinels, which stand for spans."""
        options = self.config.data
        spans = options.mask_rate, options.mean_span
        text = text_length(options.length, *spans, int(self.tokenizer.end_id is not None))
        return self.tokenizer.vocab_size + span_counts(text, *spans)[1]


TASK = SpanCorruption
