"""Results of searches and logits rules of `transformers`."""

import numpy as np
import torch
import transformers

from tests.models.pretrained.reference_kinds import END, NEW_TOKENS, PROMPTS, VOCAB_SIZE
from tests.models.pretrained.search_cases import HF_NAMES, RULES, SEARCHES


def search_results(model) -> dict:
    """Return the results of each search for each single prompt, best first."""
    results = {}
    for name, options in SEARCHES.items():
        hf_options = {HF_NAMES.get(key, key): x for key, x in options.items()}
        hf_options = {"num_beams": 1, "eos_token_id": [END], **hf_options}
        for index, prompt in enumerate(PROMPTS):
            ids = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                length_penalty=0.0,
                pad_token_id=END,
                **hf_options,
            )
            results[f"{name}_{index}"] = ids[:, len(prompt) :].numpy()
    return results


def save_rules(path) -> None:
    """Save random logits and texts, and the logits after each rule."""
    torch.manual_seed(0)
    logits, texts = 2 * torch.randn(4, VOCAB_SIZE), torch.randint(0, 4, (4, 12))
    arrays = {"logits": logits.numpy(), "texts": texts.numpy()}
    for name, values in RULES.items():
        for value in values:
            rule = getattr(transformers.generation, name)(value)
            arrays[f"{name}_{value}"] = rule(texts, logits.clone()).numpy()
    np.savez(path, **arrays)
