"""Tools, tool calls and nulls of records are rendered as in `transformers`."""

import json

import pytest

from dtransformer.datasets.chat_records import render_record
from dtransformer.datasets.chat_template import CHATML, ChatTemplate
from dtransformer.datasets.documents import read_documents
from dtransformer.datasets.records import read_records
from dtransformer.datasets.tokenizer_folder import load_tokenizer
from dtransformer.errors import InputError
from tests.datasets import test_chat_records
from tests.models.pretrained.published import with_transformers

TURNS = test_chat_records.TURNS
tokenizer = test_chat_records.tokenizer


@pytest.mark.parametrize("as_text", [False, True])
def test_templates_receive_the_tools(as_text):
    template = ChatTemplate("{% for t in tools or [] %}<{{ t.name }}>{% endfor %}" + CHATML)
    tools = [{"name": "add"}]
    record = {"messages": TURNS, "tools": json.dumps(tools) if as_text else tools}
    result = render_record(record, template, "assistant", "here")
    assert result.text.startswith("<add>")
    assert result.text[slice(*result.spans[0])] == "one<|im_end|>\n" or result.spans
    with pytest.raises(InputError, match="tools must be a list of objects"):
        render_record({"messages": TURNS, "tools": ["add"]}, template, "assistant", "here")


def chat_folder(tokenizer, folder, form):
    """Copy a tokenizer and add a default and a `tool_use` template in one of the published forms."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(tokenizer._path.read_bytes())
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    named = {"default": CHATML, "tool_use": TOOL_USE}
    if form == "files":
        (folder / "chat_template.jinja").write_text(CHATML)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)
    else:
        config["chat_template"] = [{"name": x, "template": y} for x, y in named.items()]
    if form == "file over list":
        (folder / "chat_template.jinja").write_text("{{ messages | length }}")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


TOOL_USE = "{% for t in tools %}<{{ t.function.name }}>{% endfor %}" + CHATML
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@with_transformers
@pytest.mark.parametrize("form", ["files", "list", "file over list"])
def test_records_with_tools_use_the_template_of_transformers(form, tokenizer, tmp_path):
    import transformers

    folder = chat_folder(tokenizer, tmp_path / "published", form)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    load_tokenizer(folder).save(tmp_path / "saved")
    saved_reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    for loaded in (load_tokenizer(folder), load_tokenizer(tmp_path / "saved")):
        for tools in (None, TOOLS):
            record = {"messages": TURNS, "tools": tools}
            result = render_record(record, loaded.chat_template(), "all", "here").text
            requested = loaded.chat(TURNS[:1], tools)
            for their in (reference, saved_reference):
                options = {"tools": tools, "tokenize": False}
                assert result == their.apply_chat_template(TURNS, **options)
                options["add_generation_prompt"] = True
                assert requested == their.apply_chat_template(TURNS[:1], **options)
    if form != "file over list":
        assert result.startswith("<add>")


def test_custom_template_replaces_the_tool_template(tokenizer, tmp_path):
    loaded = load_tokenizer(chat_folder(tokenizer, tmp_path / "published", "files"))
    loaded.template_source = "{{ messages[0].content }}"
    loaded.save(tmp_path / "saved")
    for item in (loaded, load_tokenizer(tmp_path / "saved")):
        assert item.chat(TURNS[:1], TOOLS) == TURNS[0]["content"]


def write_columns(folder, rows, name="a.parquet"):
    parquet, pyarrow = map(pytest.importorskip, ("pyarrow.parquet", "pyarrow"))
    feather = pytest.importorskip("pyarrow.feather")
    write = parquet.write_table if name.endswith("parquet") else feather.write_feather
    names = sorted(set().union(*rows))
    columns = {column: [row.get(column) for row in rows] for column in names}
    write(pyarrow.table(columns), str(folder / name))
    return folder / name


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_rows_of_columns_equal_json_lines(name, tmp_path):
    call = lambda tool, **arguments: {"function": {"name": tool, "arguments": arguments}}
    tool = lambda name, **properties: {"name": name, "parameters": {"properties": properties}}
    rows = [
        {
            "messages": [TURNS[0], {"role": "assistant", "tool_calls": [call("add", a=1)]}],
            "tools": [tool("add", a={"type": "integer"}), tool("now", zone={"enum": ["utc"]})],
        },
        {"messages": [TURNS[0], {"role": "assistant", "tool_calls": [call("now", zone="utc")]}]},
        {"text": "plain"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    expected = [record for _, record in read_records(tmp_path / "a.jsonl")]
    assert expected == rows
    result = [record for _, record in read_records(write_columns(tmp_path, rows, name))]
    assert result == expected
    source = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    texts = [
        [render_record(record, ChatTemplate(source), "all", "here").text for record in records]
        for records in (result, expected)
    ]
    assert texts[0] == texts[1] and "null" not in texts[0][0]


def test_maps_in_columns_become_dicts(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    kind = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    column = pyarrow.array([[("a", 1), ("b", None)]], kind)
    parquet.write_table(pyarrow.table({"tools": column}), tmp_path / "a.parquet")
    ((_, record),) = read_records(tmp_path / "a.parquet")
    assert record == {"tools": {"a": 1}}


@with_transformers
@pytest.mark.parametrize("printed", ["arguments | tojson", "arguments", "arguments ~ ''"])
def test_arguments_as_json_text_are_trained_like_objects(printed, tokenizer):
    import transformers

    printed = f"'<call>' ~ (m.tool_calls[0].function.{printed})"
    if "~ ''" in printed:
        printed = "'<call>' + m.tool_calls[0].function.arguments"
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{{ " + printed + " }}"
        "{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    arguments = {"city": "Köln", "days": [1, 2]}
    text = json.dumps(arguments, ensure_ascii=False)
    turns = lambda value: [
        TURNS[0],
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": value}}]},
        {"role": "tool", "content": "sun"},
    ]
    result = render_record({"messages": turns(text)}, ChatTemplate(source), "assistant", "here")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer._path))
    messages = turns(arguments if "tojson" in printed else text)
    assert result.text == reference.apply_chat_template(
        messages, chat_template=source, tokenize=False
    )
    assert [result.text[slice(*span)] for span in result.spans] == [f"<call>{text}"]


@pytest.mark.parametrize(
    "value, expected_error", [("{'a': 1}", "not valid JSON"), ("[1]", "text of an object")]
)
def test_arguments_other_than_objects_are_refused(value, expected_error):
    calls = [{"function": {"name": "f", "arguments": value}}]
    for calls_value in (calls, json.dumps(calls)):
        record = {"messages": [TURNS[0], {"role": "assistant", "tool_calls": calls_value}]}
        with pytest.raises(InputError, match="message 2, tool_calls, arguments") as caught:
            render_record(record, ChatTemplate(CHATML), "assistant", "a.jsonl, line 1")
        assert expected_error in str(caught.value)


def test_unused_fields_are_not_checked(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a", "score": NaN, "extra": {"x": [Infinity]}, "note": "\\ud800"}\n'
    )
    ((place, record),) = read_records(tmp_path / "a.jsonl")
    assert render_record(record, None, "assistant", place).text == "a"
    assert list(read_documents([tmp_path / "a.jsonl"])) == ["a"]
    wrong = {
        "tools": '[{"name": "f", "default": NaN}]',
        "messages": '[{"role": "assistant", "content": "a", "x": NaN}]',
        "text": '"\\ud800"',
    }
    for name, value in wrong.items():
        turns = f', "messages": {json.dumps(TURNS)}' if name == "tools" else ""
        (tmp_path / "a.jsonl").write_text(f'{{"{name}": {value}{turns}}}')
        ((place, record),) = read_records(tmp_path / "a.jsonl")
        with pytest.raises(InputError, match="a.jsonl, line 1, (tools|message|text)"):
            render_record(record, ChatTemplate(CHATML), "assistant", place)
