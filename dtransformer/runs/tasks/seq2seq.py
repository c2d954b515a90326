"""Sequence to sequence: summaries, translations or answers with any encoder–decoder."""

import numpy as np

from dtransformer.datasets.batch_plan import LengthBuckets
from dtransformer.datasets.batching import SpecialTokenIds, TranslationBatches
from dtransformer.datasets.records import get_text
from dtransformer.models import EncoderDecoderLM
from dtransformer.parallel.runtime import job
from dtransformer.runs.tasks.records import RecordTask


class Seq2Seq(RecordTask):
    """Task that trains an encoder–decoder to map each `prompt` to its `completion`.

    Published tokenizers add their special tokens to both texts.
    """

    kind = EncoderDecoderLM
    num_added = 1

    def texts(self, record, place) -> list[str]:
        prompt, completion = (get_text(record, key, place) for key in ("prompt", "completion"))
        return [self.config.data.prefix + prompt, completion]

    def encode(self, records):
        texts = [text for place, record in records for text in self.texts(record, place)]
        adds = {"add_special_ids": True} if hasattr(self.tokenizer, "encode_prompts") else {}
        rows = self.tokenizer.encode(texts, **adds).to_list()
        pairs = zip(rows[::2], rows[1::2])
        return [((a, [-100] * len(a)), (b, b)) for a, b in pairs], None

    def arguments(self):
        return {"max_length": self.config.data.length + self.num_added, **super().arguments()}

    def build_row(self, *args) -> tuple:
        raise NotImplementedError  # `batches` uses TranslationBatches, which need no rows.

    def batches(self, part: str) -> TranslationBatches | None:
        if part not in self.records:
            return None
        records = self.records[part]
        options = self.config.data
        arguments = self.network.arguments
        special_ids = SpecialTokenIds(
            arguments["pad_id"], arguments["start_id"], arguments["end_id"]
        )
        sides = []
        for side in (0, 1):
            rows = [records.sequence(index, side)[0] for index in range(len(records))]
            sides.append((np.concatenate(rows), np.cumsum([0, *map(len, rows)])))
        return TranslationBatches(
            *sides,
            batch_size=self.config.training.batch_size,
            max_length=options.length,
            buckets=LengthBuckets(
                bounds=8 if part == "train" else 1,
                pad_to_bounds=job.compiles_shapes(),
                pad_to_multiple_of=self.config.parallel.model_parallel,
            ),
            packed_length=options.length + 1 if options.packed else None,
            special_ids=special_ids,
            **self.batch_options(part),
        )

    def loss(self):
        return self.cross_entropy(self.network.arguments["pad_id"])


TASK = Seq2Seq
