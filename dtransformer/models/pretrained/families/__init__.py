"""Model families of `transformers`: how their config keys and weight names map to networks."""

import dataclasses

from dtransformer.models.pretrained.families import llama
from dtransformer.models.pretrained.families.apertus import APERTUS
from dtransformer.models.pretrained.families.bart import BART, M2M_100, MARIAN, MBART, PEGASUS
from dtransformer.models.pretrained.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from dtransformer.models.pretrained.families.encoders import BERT, DISTILBERT, MODERNBERT, ROBERTA
from dtransformer.models.pretrained.families.experts import MIXTRAL, QWEN3_MOE
from dtransformer.models.pretrained.families.family import Family
from dtransformer.models.pretrained.families.gemma import GEMMA, GEMMA2, GEMMA3
from dtransformer.models.pretrained.families.glm import GLM, GLM4, GLM4_MOE
from dtransformer.models.pretrained.families.gpt2 import GPT2, OPT
from dtransformer.models.pretrained.families.gpt_oss import GPT_OSS
from dtransformer.models.pretrained.families.olmo import EXAONE4, OLMO2, OLMO3, OLMOE
from dtransformer.models.pretrained.families.parallel import COHERE, COHERE2, FALCON, GPT_NEOX, PHI
from dtransformer.models.pretrained.families.t5 import MT5, T5

# `model_type` in a config -> family.
FAMILIES: dict[str, Family] = {
    "gpt2": GPT2,
    "opt": OPT,
    "llama": llama.LLAMA,
    "mistral": llama.MISTRAL,
    "ministral3": llama.MINISTRAL3,
    "mixtral": MIXTRAL,
    "qwen2": llama.QWEN2,
    "qwen3": llama.QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "phi3": llama.PHI3,
    "starcoder2": llama.STARCODER2,
    "stablelm": llama.STABLELM,
    "seed_oss": llama.SEED_OSS,
    "smollm3": llama.SMOLLM3,
    "granite": llama.GRANITE,
    "hunyuan_v1_dense": llama.HUNYUAN,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gpt_neox": GPT_NEOX,
    "phi": PHI,
    "falcon": FALCON,
    "cohere": COHERE,
    "cohere2": COHERE2,
    "apertus": APERTUS,
    "arcee": llama.ARCEE,
    "nemotron": llama.NEMOTRON,
    "helium": llama.HELIUM,
    "ernie4_5": llama.ERNIE4_5,
    "exaone4": EXAONE4,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "olmoe": OLMOE,
    "glm": GLM,
    "glm4": GLM4,
    "glm4_moe": GLM4_MOE,
    "gpt_oss": GPT_OSS,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "bert": BERT,
    "distilbert": DISTILBERT,
    "modernbert": MODERNBERT,
    "roberta": ROBERTA,
    "xlm-roberta": dataclasses.replace(ROBERTA, architecture="XLMRobertaForMaskedLM"),
    "camembert": dataclasses.replace(ROBERTA, architecture="CamembertForMaskedLM"),
    "mbart": MBART,
    "pegasus": PEGASUS,
    "m2m_100": M2M_100,
    "mt5": MT5,
    "bart": BART,
    "marian": MARIAN,
    "t5": T5,
}
