"""Cases of benchmarks/fuzz.py with hostile run files, records, templates and published files.

Each case is a function of a random generator and a folder, as in fuzz_inputs.py.
"""

import functools
import gzip
import json
import time
import warnings

import yaml
from fuzz_damage import ODD_TEXTS, ODD_VALUES, Failure, damaged, edit
from fuzz_folders import CHAT, TEMPLATE, use_tokenizer
from fuzz_inputs import SENTENCES

from dtransformer.datasets import load_tokenizer, write_token_shards
from dtransformer.datasets.chat_template import CHATML, ChatTemplate
from dtransformer.models.pretrained.families import FAMILIES
from dtransformer.models.pretrained.load import read_architecture
from dtransformer.runs.config import load_config, save_config
from dtransformer.runs.tasks import make_task
from dtransformer.runs.unread import check_read
from harness.byte_tokenizer import write_byte_tokenizer

WORDS = "zero one two three four five".split()
MAX_EDITED_RECORDS = 3  # Maximum number of edited records in a file.


def turns(*texts):
    """Return alternating messages of a user and an assistant."""
    roles = "user", "assistant"
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


RECORDS = {
    "chat": [{"messages": turns(f"{a} and {b}?", a + b, "thanks", "welcome")}
             for a in WORDS for b in WORDS[:2]]
    + [{"instruction": "say", "input": a, "output": a * 2} for a in WORDS]
    + [{"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": "so"}]}
       for a in WORDS]
    + [{"prompt": f"{a}?", "completion": f" {a}."} for a in WORDS]
    + [{"text": f"A text of {a}."} for a in WORDS],
    "preference": [{"prompt": turns(a), "chosen": turns("", a)[1:], "rejected": turns("", "no")[1:]}
                   for a in WORDS]
    + [{"chosen": turns(a, a), "rejected": turns(a, "no")} for a in WORDS]
    + [{"prompt": f"{a}?", "chosen": f" {a}", "rejected": " no"} for a in WORDS],
    "seq2seq": [{"prompt": f"{a}?", "completion": f"{a}, {b}"} for a in WORDS for b in WORDS[:3]],
    "classification": [{"text": f"{a} or {b}", "label": "yes" if a > b else "no"}
                       for a in WORDS for b in WORDS[:3]],
    "regression": [{"text": a, "text_pair": b, "label": len(a + b) / 10}
                   for a in WORDS for b in WORDS[:3]],
    "token_classification": [{"tokens": [a, "or", b], "labels": ["n", "w", "n"]}
                             for a in WORDS for b in WORDS[:3]],
    "embedding": [{"query": f"{a}?", "positive": f"{a}, not {b}", "negatives": [b, "no"][:i]}
                  for a in WORDS for i, b in enumerate(WORDS[:3]) if a != b],
    "kto": [{"prompt": turns(a), "completion": turns("", b)[1:], "label": a < b}
            for a in WORDS for b in WORDS[:3]],
    "ranking": [{"query": f"{a}?", "positive": a, "negatives": [b, "no"][:i + 1]}
                for a in WORDS for i, b in enumerate(WORDS[:2]) if a != b],
}  # fmt: skip
CHAT_TASKS = ("chat", "preference", "kto")
SIZES = {"hidden_size": 8, "num_heads": 2, "num_layers": 1}
PAIR_SIZES = {"hidden_size": 8, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
TEMPLATE_PARTS = [
    "{{ bos_token }}", "{{ messages }}", "{{ messages[0] }}", "{{ messages[0]['content'] }}",
    "{% endfor %}", "{% for m in messages %}", "{{ m.role }}", "{{ m.content }}",
    "{{ m.content | trim }}", "{% endif %}", "{% if add_generation_prompt %}",
    "{% if m.role == 'user' %}", "{% else %}", "{{ loop.index }}", "{% set x = namespace(n=0) %}",
    "{% set x.n = x.n + 1 %}", "{{ x.n }}", "{% generation %}", "{% endgeneration %}",
    "{{ raise_exception('no') }}", "{{ strftime_now('%Y') }}", "{{ 'a' * 10**9 }}",
    "{% for i in range(10**9) %}", "{{ ''.__class__ }}", "{{ messages | tojson }}", "{{ tools }}",
    "{%- macro f(x) -%}", "{%- endmacro -%}", "{{ f(1) }}", "{{ m | attr('x') }}",
    "{{ lipsum() }}", "{{ messages.append(1) }}", "{{ cycler('a').next() }}", "{{ 2 ** 10000 }}",
    "{{ 1 / 0 }}", "a", "é", "\n", "{#", "#}", "{{", "}}", "{%", "%}",
    "{{ m.content.split('</think>')[-1] }}", "{% break %}", "{{ messages[::-1] }}",
    "{{ m['tool_calls'] | length }}", "{% set _ = x.update({}) %}", "{% include 'x' %}",
    "{% import 'x' as y %}", "{{ '%s' % m }}", "{{ self }}", "{{ m.content[:10**9] }}",
    "{% filter upper %}", "{% endfilter %}", "{{ dict(a=1) | items | list }}",
    "{{ 'a'.join(messages) }}",
]  # fmt: skip


def prepare(folder):
    """Write the undamaged files and return a dict of kinds to functions of (rng, folder)."""
    warnings.simplefilter("ignore")
    tokenizer = folder / "llama"
    tokenizer.mkdir()
    write_byte_tokenizer(tokenizer, SENTENCES, TEMPLATE)
    (folder / "text.txt").write_text("\n\n".join(f"{a} and {b}." for a in WORDS for b in WORDS))
    for task, rows in RECORDS.items():
        (folder / f"{task}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shards = ["shards_a", "shards_b"]
    for name, words in zip(shards, (WORDS, WORDS[:2])):
        texts = [f"{a} and {b}." for a in words for b in WORDS]
        write_token_shards(texts, load_tokenizer(tokenizer), folder / name, shard_tokens=400)
    cases = {
        "run YAML": functools.partial(run_file, folder),
        "mixture YAML": functools.partial(mixture_file, folder, shards),
    }
    valid_rows = {task: known_rows(folder, task) for task in RECORDS}
    for task in (*CHAT_TASKS, "seq2seq"):
        cases[f"{task} records"] = functools.partial(records, folder, valid_rows, [task])
    labelled = [x for x in RECORDS if x not in (*CHAT_TASKS, "seq2seq")]
    cases["labelled records"] = functools.partial(records, folder, valid_rows, labelled)
    cases["tables"] = functools.partial(table, folder)
    cases["chat template"] = template
    cases["published config"] = functools.partial(published_config, published_configs())
    cases["published tokenizer"] = functools.partial(published_tokenizer, tokenizer)
    return cases


def make_config(task, folder, path=None):
    """Return the sections of a small config for a task."""
    path = str(
        path
        or folder / f"{task if task in RECORDS else 'text'}.{'jsonl' if task in RECORDS else 'txt'}"
    )
    tokenizer_options = {"folder": str(folder / "llama")}
    return {
        "task": task,
        "data": {"train": path, "length": 256},
        "tokenizer": {"vocab_size": 44} if task == "seq2seq" else tokenizer_options,
        "model": PAIR_SIZES if task in ("seq2seq", "span_corruption") else SIZES,
        "training": {"batch_size": 4, "learning_rate": 0.01},
    } | (
        {"data": {"train": path, "length": 256, "template": "chatml"}} if task in CHAT_TASKS else {}
    )


def mixture_file(good, shards, rng, folder):
    """Train on two files of records or on two folders of token shards, with an edited config."""
    task = rng.choice(["chat", "causal_lm"])
    names = ["chat.jsonl", "chat.jsonl"] if task == "chat" else shards
    sections = make_config(task, good) | {"task": task}
    sections["data"]["train"] = [
        {"path": str(good / name), "weight": rng.choice([1, 0.5, 3])} for name in names
    ]
    if task == "chat":
        sections["data"]["mixture"] = rng.choice(["once", "repeat"])
    else:
        sections.pop("tokenizer")
    if rng.random() < 0.8:
        sections = edit(rng, sections)
    read_run(yaml.safe_dump(sections).encode(), folder)


def run_file(good, rng, folder):
    task = rng.choice([*RECORDS, "causal_lm", "masked_lm", "reward"])
    sections = make_config("preference" if task == "reward" else task, good) | {"task": task}
    if rng.random() < 0.3:  # Add keys of any section.
        option_names = load_config(None, [f"task={task}"]).keys()
        for key in rng.sample(option_names, rng.choice([1, 1, 3])):
            section, name = key.split(".")
            value = rng.choice([*ODD_VALUES, 1, 2, 0.1, "x", True, None])
            sections.setdefault(section, {})
            sections[section] = {**sections[section], name: value}
    else:
        sections = edit(rng, sections)
    text = yaml.safe_dump(sections).encode()
    if rng.random() < 0.2:
        text = damaged(rng, text)
    read_run(text, folder)


def read_run(text, folder):
    """Read a run's YAML and its data, and check that saving the config loses nothing."""
    (folder / "run.yaml").write_bytes(text)
    config = load_config(folder / "run.yaml")
    check_read(config)
    save_config(config, folder / "saved.yaml")
    if load_config(folder / "saved.yaml") != config:
        raise Failure(f"wrong data: {text[:200]!r}")
    task_object = make_task(config, folder=folder)
    task_object.read()
    network = task_object.make_network()
    if len(task_object.batches("train") or ()) < 1 or not network.count_params():
        raise Failure("wrong data: nothing to train")


def known_rows(folder, task):
    """Return the rows of the undamaged records, by the records' JSON."""
    task_object = read_again(folder, task, folder / f"{task}.jsonl", folder)
    texts = map(json.dumps, RECORDS[task])
    return {text: get_row(task_object, i) for i, text in enumerate(texts)}


def get_row(task, index):
    rows = task.records["train"]
    # Ids of token labels depend on all records.
    parts = slice(1 if task.config.task == "token_classification" else None)
    # The second sequence of KTO depends on the record before.
    sides = 1 if task.config.task == "kto" else rows.num_sequences
    return [[x.tolist() for x in rows.sequence(index, side)][parts] for side in range(sides)]


def records(good, valid_rows, names, rng, folder):
    task = rng.choice(names)
    lines = [json.dumps(record) for record in RECORDS[task]]
    rng.shuffle(lines)
    for place in rng.sample(range(len(lines)), rng.randrange(MAX_EDITED_RECORDS + 1)):
        record = json.loads(lines[place])
        if rng.random() < 0.5:
            record = edit(rng, record)
        elif rng.random() < 0.5:
            record = with_odd_text(rng, record)
        lines[place] = json.dumps(record, ensure_ascii=rng.random() < 0.5)
    form, is_damaged = rng.choice(["jsonl", "jsonl", "json", "jsonl.gz"]), rng.random() < 0.3
    text = "\n".join(lines) if form != "json" else "[" + ",\n".join(lines) + "]"
    data = text.encode("utf-8", "surrogateescape")
    data = damaged(rng, data) if is_damaged else data
    data = gzip.compress(data) if form.endswith("gz") else data
    path = folder / f"x.{form}"
    path.write_bytes(data)
    read = read_again(good, task, path, folder)
    if is_damaged:
        return
    rows = [get_row(read, i) for i in range(len(read.records["train"]))]
    expected = [valid_rows[task][line] for line in lines if line in valid_rows[task]]
    if task == "seq2seq":  # The tokenizer is trained on the records.
        expected = []
    for row in expected:
        if row not in rows:
            raise Failure(f"wrong data: a record of {task} is missing or changed")
    if len(rows) > len(lines):
        raise Failure(f"wrong data: {len(rows)} rows from {len(lines)} records")


def read_again(good, task, path, folder):
    sections = make_config(task, good, path)
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))
    task_object = make_task(load_config(folder / "run.yaml"), folder=folder)
    task_object.read()
    return task_object


def with_odd_text(rng, value):
    """Return a copy of a record with one value replaced by an unusual one."""
    if isinstance(value, str):
        return rng.choice([x for x in ODD_TEXTS if len(x) < 500])
    if not value or not isinstance(value, (dict, list)):
        return rng.choice(ODD_VALUES)
    place = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    return (
        {**value, place: with_odd_text(rng, value[place])}
        if isinstance(value, dict)
        else [*value[:place], with_odd_text(rng, value[place]), *value[place + 1 :]]
    )


def table(good, rng, folder):
    """Read records from Parquet, Arrow and CSV files."""
    import pyarrow
    import pyarrow.feather
    import pyarrow.parquet

    task = rng.choice(["classification", "seq2seq", "regression", "chat"])
    rows = RECORDS[task] if task != "chat" else RECORDS[task][:12]
    if rng.random() < 0.5:
        rows = [dict(row) for row in rows]
        for row in rng.sample(rows, 2):
            key = rng.choice(list(row))
            row[key] = rng.choice([None, 1, "", "\0", "x"])
    form = rng.choice(["parquet", "arrow", "csv", "tsv"])
    path = folder / f"x.{form}"
    if form in ("csv", "tsv"):
        keys = list(rows[0])
        path.write_text("\n".join(",".join(str(row.get(k)) for k in keys) for row in rows))
        read_again(good, task, path, folder)
        raise Failure(f"wrong data: {form} is read as text by task {task}")
    try:
        content = pyarrow.Table.from_pylist(rows)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        return
    write = {"parquet": pyarrow.parquet.write_table, "arrow": pyarrow.feather.write_feather}[form]
    write(content, str(path))
    if rng.random() < 0.7:
        path.write_bytes(damaged(rng, path.read_bytes()))
    read_again(good, task, path, folder)


def template(rng, folder):
    """Render messages with a template, and compare with `transformers` if it accepts the template."""
    if rng.random() < 0.5:
        source = "".join(rng.choice(TEMPLATE_PARTS) for _ in range(rng.randrange(1, 12)))
    else:
        template_bytes = rng.choice([CHATML, TEMPLATE]).encode()
        source = damaged(rng, template_bytes).decode("utf-8", "replace")
    messages = edit(rng, CHAT) if rng.random() < 0.3 else CHAT
    start = time.monotonic()
    text = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages)
    if time.monotonic() - start > 0.2 or not isinstance(messages, list):
        return
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        hf_text = render_jinja_template(
            [messages], chat_template=source, bos_token="<s>", eos_token="</s>"
        )
    except Exception:
        return
    if hf_text[0] != [text] and "0x" not in text and "strftime" not in source:
        raise Failure(
            f"wrong data: {text[:100]!r}, transformers {hf_text[0][0][:100]!r}: {source!r}"
        )


def published_configs():
    """Return the default `transformers` config of each family, with small sizes."""
    import transformers

    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 99}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    configs = {}
    for kind in FAMILIES:
        try:
            fields = transformers.AutoConfig.for_model(kind).to_dict()
            configs[kind] = {**fields, **{k: x for k, x in small.items() if k in fields}}
            json.dumps(configs[kind])
        except (ValueError, TypeError, KeyError):
            configs[kind] = {"model_type": kind, **small}
    return configs


def published_config(configs, rng, folder):
    kind = rng.choice(list(configs))
    fields = edit(rng, configs[kind])
    if rng.random() < 0.5:
        name = rng.choice(list(fields) or ["x"])
        fields = {**fields, name: rng.choice([*ODD_VALUES, 0.5, 3, "gelu", "relu"])}
    text = json.dumps(fields).encode()
    text = damaged(rng, text) if rng.random() < 0.2 else text
    (folder / "config.json").write_bytes(text)
    architecture = read_architecture(folder)
    if type(fields.get("vocab_size")) is int and b"vocab_size" in text:
        if architecture.arguments["vocab_size"] != json.loads(text)["vocab_size"]:
            raise Failure("wrong data: another vocab_size")


def published_tokenizer(good, rng, folder):
    path = folder / "tokenizer"
    path.mkdir()
    files = {x.name: x.read_bytes() for x in good.iterdir()}
    files["special_tokens_map.json"] = b'{"unk_token": "<unk>", "pad_token": {"content": "</s>"}}'
    files["generation_config.json"] = b'{"eos_token_id": [2, 1], "pad_token_id": 0}'
    files["chat_template.jinja"] = TEMPLATE.encode()
    name = rng.choice(list(files))
    content = files[name]
    if name.endswith(".json") and rng.random() < 0.8:
        content = json.dumps(edit(rng, json.loads(content))).encode()
    else:
        content = damaged(rng, content)
    for file_name, data in {**files, name: content}.items():
        (path / file_name).write_bytes(data)
    use_tokenizer(path, rng)
