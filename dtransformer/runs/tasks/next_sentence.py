"""Next-sentence prediction with masked tokens, as BERT was trained."""

from dtransformer.datasets.next_sentences import NextSentenceBatches
from dtransformer.errors import InputError
from dtransformer.runs.tasks.masked_lm import MaskedLanguageModel


class NextSentence(MaskedLanguageModel):
    """Task that predicts masked tokens and whether a second text follows the first."""

    batches_of = NextSentenceBatches

    def arguments(self) -> dict:
        return {**super().arguments(), "next_sentence": True}

    def make_network(self, precision: str | None = None):
        network = super().make_network(precision)
        if network.sentence_head is None:
            raise InputError(
                "The model has no next-sentence head, but task next_sentence trains one. Use task "
                "masked_lm, or a model with this head."
            )
        return network

    def loss(self):
        return {name: self.cross_entropy() for name in ("masked_lm", "next_sentence")}


TASK = NextSentence
