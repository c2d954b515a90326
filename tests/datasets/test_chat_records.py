"""The template determines the trained part of a conversation, token by token."""

import json

import numpy as np
import pytest
import tokenizers

from dtransformer.datasets.chat_records import conversation, label_spans, render_record
from dtransformer.datasets.chat_template import CHATML, ChatTemplate
from dtransformer.datasets.records import get_preference, read_records
from dtransformer.datasets.tokenizer_folder import JsonTokenizer
from dtransformer.errors import InputError
from tests.models.pretrained.published import with_transformers

# Shortened templates of these families, with the marks of answers for `transformers`. This library
# ignores the marks.
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|eot_id|>"
    "{% endgeneration %}{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA_3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim }}<end_of_turn>\n"
    "{% endgeneration %}{% else %}{{ m['content'] | trim }}<end_of_turn>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }}[/INST]"
    "{% else %}{% generation %} {{ m['content'] | trim }}{{ eos_token }}{% endgeneration %}{% endif %}"
    "{% endfor %}"
)
# Only answers after the last question have thoughts.
QWEN_3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{% if loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = CHATML.replace(
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' + '\\n' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' + '\\n' }}{% endif %}",
)
TEMPLATES = {
    "llama_3": LLAMA_3,
    "gemma_3": GEMMA_3,
    "mistral": MISTRAL,
    "qwen_3": QWEN_3,
    "chatml": MARKED,
}
TURNS = [
    {"role": "user", "content": "What is two plus two?"},
    {"role": "assistant", "content": "It is four. 😀"},
    {"role": "user", "content": "It is four? "},
    {"role": "assistant", "content": "Yes, it is four."},
]
SPECIAL = ["<s>", "</s>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Return a byte-level BPE tokenizer with the marks of the templates as tokens."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet
    )
    bpe.train_from_iterator([turn["content"] for turn in TURNS], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    bpe.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    path = folder / "tokenizer.json"
    return JsonTokenizer(path)


def learnt(tokenizer, source, turns, train_on="assistant"):
    """Return the ids and labels of a rendered conversation."""
    tokenizer.template_source = source
    result = conversation(turns, tokenizer.chat_template(), train_on, "here")
    ((ids, places, _),) = tokenizer.encode_with_offsets([result.text])
    return np.array(ids), label_spans(ids, places, result.spans)


@with_transformers
@pytest.mark.parametrize("name", TEMPLATES)
def test_trained_tokens_match_transformers(name, tokenizer):
    import transformers

    hf_tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer._path), bos_token="<s>", eos_token="</s>"
    )
    for turns in (TURNS[:2], TURNS):
        ids, labels = learnt(tokenizer, TEMPLATES[name], turns)
        expected = hf_tokenizer.apply_chat_template(
            turns,
            chat_template=TEMPLATES[name],
            return_assistant_tokens_mask=True,
            return_dict=True,
        )
        np.testing.assert_array_equal(ids, expected["input_ids"])
        mask = np.array(expected["assistant_masks"], bool)
        assert mask.any()
        np.testing.assert_array_equal(labels != -100, mask)
        np.testing.assert_array_equal(labels[mask], ids[mask])


def test_train_on_selects_the_trained_turns(tokenizer):
    text = lambda turns, on="assistant": [
        conversation(turns, ChatTemplate(CHATML), on, "here").text[a:b]
        for a, b in conversation(turns, ChatTemplate(CHATML), on, "here").spans
    ]
    first, last = "It is four. 😀<|im_end|>\n", "Yes, it is four.<|im_end|>\n"
    assert text(TURNS) == [first, last]
    assert text(TURNS, "last_assistant") == [last]
    (all_of_it,) = text(TURNS, "all")
    assert all_of_it.startswith("<|im_start|>user")
    for mark in ({"train": False}, {"weight": 0}):
        assert text([TURNS[0], {**TURNS[1], **mark}, *TURNS[2:]]) == [last]


def test_texts_and_completions_are_trained():
    assert render_record({"text": "a b"}, None, "assistant", "here").spans == [(0, 3)]
    record = {"prompt": "2+2=", "completion": "4"}
    assert render_record(record, None, "assistant", "here").spans == [(4, 5)]
    assert render_record(record, None, "all", "here").spans == [(0, 5)]


@pytest.mark.parametrize(
    "record, expected_error",
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "no assistant message"),
        ({"messages": []}, "Expected a list of messages with `role` and `content`"),
        (
            {"messages": [{"role": "bot", "content": "a"}]},
            "message 1 must have `content` and `role`",
        ),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "message 1: `content` must be a text, got 3",
        ),
        ({"messages": [TURNS[0], {**TURNS[1], "weight": 0}]}, "excludes all answers"),
        ({"messages": [TURNS[0], {**TURNS[1], "weight": 0.5}]}, "`weight` must be 1, or 0"),
        ({"prompt": "a", "completion": ""}, "`completion` is empty"),
        ({"text": ""}, "`text` is empty"),
        ({"txt": "a"}, "`text` is missing; the record has 'txt'"),
    ],
)
def test_error_for_a_wrong_record_names_its_place(record, expected_error):
    with pytest.raises(InputError, match="^a.jsonl, line 3") as caught:
        render_record(record, ChatTemplate(CHATML), "assistant", "a.jsonl, line 3")
    assert expected_error in str(caught.value)


def test_template_that_hides_the_start_of_an_answer_raises_an_error():
    """This template's beginning depends on the number of messages."""
    source = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(InputError, match="message 2: The template renders the messages before"):
        conversation(TURNS, ChatTemplate(source), "assistant", "here")


@pytest.mark.parametrize(
    "source, expected_error",
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        ("{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}", "template"),
        ("{{ messages.__class__.__mro__ }}", "template"),
        ("{{ strftime_now.__self__.replace }}", "template"),
        ("{{ 'x' * 999999999 }}", "supports only numbers up to"),
        ("{{ '%999999999d' % 1 }}", "supports only numbers up to"),
        ("{{ 2 ** 99999999 }}", "exponent"),
        ("{{ 'x' | center(999999999) }}", "center"),
        ("{% set x = messages.append(3) %}", "template"),
        (
            "{% set ns = namespace(x='xxxx') %}{% for i in range(28) %}{% set ns.x = ns.x ~ ns.x %}"
            "{% endfor %}",
            "too long",
        ),
        (
            "{% set ns = namespace(x='xxxx') %}{% for i in range(28) %}{% set ns.x = ns.x + ns.x %}"
            "{% endfor %}",
            "too long",
        ),
        ("{{ 'x'.ljust(300000000) }}", "unsafe"),
        ("{{ '{:>300000000}'.format('x') }}", "format"),
        ("{{ ('x' | list | slice(3000000) | list)[0] }}", "slice"),
        ("{{ lipsum(n=5000) }}", "lipsum"),
        (
            "{% macro _counted(x) %}abc{% endmacro %}{% for a in range(9999) %}"
            "{% for b in range(9999) %}{% endfor %}{% endfor %}",
            "steps",
        ),
        (
            "{% for a in range(9999) %}{{ messages | tojson }}{{ messages | tojson * 1 }}{% endfor %}",
            "",
        ),
        ("{{ raise_exception('no system') }}", "no system"),
        ("{% for %}", "is not a valid chat template"),
    ],
)
def test_sandbox_limits_templates(source, expected_error):
    with pytest.raises(InputError) as caught:
        ChatTemplate(source).render([{"role": "user", "content": "a" * 1000}])
    assert expected_error in str(caught.value) and "\n" not in str(caught.value)


def test_date_of_templates_can_be_set():
    assert (
        ChatTemplate("{{ strftime_now('%d %b %Y') }}", date="2024-07-26").render([])
        == "26 Jul 2024"
    )


def test_reads_every_record_format(tmp_path):
    def read(name, content, **fields):
        (tmp_path / name).write_text(content)
        return [record for _, record in read_records(tmp_path / name, fields)]

    sharegpt = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    expected = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert read("a.jsonl", json.dumps(sharegpt)) == [{"messages": expected}]
    alpaca = {"instruction": "do", "input": "it", "output": "done"}
    (item,) = read("b.json", json.dumps([alpaca]))
    assert [turn["content"] for turn in item["messages"]] == ["do\nit", "done"]
    assert read("c.txt", "one\n\ntwo\n") == [{"text": "one"}, {"text": "two"}]
    (item,) = read("d.jsonl", '{"q": "a", "r": "b"}', prompt="q", completion="r")
    assert item == {"prompt": "a", "completion": "b"}
    with pytest.raises(InputError, match="A turn of `conversations` must have `value` and `from`"):
        read("a.jsonl", json.dumps({"conversations": [{"from": ["human"], "value": "a"}]}))
    with pytest.raises(InputError, match="x.csv: CSV, TSV and Excel tables are not supported"):
        read("x.csv", "text,label\na,1\n")
    with pytest.raises(InputError, match="e.jsonl, line 1 has no field 'q'"):
        read("e.jsonl", '{"r": "b"}', prompt="q")


def test_parquet_rows_are_records(tmp_path):
    parquet, pyarrow = map(pytest.importorskip, ("pyarrow.parquet", "pyarrow"))
    rows = [{"messages": TURNS}, {"messages": TURNS[:2]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    result = list(read_records(tmp_path / "a.parquet"))
    assert [record for _, record in result] == rows and result[1][0].endswith("a.parquet, row 2")


def test_common_first_messages_of_preferences_become_the_prompt():
    chosen, rejected = [*TURNS[:3], TURNS[3]], [*TURNS[:3], {**TURNS[3], "content": "No."}]
    prompt, good, bad = get_preference({"chosen": chosen, "rejected": rejected}, "here")
    assert (prompt, good, bad) == (TURNS[:3], TURNS[3:], rejected[3:])
    assert get_preference({"prompt": "a", "chosen": "b", "rejected": "c"}, "here") == (
        "a",
        "b",
        "c",
    )
    with pytest.raises(InputError, match="begin with different messages"):
        get_preference({"chosen": TURNS[:1], "rejected": TURNS[1:2]}, "here")


def test_repeated_prompt_of_preferences_is_used_once():
    turn = lambda role, text: {"role": role, "content": text}
    record = {
        "prompt": "Q",
        "chosen": [turn("user", "Q"), turn("assistant", "A")],
        "rejected": [turn("user", "Q"), turn("assistant", "B")],
    }
    prompt, chosen, rejected = get_preference(record, "a.jsonl:1")
    assert prompt == [turn("user", "Q")]
    assert (chosen, rejected) == ([turn("assistant", "A")], [turn("assistant", "B")])


def read(tmp_path, record, fields=None):
    (tmp_path / "r.jsonl").write_text(json.dumps(record))
    ((_, result),) = read_records(tmp_path / "r.jsonl", fields)
    return result


def test_named_fields_take_precedence_over_columns(tmp_path):
    result = read(tmp_path, {"sentiment": "POS", "text": "x", "label": 7}, {"label": "sentiment"})
    assert result == {"label": "POS", "text": "x"}
    result = read(tmp_path, {"s": "a"}, {"query": "s", "positive": "s"})
    assert result == {"query": "a", "positive": "a"}


@pytest.mark.parametrize("record", [
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    {"instruction": "q", "output": "a"},
])  # fmt: skip
def test_system_field_becomes_the_first_message(record, tmp_path):
    result = read(tmp_path, {**record, "system": "s", "tools": []})
    assert [(x["role"], x["content"]) for x in result["messages"]] == [
        ("system", "s"), ("user", "q"), ("assistant", "a"),
    ]  # fmt: skip
    assert result["tools"] == []
    result["system"] = "again"
    with pytest.raises(InputError, match="Remove one of them"):
        read(tmp_path, result)


def test_alpaca_history_becomes_messages(tmp_path):
    record = {"instruction": "q", "input": "", "output": "a", "history": [["p", "b"]]}
    assert [x["content"] for x in read(tmp_path, record)["messages"]] == ["p", "b", "q", "a"]
    with pytest.raises(InputError, match="`history` must be a list of pairs"):
        read(tmp_path, {**record, "history": ["p"]})


def test_white_space_with_empty_places_is_trained():
    assert label_spans([5, 6, 7], [(0, 2), (3, 3), (4, 6)], [(2, 6)]).tolist() == [-100, 6, 7]


def test_white_space_of_answers_is_trained_despite_empty_places(tokenizer):
    """Tokens of white space have empty places at their ends."""
    trimmed = tokenizers.Tokenizer.from_file(str(tokenizer._path))
    trimmed.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    for text in ("<s>  \n    if x:\n\n        y  </s>  \n", "<s>    x  </s>", "<s>x   </s>   "):
        result = trimmed.encode(text)
        assert any(start == end for start, end in result.offsets)
        learnt = label_spans(result.ids, result.offsets, [(len("<s>"), text.index("</s>"))]) != -100
        first, last = (result.tokens.index(mark) for mark in ("<s>", "</s>"))
        assert np.flatnonzero(learnt).tolist() == list(range(first + 1, last))


def test_prompt_that_differs_from_chosen():
    chosen = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    chosen += [{"role": "assistant", "content": "a"}]
    with pytest.raises(InputError, match="does not begin with `prompt`"):
        get_preference({"prompt": "q", "chosen": chosen, "rejected": chosen}, "here")


def test_tools_of_a_text_record_are_ignored():
    assert render_record({"text": "x", "tools": "hammer"}, None, "assistant", "here").text == "x"


PHI_3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
THINKING = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
EVERY_MESSAGE_CLOSES = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}</s>"


def learnt_texts(source, turns, train_on="assistant"):
    result = conversation(turns, ChatTemplate(source), train_on, "here")
    return [result.text[start:end] for start, end in result.spans]


@pytest.mark.parametrize("answer", ["Yes.", "<b>Yes</b>", "<tool_call>add</tool_call>"])
@pytest.mark.parametrize(
    "source, middle_end, last_end",
    [
        (PHI_3, "<|end|>\n", "<|end|>\n<|endoftext|>"),
        (THINKING, "<|im_end|>\n", "<|im_end|>\n"),
        (CHATML, "<|im_end|>\n", "<|im_end|>\n"),
    ],
)
def test_trained_answers_contain_no_part_of_the_prompt(source, middle_end, last_end, answer):
    turns = [TURNS[0], {"role": "assistant", "content": answer}] * 2
    assert learnt_texts(source, turns) == [answer + middle_end, answer + last_end]
    assert learnt_texts(source, turns, "last_assistant") == [answer + last_end]


def test_opening_thought_tag_of_the_prompt_is_not_trained():
    turns = [TURNS[0], {"role": "assistant", "content": "<think>\nSum.\n</think>\nFour."}]
    assert learnt_texts(THINKING, turns) == ["Sum.\n</think>\nFour.<|im_end|>\n"]


def test_answer_after_a_template_without_generation_prompt_is_trained():
    first, second = learnt_texts(EVERY_MESSAGE_CLOSES, TURNS)
    assert first == "<|assistant|>It is four. 😀"
    assert second == "<|assistant|>Yes, it is four.</s>"


@with_transformers
@pytest.mark.parametrize("strips", ["lstrip", "rstrip"])
def test_headers_that_strip_white_space_are_not_trained(strips, tokenizer, tmp_path):
    import transformers

    library = tokenizers.Tokenizer.from_file(str(tokenizer._path))
    marks = [
        tokenizers.AddedToken(f"<|{x}|>", special=True, normalized=False, **{strips: True})
        for x in ("user", "assistant")
    ]
    library.add_special_tokens([*marks, tokenizers.AddedToken("<|end|>", special=True)])
    library.save(str(tmp_path / "tokenizer.json"))
    stripping = JsonTokenizer(tmp_path / "tokenizer.json")
    source = PHI_3.replace("|>\n{{ m", "|>{{ m").replace("assistant|>\n", "assistant|>")
    turns = [{**turn, "content": f" \n{turn['content']}"} for turn in TURNS]
    ids, labels = learnt(stripping, source, turns)
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json")
    )
    expected = reference.apply_chat_template(turns, chat_template=source, return_dict=True)
    np.testing.assert_array_equal(ids, expected["input_ids"])
    headers = [library.token_to_id(x) for x in ("<|user|>", "<|assistant|>")]
    assert not np.isin(labels, headers).any()
    end = library.token_to_id("<|end|>")
    assert np.count_nonzero(labels == end) == 2
