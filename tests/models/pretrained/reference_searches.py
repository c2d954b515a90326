"""What `transformers` finds by each search, and what its rules make of logits."""

import numpy as np
import torch
import transformers

from tests.models.pretrained.reference_kinds import END, NEW_TOKENS, PROMPTS, VOCAB_SIZE
from tests.models.pretrained.search_cases import RULES, SEARCHES, THEIRS


def results_of_searches(model) -> dict:
    """Return the results of each search for each prompt by itself, the best first."""
    found = {}
    for name, options in SEARCHES.items():
        theirs = {THEIRS.get(key, key): x for key, x in options.items()}
        theirs = {"num_beams": 1, "eos_token_id": [END], **theirs}
        for number, prompt in enumerate(PROMPTS):
            ids = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                length_penalty=0.0,
                pad_token_id=END,
                **theirs,
            )
            found[f"{name}_{number}"] = ids[:, len(prompt) :].numpy()
    return found


def save_rules(path) -> None:
    """Save random logits and texts, and what the rules make of them."""
    torch.manual_seed(0)
    logits, texts = 2 * torch.randn(4, VOCAB_SIZE), torch.randint(0, 4, (4, 12))
    found = {"logits": logits.numpy(), "texts": texts.numpy()}
    for name, values in RULES.items():
        for value in values:
            rule = getattr(transformers.generation, name)(value)
            found[f"{name}_{value}"] = rule(texts, logits.clone()).numpy()
    np.savez(path, **found)
