"""Masked language modelling: predict masked tokens from the tokens around them."""

from dtransformer.datasets.masked_language_model import MaskedLanguageModelBatches
from dtransformer.models import MaskedLM
from dtransformer.runs.tasks.documents import DocumentTask


class MaskedLanguageModel(DocumentTask):
    """Task that trains an encoder to predict masked tokens (Liu et al., 2019, "RoBERTa")."""

    kind = MaskedLM
    batches_of = MaskedLanguageModelBatches
    command = "evaluate --run {} --data FILE"

    def get_batch_options(self) -> dict:
        return {"rate": self.config.data.mask_rate}

    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size + (self.tokenizer.mask_id is None)


TASK = MaskedLanguageModel
