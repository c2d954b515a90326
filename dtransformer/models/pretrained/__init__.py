"""Published weights: folders as Hugging Face's `transformers` writes them, in and out."""

from dtransformer.models.pretrained.load import from_pretrained
from dtransformer.models.pretrained.save import save_pretrained

__all__ = ["from_pretrained", "save_pretrained"]
