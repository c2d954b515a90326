"""Presets have the published numbers of parameters, counted without creating weights."""

import pathlib

import pytest
import tensorflow as tf
import yaml

import dtransformer
from dtransformer.architectures import ARCHITECTURES
from dtransformer.models import from_preset
from dtransformer.planner import from_network, get_model

# The numbers are published or counted from the published weights, including position tables.
PUBLISHED = {
    "gpt2_small": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "opt_125m": 125_239_296,
    "opt_1.3b": 1_315_758_080,
    "opt_6.7b": 6_658_473_984,
    "llama_7b": 6_738_415_616,
    "llama_13b": 13_015_864_320,
    "llama_33b": 32_528_943_616,
    "llama_65b": 65_285_660_672,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3.1_8b": 8_030_261_248,
    "llama3.1_70b": 70_553_706_496,
    "llama3.2_1b": 1_235_814_400,
    "llama3.2_3b": 3_212_749_824,
    "mistral_7b": 7_241_732_096,
    "ministral3_8b": 8_489_553_920,
    "mixtral_8x7b": 46_702_792_704,
    "qwen2_0.5b": 494_032_768,
    "qwen2_1.5b": 1_543_714_304,
    "qwen2_7b": 7_615_616_512,
    "qwen2_72b": 72_706_203_648,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3": 671_026_404_352 + 58 * 256,  # The published count excludes routing biases.
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "phi3_mini": 3_821_079_552,
    "phi4": 14_659_507_200,
    "smollm3_3b": 3_075_098_624,
    "gemma_2b": 2_506_172_416,
    "gemma_7b": 8_537_680_896,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    "olmo2_7b": 7_298_617_344,
    "olmo2_13b": 13_716_198_400,
    "gpt_neox_20b": 20_554_567_680,
    "pythia_160m": 162_322_944,
    "pythia_1b": 1_011_781_632,
    "phi_1": 1_418_270_720,
    "phi_2": 2_779_683_840,
    "falcon_7b": 6_921_720_704,
    "cohere_command_r": 34_980_831_232,
    "starcoder2_3b": 3_030_371_328,
    "stablelm_3b": 2_795_443_200,
    "glm4_9b": 9_399_951_360,
    "glm4_9b_0414": 9_400_279_040,
    "distilbert_base": 66_985_530,
    "xlm_roberta_base": 278_295_186,
    "xlm_roberta_large": 560_142_482,
    "modernbert_base": 149_655_232,
    "modernbert_large": 395_881_664,
    "nllb_600m": 615_073_792,
    "nllb_1.3b": 1_370_638_336,
    "bert_base": 110_106_428,
    "bert_large": 336_226_108,
    "roberta_base": 124_697_433,
    "roberta_large": 355_412_057,
    "bart_base": 139_420_416,
    "bart_large": 406_291_456,
    "marian_base": 74_410_496 - 2 * 512 * 512,  # The published files store sinusoidal positions.
    "t5_small": 60_506_624,
    "t5_base": 222_903_552,
    "t5_large": 737_668_096,
    "t5_3b": 2_851_598_336,
    "t5_11b": 11_307_321_344,
    "t5_1.1_small": 76_961_152,
    "t5_1.1_base": 247_577_856,
    "t5_1.1_large": 783_150_080,
    "t5_1.1_xl": 2_849_757_184,
    "t5_1.1_xxl": 11_135_332_352,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name):
    network = from_preset(name)
    assert network.num_parameters() == PUBLISHED[name]
    assert not network.weights
    check_planner(name, network)


def check_planner(name, network):
    """Check the planner's count within 0.1%, as it ignores small tables such as relative positions."""
    assert get_model(name).parameters() == pytest.approx(network.num_parameters(), rel=1e-3)
    assert from_network(network).parameters() == get_model(name).parameters()


# Billions of parameters and the number of printed digits are from table 1 of Narayanan et al., 2021,
# table 3 of Vaswani et al., 2017, and model cards.
ROUNDED = {
    "gpt_1.7b": (1.7, 1),
    "gpt_3.6b": (3.6, 1),
    "gpt_7.5b": (7.5, 1),
    "gpt_18b": (18.4, 1),
    "gpt_22b": (22, 0),
    "gpt_39b": (39.1, 1),
    "gpt_76b": (76.1, 1),
    "gpt_145b": (145.6, 1),
    "gpt_175b": (174.6, 1),
    "gpt_310b": (310.1, 1),
    "gpt_530b": (529.6, 1),
    "gpt_1t": (1008.0, 1),
    "cohere2_command_r7b": (8.03, 2),
    "arcee_4.5b": (4.62, 2),
    "nemotron_mini_4b": (4.19, 2),
    "helium_2b": (2.17, 2),
    "ernie4_5_0.3b": (0.36, 2),
    "exaone4_1.2b": (1.28, 2),
    "transformer_base": (0.063, 3),  # The paper counts 65 M with another vocabulary.
    "transformer_big": (0.214, 3),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_number_of_parameters(name):
    billions, digits = ROUNDED[name]
    network = from_preset(name)
    assert round(network.num_parameters() / 1e9, digits) == billions
    check_planner(name, network)


def test_every_preset_has_a_published_number_of_parameters():
    assert {*PUBLISHED, *ROUNDED} == {*ARCHITECTURES}


def test_arguments_override_a_preset():
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 8, "ffn_hidden_size": 24}
    network = from_preset("llama3_8b", vocab_size=20, start_id=1, end_id=2, **sizes)
    assert network(tf.ones((1, 4), "int32")).shape == (1, 4, 20)
    assert network.arguments["rotary_base"] == 500000.0


def test_unknown_preset_raises_an_error_with_a_suggestion():
    with pytest.raises(ValueError, match="Unknown model 'gpt5': did you mean gpt"):
        from_preset("gpt5")


def test_yaml_tables_have_unique_keys():
    """YAML silently keeps only the last of several equal keys."""
    for path in pathlib.Path(dtransformer.__file__).parent.rglob("*.yaml"):
        nodes = [yaml.compose(path.read_text("utf-8"), Loader=yaml.SafeLoader)]
        while nodes:
            node = nodes.pop()
            if isinstance(node, yaml.MappingNode):
                keys = [key.value for key, _ in node.value]
                assert sorted({*keys}) == sorted(keys), path
                nodes += [value for _, value in node.value]
