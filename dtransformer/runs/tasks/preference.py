"""Preference: train on pairs of a chosen and a rejected answer (DPO, IPO, SimPO, ORPO)."""

import sys
from collections.abc import Callable

import keras

from dtransformer.datasets.chat_records import Rendered, conversation
from dtransformer.datasets.record_batches import group_row
from dtransformer.datasets.records import get_preference
from dtransformer.datasets.tool_calls import get_tools
from dtransformer.layers.preference import PreferenceLoss, SequenceLogProbability, margins
from dtransformer.models import CausalLM
from dtransformer.parallel.runtime import job
from dtransformer.preference_losses import MEAN_LOSSES, REFERENCE_LOSSES
from dtransformer.runs.tasks.chat import ChatRecords


class PairTask(ChatRecords):
    """Base of tasks with two sequences per record, such as a chosen and a rejected answer.

    Attributes:
        with_labels: Whether the inputs contain the labels of both sequences.
    """

    with_labels = True
    num_sequences = 2

    def encode(self, records):
        texts = []
        places = []
        for place, record in records:
            prompt, *answers = get_preference(record, place)
            for answer in answers:
                texts.append(self.render_answer(prompt, answer, place, record))
                places.append(place)
        rows = self.encode_rendered(texts, places)
        pairs = list(zip(rows[::2], rows[1::2]))
        return pairs, [self.target(record, place) for place, record in records]

    def render_answer(self, prompt, answer, place, record) -> Rendered:
        """Return a prompt and its answer as text; only the answer has labels."""
        if isinstance(prompt, str):
            text = prompt + answer
            return Rendered(text, [(len(prompt), len(text))], True)
        before = [{**turn, "train": False} for turn in prompt]
        turns = [*before, *answer]
        return conversation(turns, self.template, "assistant", place, get_tools(record, place))

    def target(self, record, place) -> list[float]:
        """Return the two targets of a record for the loss."""
        return [0.0, 0.0]

    def mean_metrics(self, *functions: Callable) -> dict:
        """Return the metrics with the means of functions over all rows, under their names.

        Args:
            *functions: Functions of the targets and scores that return a tensor [b].
        """
        means = [keras.metrics.MeanMetricWrapper(fn, name=fn.__name__) for fn in functions]
        return {"weighted_metrics": means}

    def build_row(self, *args) -> tuple:
        return group_row(*args, with_labels=self.with_labels)


class Preference(PairTask):
    """Task for preference optimization without reinforcement learning (Rafailov et al., 2023).

    The reference model is the initial network. Its log probabilities of all answers are computed once
    before the first step, so no second network stays in memory. Some losses need no reference.
    """

    def scores(self, core: CausalLM) -> SequenceLogProbability:
        is_mean = self.config.training.loss in MEAN_LOSSES
        return SequenceLogProbability(core.vocab_size, is_mean, name="scores")

    def before_training(self, trainer: keras.Model) -> None:
        options = self.config.training
        if options.reference_free or options.loss not in REFERENCE_LOSSES:
            return
        for name, records in self.records.items():
            job.print_once(f"Reference ({name}): {len(records):,} pairs", sys.stderr)
            records.targets = self.predictions(trainer, name)

    def loss(self) -> PreferenceLoss:
        options = self.config.training
        return PreferenceLoss(options.loss, options.beta, options.smoothing, options.simpo_gamma)

    def metrics(self) -> dict:
        beta = self.config.training.beta

        def accuracy(reference, log_p):
            return keras.ops.cast(margins(reference, log_p) > 0, "float32")

        def margin(reference, log_p):
            return beta * margins(reference, log_p)

        def chosen_reward(reference, log_p):
            return beta * (log_p - reference)[:, 0]

        def rejected_reward(reference, log_p):
            return beta * (log_p - reference)[:, 1]

        return self.mean_metrics(accuracy, margin, chosen_reward, rejected_reward)


TASK = Preference
