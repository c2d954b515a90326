"""Masked language modelling: predict masked tokens from the tokens around them."""

from dtransformer.datasets.masked_language_model import MaskedLanguageModelBatches, num_positions
from dtransformer.models import MaskedLM
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.runs.config import RunConfig
from dtransformer.runs.tasks.documents import DocumentTask


class MaskedLanguageModel(DocumentTask):
    """Task that trains an encoder to predict masked tokens (Liu et al., 2019, "RoBERTa")."""

    kind = MaskedLM
    batches_of = MaskedLanguageModelBatches
    command = "evaluate --run {} --data FILE"

    def get_batch_options(self) -> dict:
        options = self.config.data
        return {
            "rate": options.mask_rate,
            "all_positions": options.all_positions,
            "pad_positions_to_multiple_of": get_parallel_config().context_parallel,
        }

    @staticmethod
    def predicted_positions(config: RunConfig) -> int | None:
        options = config.data
        return None if options.all_positions else num_positions(options.length, options.mask_rate)

    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size + (self.tokenizer.mask_id is None)


TASK = MaskedLanguageModel
