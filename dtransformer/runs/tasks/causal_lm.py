"""Language modelling: each token of a document from those before it."""

from dtransformer.datasets.language_model import LanguageModelBatches
from dtransformer.models import CausalLM, TextGenerator
from dtransformer.runs.callbacks import Samples
from dtransformer.runs.networks import special_ids
from dtransformer.runs.tasks.documents import DocumentTask, with_perplexity


class LanguageModel(DocumentTask):
    """A decoder that goes on with texts (Radford et al., 2019)."""

    kind, batches_of = CausalLM, LanguageModelBatches

    def arguments(self) -> dict:
        return special_ids(self.tokenizer)

    def callbacks(self, trainer) -> list:
        options = self.config.evaluation
        if not options.samples:
            return []
        generate = TextGenerator(self.network, self.tokenizer, options.max_new_tokens)
        return [Samples(generate, options.samples)]

    def results(self, trainer, batches) -> dict[str, float]:
        return with_perplexity(super().results(trainer, batches))


TASK = LanguageModel
