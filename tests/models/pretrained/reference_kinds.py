"""Inputs, losses and generated texts of `transformers` for each kind of model.

Inputs, outputs and labels have the names that our networks use. Labels of -100 are ignored.
"""

import numpy as np
import torch

from tests.models.pretrained.search_cases import FOLDER_RULES

PROMPTS = [[5, 9, 33], [7], [40, 41, 42, 43, 44, 45, 46], [8, 8]]
NEW_TOKENS, VOCAB_SIZE, END, PADDING = 20, 61, 2, 3
ROWS, LENGTH = 3, 20


def random_ids(lengths, length=LENGTH):
    """Return padded rows of random tokens with the given lengths."""
    ids = torch.randint(4, VOCAB_SIZE, (len(lengths), length))
    for row, size in enumerate(lengths):
        ids[row, size:] = PADDING
    return ids


def padded_left(model, padding, **other_inputs):
    """Return left-padded inputs with their mask, and the logits of a model for them."""
    ids = torch.randint(4, VOCAB_SIZE, (ROWS, LENGTH))
    mask = torch.ones_like(ids)
    for row, size in enumerate([0, 3, 14]):
        ids[row, :size], mask[row, :size] = padding, 0
    inputs = {"input_ids": ids, "attention_mask": mask, **other_inputs}
    with torch.no_grad():
        outputs = model(**inputs)
    logits = outputs.prediction_logits if "prediction_logits" in outputs else outputs.logits
    return {**{f"padded/{name}": x.numpy() for name, x in inputs.items()}, "padded": logits}


class Texts:
    """Language models, whose labels are the next tokens."""

    learning_rate = 0.5

    def batch(self):
        ids = torch.randint(0, VOCAB_SIZE, (ROWS, LENGTH))
        last = torch.full((ROWS, 1), -100)
        return {"inputs/tokens": ids, "labels/": torch.cat([ids[:, 1:], last], dim=1)}

    def outputs(self, model, batch):
        return {"outputs/": model(batch["inputs/tokens"]).logits}

    def padded(self, model):
        return padded_left(model, END)

    def loss(self, model, batch):
        return model(batch["inputs/tokens"], labels=batch["inputs/tokens"]).loss

    def generate(self, model):
        """Return greedy and three-beam continuations of prompts of different lengths."""
        longest = max(map(len, PROMPTS))
        rows = [[0] * (longest - len(row)) + row for row in PROMPTS]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in PROMPTS]
        inputs = {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}
        options = {"pad_token_id": END, "max_new_tokens": NEW_TOKENS}
        return run_searches(model, inputs, longest, **options)


class Masked:
    """Masked language models of padded sentence pairs. A sixth of the tokens are labels."""

    learning_rate = 0.1

    def __init__(self, num_token_types: int | None = 2, next_sentence=False):
        self.num_token_types, self.next_sentence = num_token_types, next_sentence

    def batch(self):
        ids = random_ids([LENGTH, LENGTH - 3, 5])
        types = (torch.arange(LENGTH) > 3).long() * ((self.num_token_types or 1) - 1)
        is_label = (torch.rand(ids.shape) < 1 / 6) & (ids != PADDING)
        is_label[:, 1] = True
        batch = {
            "inputs/tokens": ids,
            **({"inputs/token_types": types.expand_as(ids)} if self.num_token_types else {}),
            "labels/masked_lm": torch.where(is_label, ids, -100),
            "is_token": ids != PADDING,
        }
        if not self.next_sentence:
            batch["labels/"] = batch.pop("labels/masked_lm")
            return batch
        return {**batch, "labels/next_sentence": torch.tensor([0, 1, 1])}

    def _call(self, model, batch, **labels):
        types = batch.get("inputs/token_types")
        return model(
            batch["inputs/tokens"],
            attention_mask=batch["is_token"].long(),
            **({"token_type_ids": types} if types is not None else {}),
            **labels,
        )

    def outputs(self, model, batch):
        outputs = self._call(model, batch)
        if not self.next_sentence:
            return {"outputs/": outputs.logits}
        return {
            "outputs/masked_lm": outputs.prediction_logits,
            "outputs/next_sentence": outputs.seq_relationship_logits,
        }

    def loss(self, model, batch):
        if not self.next_sentence:
            return self._call(model, batch, labels=batch["labels/"]).loss
        labels = {
            "labels": batch["labels/masked_lm"],
            "next_sentence_label": batch["labels/next_sentence"],
        }
        return self._call(model, batch, **labels).loss

    def padded(self, model):
        if not self.num_token_types:
            return padded_left(model, PADDING)
        types = torch.randint(0, self.num_token_types, (ROWS, LENGTH))
        return padded_left(model, PADDING, token_type_ids=types)

    def generate(self, model):
        return {}


class Pairs:
    """Encoder–decoders with padding on both sides. Targets are `start` and the labels before."""

    learning_rate = 0.1

    def __init__(self, start):
        self.start = start

    def batch(self):
        source = random_ids([LENGTH, LENGTH - 7, 6])
        labels = random_ids([12, 10, 4], length=12)
        first = torch.full((ROWS, 1), self.start)
        return {
            "inputs/source": source,
            "inputs/target": torch.cat([first, labels[:, :-1]], dim=1),
            "labels/": torch.where(labels == PADDING, -100, labels),
            "is_token": labels != PADDING,
        }

    def _call(self, model, batch, **labels):
        source = batch["inputs/source"]
        return model(
            source,
            attention_mask=(source != PADDING).long(),
            decoder_input_ids=batch["inputs/target"],
            **labels,
        )

    def outputs(self, model, batch):
        return {"outputs/": self._call(model, batch).logits}

    def loss(self, model, batch):
        return self._call(model, batch, labels=batch["labels/"]).loss

    def padded(self, model):
        mask = torch.ones((ROWS, 5)).long()
        mask[1, 2:], mask[2, :2] = 0, 0
        target = torch.randint(4, VOCAB_SIZE, (ROWS, 5))
        decoder_inputs = {"decoder_input_ids": target, "decoder_attention_mask": mask}
        return padded_left(model, PADDING, **decoder_inputs)

    def generate(self, model):
        source = self.batch()["inputs/source"]
        inputs = {"input_ids": source, "attention_mask": (source != PADDING).long()}
        forbidden = {PADDING, self.start} - {END}
        options = {"bad_words_ids": [[x] for x in forbidden], "max_new_tokens": NEW_TOKENS}
        ruled = run_searches(model, inputs, 1, max_new_tokens=NEW_TOKENS, **FOLDER_RULES)
        return {
            "generate/source": source,
            **run_searches(model, inputs, 1, **options),
            **{f"ruled_{name}": ids for name, ids in ruled.items()},
        }


def run_searches(model, inputs, start, **options):
    """Return the results of greedy and three-beam search without the first `start` tokens."""
    results = {}
    for beams in (1, 3):
        ids = model.generate(
            **inputs, num_beams=beams, do_sample=False, length_penalty=0.0, **options
        )
        results[f"generated_{beams}"] = np.asarray(ids[:, start:])
    return results
