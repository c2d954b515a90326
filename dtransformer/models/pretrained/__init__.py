"""Load and save model folders in the format of Hugging Face `transformers`."""

from dtransformer.models.pretrained.load import from_pretrained
from dtransformer.models.pretrained.save import save_pretrained

__all__ = ["from_pretrained", "save_pretrained"]
