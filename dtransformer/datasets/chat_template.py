"""Chat templates of published tokenizers: messages to the text that their models were trained on."""

import importlib.util
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from datetime import datetime

from dtransformer.errors import InputError, one_line, shown
from dtransformer.inputs.files import read_bytes
from dtransformer.inputs.text import decode

_FILE, _FIELD = "chat_template.jinja", "chat_template"
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # marks answers, to train on them


def chat_text(folder: pathlib.Path, config: Mapping, messages: Sequence[Mapping[str, str]]) -> str:
    """Return the text of a chat, which the model's answer comes after.

    Templates run in a sandbox, as those of `transformers` do.

    Args:
        folder: the tokenizer's folder, which may have a `chat_template.jinja`.
        config: the fields of its `tokenizer_config.json`.
        messages: dicts of "role" and "content", the last of them the user's.

    Raises:
        InputError: there is no template, it refuses the messages, or jinja2 is missing.
    """
    path, source = folder / _FILE, config.get(_FIELD)
    if path.exists():
        source = decode(read_bytes(path), path)
    elif isinstance(source, list):  # of several the one that has no other purpose
        named = {x.get("name"): x.get("template") for x in source if isinstance(x, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        raise InputError(
            f"{folder}: has no chat template, neither {_FILE} nor {_FIELD} of its "
            "tokenizer_config.json: is it a chat model's?"
        )
    if importlib.util.find_spec("jinja2") is None:
        raise InputError("chat templates need jinja2: pip install 'dtransformer[chat]'")
    import jinja2.sandbox

    def refuse(message):
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda x, **options: json.dumps(
        x, **{"ensure_ascii": False, **options}
    )
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    given = {name: _content(x) for name, x in config.items() if name.endswith("_token")}
    given |= {"tools": None, "documents": None}
    source = _GENERATION.sub("", source)
    try:
        template = environment.from_string(source)
        return template.render(messages=list(messages), add_generation_prompt=True, **given)
    except Exception as error:  # whatever is wrong in a template that was published
        kind = f"{type(error).__name__}: {one_line(error, 120)}"
        raise InputError(
            f"{folder}: its chat template does not take {shown(messages)}: {kind}"
        ) from None


def _content(token):
    return token.get("content") if isinstance(token, dict) else token
