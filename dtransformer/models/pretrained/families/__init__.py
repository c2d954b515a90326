"""The families of published models, a file for each: what their configs say, where weights lie."""

from dtransformer.models.pretrained.families.bart import BART, MARIAN
from dtransformer.models.pretrained.families.bert import BERT, ROBERTA
from dtransformer.models.pretrained.families.family import Family
from dtransformer.models.pretrained.families.gpt2 import GPT2
from dtransformer.models.pretrained.families.llama import LLAMA, MISTRAL, QWEN2
from dtransformer.models.pretrained.families.mixtral import MIXTRAL
from dtransformer.models.pretrained.families.t5 import T5

# The `model_type` of a config -> the family.
FAMILIES: dict[str, Family] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "bert": BERT,
    "roberta": ROBERTA,
    "bart": BART,
    "marian": MARIAN,
    "t5": T5,
}
