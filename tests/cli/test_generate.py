"""The command line continues texts, and wrong input is an error of one line."""

import io
import json
import shutil
import sys

import keras
import pytest
import tokenizers

from dtransformer.cli import main
from dtransformer.datasets import SubwordTokenizer, load_tokenizer
from dtransformer.errors import InputError
from dtransformer.models import (
    CausalLM,
    EncoderDecoderLM,
    add_lora,
    from_pretrained,
    save_lora,
    save_pretrained,
)
from dtransformer.models.generation.text_generator import TextGenerator
from harness.byte_tokenizer import byte_tokenizer
from tests.runs.small_records import LLAMA

PROMPTS = ["The quick", "été é", "dog"]


BART = {
    "hidden_size": 16,
    "num_heads": 4,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "positions": "learned",
    "max_length": 64,
    "position_offset": 2,
    "embedding_norm": True,
    "head_bias": True,
    "trains_head_bias": False,
    "pad_id": 0,
    "start_id": 2,
    "end_id": 2,
}


def save(network, folder, family):
    """Save a network whose texts differ by their prompts."""
    network.build()
    for weight in network.weights:
        weight.assign(weight.numpy() * 4)
    save_pretrained(network, folder, family)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Random Llama with a byte tokenizer, so that characters are generated in parts."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    save(CausalLM(300, **LLAMA), folder, "llama")
    tokenizer = byte_tokenizer(["The quick brown fox jumps over the lazy dog, été."] * 3, 290)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def run(folder, *arguments):
    return main(["generate", "--model", str(folder), "--max-new-tokens", "12", *arguments])


def generator(folder, **options):
    return TextGenerator(from_pretrained(folder), load_tokenizer(folder), 12, **options)


def prompts(*texts):
    return [part for text in texts for part in ("--prompt", text)]


@pytest.fixture
def stdin(monkeypatch):
    def give(text):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    return give


def test_generator_rejects_a_string_instead_of_a_list(folder):
    with pytest.raises(TypeError, match="a list of strings, got the string 'hello'"):
        generator(folder)("hello")


def test_generated_texts_match_the_network(folder):
    """Results do not depend on other prompts, which begin with the start token."""
    tokenizer, model = load_tokenizer(folder), from_pretrained(folder)
    together = generator(folder)(PROMPTS)
    assert len(set(together)) == 3
    for prompt, text in zip(PROMPTS, together, strict=True):
        ids = tokenizer.encode_prompts([prompt]).to_list()
        assert ids[0][0] == 1
        result = model.generate(ids, 12).numpy().tolist()
        assert text == tokenizer.decode(result)[0]
        assert generator(folder, batch_size=1)([prompt]) == [text]


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0, "num_return_sequences": 2}], ids=str)
def test_streamed_parts_join_to_the_texts(folder, options):
    """Each part has complete characters."""
    parts = {}
    tell = lambda index, text: parts.setdefault(index, []).append(text)
    texts = generator(folder, batch_size=2, **options)(PROMPTS, on_text=tell)
    assert len(texts) == 3 * options.get("num_return_sequences", 1)
    assert ["".join(parts[index]) for index in range(len(texts))] == texts
    assert any(len(pieces) > 3 for pieces in parts.values())


def test_generate_reads_prompts_from_options_and_stdin(folder, stdin, capsys):
    expected = generator(folder)(PROMPTS)
    assert run(folder, *prompts(*PROMPTS)) == 0
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)
    stdin("\n".join(PROMPTS) + "\n")
    assert run(folder, "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"prompt": x, "text": y} for x, y in zip(PROMPTS, expected, strict=True)]


def test_stream_prints_the_same_text(folder, capsys):
    expected = [generator(folder)([prompt])[0] for prompt in PROMPTS]
    assert run(folder, *prompts(*PROMPTS), "--stream") == 0
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)


def test_prompt_with_line_ends_can_be_piped(folder, stdin, capsys):
    texts = ["The quick\nbrown", "dog"]
    expected = generator(folder)(texts)
    stdin("The quick\nbrown\n\n\ndog\n")
    assert run(folder, "--json", "--boundary", "blank_line") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"prompt": x, "text": y} for x, y in zip(texts, expected)]


def test_generate_adds_adapters_to_the_weights(folder, tmp_path, capsys):
    network = from_pretrained(folder)
    add_lora(network, rank=2, targets="*attention/*_kernel")
    for weight in network.trainable_variables:
        weight.assign(keras.random.normal(weight.shape, seed=1))
    save_lora(network, tmp_path / "adapters")
    (expected,) = TextGenerator(network, load_tokenizer(folder), 12)(["dog"])
    assert run(folder, *prompts("dog"), "--adapters", str(tmp_path / "adapters")) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    assert run(folder, *prompts("dog"), "--adapters", str(tmp_path / "none")) == 2
    assert "adapter" in capsys.readouterr().err


CHAT = (
    "{{ bos_token }}{% for one in messages %}{% if one.role == 'tool' %}"
    "{{ raise_exception('no tools') }}{% endif %}{{ one.role }}: {{ one.content | trim }}\n"
    "{% endfor %}{% if add_generation_prompt %}dog: {% endif %}"
)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_chat_applies_the_chat_template(folder, tmp_path, capsys, name):
    """The result matches `transformers`, with a single start token."""
    path = tmp_path / "chat"
    shutil.copytree(folder, path)
    with pytest.raises(InputError, match="has no chat template"):
        load_tokenizer(path).chat([])
    config = json.loads((path / "tokenizer_config.json").read_text())
    if name == "tokenizer_config.json":
        (path / name).write_text(json.dumps({**config, "chat_template": CHAT}))
    else:
        (path / name).write_text(CHAT)
    text = "<s>system: The dog.\nuser: fox\ndog: "
    tokenizer = load_tokenizer(path)
    messages = [{"role": "system", "content": "The dog."}, {"role": "user", "content": " fox "}]
    assert tokenizer.chat(messages) == text
    marked = "{% if tools is not none %}tools{% endif %}{% generation %}" + CHAT
    (path / "chat_template.jinja").write_text(marked + "{%- endgeneration %}")
    assert load_tokenizer(path).chat(messages) == text
    assert tokenizer.encode_prompts([text]).to_list()[0].count(1) == 1
    if name == "chat_template.jinja":
        (expected,) = generator(path)([text])
        assert run(path, *prompts(" fox "), "--chat", "--system", "The dog.", "--json") == 0
        assert json.loads(capsys.readouterr().out) == {"prompt": " fox ", "text": expected}
    with pytest.raises(InputError, match="fails for the messages .*: TemplateError: no tools"):
        tokenizer.chat([{"role": "tool", "content": "x"}])


def test_tools_of_a_chat_use_the_template_for_tools(folder, tmp_path, capsys):
    path = tmp_path / "chat"
    shutil.copytree(folder, path)
    named = {"default": CHAT, "tool_use": "{% for t in tools %}{{ t.name }} {% endfor %}" + CHAT}
    templates = [{"name": x, "template": y} for x, y in named.items()]
    config = json.loads((path / "tokenizer_config.json").read_text())
    config = json.dumps({**config, "chat_template": templates})
    (path / "tokenizer_config.json").write_text(config)
    (tmp_path / "tools.json").write_text('[{"name": "fox"}]')
    with_tools = ["--tools", str(tmp_path / "tools.json")]
    for options, text in ((with_tools, "fox <s>user: dog\ndog: "), ([], "<s>user: dog\ndog: ")):
        (expected,) = generator(path)([text])
        assert run(path, *prompts("dog"), "--chat", *options) == 0
        assert capsys.readouterr().out == f"{expected}\n"
    assert run(path, *prompts("dog"), *with_tools) == 2
    assert "--tools requires --chat" in capsys.readouterr().err


def test_generate_passes_search_options(folder, capsys):
    drawn = ["--temperature", "1.5", "--top-p", "0.9", "--top-k", "50", "--min-p", "0.01"]
    several = ["--num-return-sequences", "2", "--repetition-penalty", "1.2", "--seed", "3"]
    assert run(folder, *prompts("The"), *drawn, *several) == 0
    options = {"temperature": 1.5, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 3}
    expected = generator(folder, **options, num_return_sequences=2, repetition_penalty=1.2)(["The"])
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)
    beams = ["--beam-size", "3", "--length-penalty", "1", "--no-repeat-ngram-size", "2"]
    assert run(folder, *prompts("The"), *beams) == 0
    expected = generator(folder, beam_size=3, length_penalty=1.0, no_repeat_ngram_size=2)(["The"])
    assert capsys.readouterr().out == f"{expected[0]}\n"


def test_stop_token_ends_texts(folder, capsys):
    tokenizer, (text,) = load_tokenizer(folder), generator(folder)(["dog"])
    ids = tokenizer.encode([text]).to_list()[0]
    stop = tokenizer.decode([[item] for item in ids if item < 128 + 3])[0]
    assert run(folder, *prompts("dog"), "--stop", stop) == 0
    assert capsys.readouterr().out == text[: text.index(stop) + len(stop)] + "\n"


def test_encoder_decoder_generates_for_sources(folder, tmp_path, capsys):
    """Texts of an encoder–decoder do not contain the prompt."""
    save(EncoderDecoderLM(300, **BART), tmp_path / "bart", "bart")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bart" / name).write_bytes((folder / name).read_bytes())
    model, tokenizer = from_pretrained(tmp_path / "bart"), load_tokenizer(folder)
    expected = []
    for prompt in PROMPTS:
        result = model.generate(tokenizer.encode_prompts([prompt]).to_tensor(), 12)
        expected += tokenizer.decode(result)
    assert len(set(expected)) == 3
    for options in ([], ["--stream"]):
        assert run(tmp_path / "bart", *prompts(*PROMPTS), *options) == 0
        assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "No prompt was given. Add --prompt"),
        (
            ["--prompt", "x", "--temperature", "-1"],
            "temperature should be greater than or equal to 0",
        ),
        (["--prompt", "x", "--temperature", "hot"], "invalid float value: 'hot'"),
        (["--prompt", "x", "--top-p", "0.5"], "`top_p=0.5` only affects sampling"),
        (["--prompt", "x", "--beam-size", "0"], "expected an integer from 1"),
        (["--prompt", "x", "--stop", "two tokens"], "Choose a text that is a single token"),
        (["--prompt", "x", "--stream", "--json"], "--stream prints one text per prompt"),
        (
            ["--prompt", "x", "--stream", "--beam-size", "2"],
            "beam search may replace earlier tokens",
        ),
        (["--prompt", "x", "--set", "model.hidden_size=3"], "Use it with parallel.…"),
        (["--prompt", "x", "--system", "y"], "--system requires --chat"),
        (["--prompt", "caf\udce9"], "character 4: Byte 0xe9 is not UTF-8 text"),
        (["--prompt", "x", "--stop", "\ud83d"], "character 1: U+D83D is half of a surrogate pair"),
        (["--prompt", "x", "--set", "parallel.model_parallel=9"], "parallel"),
    ],
)
def test_wrong_input_is_a_one_line_error(folder, stdin, capsys, arguments, message):
    stdin("")
    assert run(folder, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_wrong_folders_are_one_line_errors(folder, tmp_path, capsys):
    def run_and_get_error(path):
        assert run(path, "--prompt", "x") == 2
        return capsys.readouterr().err

    assert "does not exist" in run_and_get_error(tmp_path / "none")
    assert "Expected tokenizer.json" in run_and_get_error(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert "config.json" in run_and_get_error(tmp_path)
    network = CausalLM(20, **LLAMA)
    network.build()
    save_pretrained(network, tmp_path / "small", "llama")
    (tmp_path / "small" / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert "has 290 ids, but the model has only 20" in run_and_get_error(tmp_path / "small")
    (tmp_path / "run.json").write_text("{}")
    assert "has no config.yaml" in run_and_get_error(tmp_path)


def test_lone_surrogates_are_reported_with_the_text_index(folder):
    for tokenizer in (load_tokenizer(folder), SubwordTokenizer.train(["one two"], vocab_size=22)):
        with pytest.raises(InputError, match=r"text 2 of 2, character 2: U\+D83D is half of"):
            tokenizer.encode(["one", "o\ud83d"])


def test_evaluate_names_folders_that_are_no_runs(folder, tmp_path, capsys):
    """`evaluate` and `translate` accept translation runs."""
    lines = tmp_path / "lines.txt"
    lines.write_text("a\n")
    plain_folder = tmp_path / "own"
    (plain_folder / "checkpoints").mkdir(parents=True)
    for place, message in (
        (folder, f"`{folder}` contains a published model"),
        (plain_folder, "It contains checkpoints"),
    ):
        ask = ["evaluate", "--run", str(place), "--src", str(lines), "--ref", str(lines)]
        assert main(ask) == 2
        error = capsys.readouterr().err
        assert "is not a run of `dtransformer train`" in error and message in error
