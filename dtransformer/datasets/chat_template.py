"""Chat templates, which render messages to the text that a model was trained on.

A template is a Jinja program from an untrusted source, so it runs in a sandbox. It cannot change
objects and can access only attributes of strings, lists, tuples, dicts and Jinja's objects. Its
steps are counted, and its time and the size of its texts are limited.
"""

import datetime
import json
import math
import pathlib
import re
import time
from collections.abc import Mapping, Sequence

from dtransformer.datasets.tool_calls import ParsedText
from dtransformer.errors import InputError, check_installed, short_repr, to_one_line
from dtransformer.inputs.files import read_bytes
from dtransformer.inputs.text import decode

FILE = "chat_template.jinja"
FOLDER = "additional_chat_templates"
_FIELD = "chat_template"
_DEFAULT = "default"  # Names of templates.
_TOOL_USE = "tool_use"
_REMOVED_FILTERS = (
    "attr",
    "batch",
    "center",
    "format",
    "indent",
    "pprint",
    "slice",
    "urlize",
    "wordwrap",
    "xmlattr",
)
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # Tags around trained answers.
_MAX_STEPS = 10**6
_MAX_SECONDS = 10
_MAX_TEXT = 2**24
# Methods that can build a long string from a short one.
_PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map"}
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% endif %}"
)


class ChatTemplate:
    """A compiled template that renders messages.

    Args:
        source: Text of the template.
        tokens: Dict of the special tokens that it may print, such as `{"bos_token": "<s>"}`.
        name: Origin of the template, for error messages.
        date: Date that `strftime_now` returns, such as `"2024-07-26"`. Defaults to today.
        tool_source: Text of the template for messages with tools. Defaults to `source`.

    Raises:
        InputError: If a text is not a valid template, or jinja2 is missing.

    Example:

    >>> template = ChatTemplate(CHATML)
    >>> template.render([{"role": "user", "content": "Hi"}])
    '<|im_start|>user\\nHi<|im_end|>\\n'
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str] | None = None,
        name: str = "The template",
        date: str | None = None,
        tool_source: str | None = None,
    ):
        check_installed("jinja2", "chat templates")
        self.name = str(name)
        self._tokens = dict(tokens or {})
        self._steps = _Steps()
        today = datetime.date.fromisoformat(date) if date else datetime.date.today()
        environment = _sandbox(self._steps, today)
        sources = source, source if tool_source is None else tool_source
        try:
            self._templates = [
                _compile_template(environment, _GENERATION.sub("", x)) for x in sources
            ]
        except Exception as error:  # A published template can fail in any way.
            raise InputError(
                f"{name} is not a valid chat template ({_describe_error(error)})."
            ) from None

    @classmethod
    def from_folder(
        cls,
        folder: pathlib.Path,
        config: Mapping,
        date: str | None = None,
        source: str | None = None,
    ):
        """Load the templates of a tokenizer's folder, as `transformers` does.

        Conversations with tools use the template `tool_use`, if the folder has it.

        Args:
            folder: Folder, which may contain `chat_template.jinja` and
                `additional_chat_templates`.
            config: Fields of its `tokenizer_config.json`.
            date: See `ChatTemplate`.
            source: Text of a template that replaces all templates of the folder. Defaults to `None`.

        Returns:
            A `ChatTemplate`.

        Raises:
            InputError: If the folder has no default template.
        """
        sources = {_DEFAULT: source} if source is not None else _sources_in(folder, config)
        if not isinstance(sources.get(_DEFAULT), str):
            raise InputError(
                f"{folder} has no chat template, neither {FILE} nor {_FIELD} in its "
                "tokenizer_config.json. Set `data.template` or use a chat model."
            )
        tokens = {name: _content(x) for name, x in config.items() if name.endswith("_token")}
        tokens = {name: text for name, text in tokens.items() if isinstance(text, str)}
        name = f"{folder}: The chat template"
        tool_source = sources.get(_TOOL_USE)
        return cls(sources[_DEFAULT], tokens, name, date, tool_source)

    def render(
        self,
        messages: Sequence[Mapping],
        add_generation_prompt: bool = False,
        tools: Sequence | None = None,
    ) -> str:
        """Return the text of messages.

        Args:
            messages: List of dicts with `"role"`, `"content"` and other keys of the template.
            add_generation_prompt: Boolean. Whether to append the beginning of an answer. Defaults
                to `False`.
            tools: Tools of the model, in the template's form. An empty list means no tools.

        Raises:
            InputError: If the template refuses the messages or exceeds a limit.
        """
        self._steps.begin()
        variables = {**self._tokens, "tools": tools or None, "documents": None}
        variables |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            parts = []
            size = 0
            for part in self._templates[bool(tools)].generate(**variables):
                size += len(part)
                if size > _MAX_TEXT:
                    raise ValueError(f"The text exceeds {_MAX_TEXT:,} characters.")
                parts.append(part)
            return "".join(parts)
        except Exception as error:  # A published template can fail in any way.
            raise InputError(
                f"{self.name} fails for the messages {short_repr(messages)}: {_describe_error(error)}"
            ) from None


def _sources_in(folder, config):
    """Return a dict of template texts by name. Files replace the templates of the config."""
    field = config.get(_FIELD)
    path = folder / FILE
    if path.exists():
        sources = {_DEFAULT: decode(read_bytes(path), path)}
    elif isinstance(field, list):
        sources = {x.get("name"): x.get("template") for x in field if isinstance(x, dict)}
    else:
        sources = {_DEFAULT: field}
    if (path := folder / FOLDER / f"{_TOOL_USE}.jinja").exists():
        sources[_TOOL_USE] = decode(read_bytes(path), path)
    return sources


class _Steps:
    """Limits the steps and the seconds of a rendering."""

    left = _MAX_STEPS
    until = math.inf

    def begin(self):
        self.left = _MAX_STEPS
        self.until = time.monotonic() + _MAX_SECONDS

    def take(self):
        self.left -= 1
        if self.left < 0:
            raise ValueError(f"Rendering exceeds {_MAX_STEPS:,} steps.")
        if time.monotonic() > self.until:
            raise ValueError(f"Rendering exceeds {_MAX_SECONDS} s.")

    def counted(self, items):
        for item in items:
            self.take()
            yield item


def _sandbox(steps, today):
    """Return a Jinja environment that limits attributes, calls, arithmetic and text sizes."""
    import jinja2.runtime
    import jinja2.sandbox
    import jinja2.utils

    accessible_types = (
        str,
        list,
        tuple,
        dict,
        jinja2.runtime.LoopContext,
        jinja2.runtime.Macro,
        jinja2.utils.Namespace,
        jinja2.utils.Cycler,
        jinja2.utils.Joiner,
    )

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**", "%", "+"))
        counted = staticmethod(steps.counted)
        joined = staticmethod(_join)

        def is_safe_attribute(self, obj, attr, value):
            pads = isinstance(obj, str) and attr in _PADDING
            is_open = isinstance(obj, accessible_types) and not pads
            return is_open and super().is_safe_attribute(obj, attr, value)

        def wrap_str_format(self, value):
            if super().wrap_str_format(value) is not None:
                raise ValueError("`format` is not available because it can pad texts.")

        def call(self, context, obj, /, *args, **kwargs):
            steps.take()
            if isinstance(getattr(obj, "__self__", None), str):  # A method such as `replace`.
                _check_size(obj.__self__, *args)
            return super().call(context, obj, *args, **kwargs)

        def call_binop(self, context, operator, left, right):
            if operator == "+" and isinstance(right, ParsedText):
                right = str(right)
            if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
                if len(left) + len(right) > _MAX_TEXT:
                    raise ValueError("A text is too long.")
                return left + right
            kinds = {type(left), type(right)}
            if not kinds <= {int, float, bool} or max(abs(left), abs(right)) > 10**9:
                raise ValueError(f"`{operator}` supports only numbers up to 10**9.")
            if operator == "**" and abs(right) > 64:
                raise ValueError("The exponent must be at most 64.")
            return super().call_binop(context, operator, left, right)

    def refuse(message):
        raise jinja2.TemplateError(message)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    for name in _REMOVED_FILTERS:
        environment.filters.pop(name)
    environment.globals.pop("lipsum")
    environment.filters["replace"] = _replace
    environment.filters["indent"] = _indent
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": today.strftime}
    return environment


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    if isinstance(indent, int) and indent > 16:
        raise ValueError("`indent` must be at most 16.")
    options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _indent(text, width=4, first=False, blank=False):
    if not isinstance(width, int) or width > 64:
        raise ValueError("`width` must be an integer of at most 64.")
    lines = str(text).split("\n")
    indented = [" " * width + x if x or blank else x for x in lines]
    return "\n".join(indented if first else [lines[0], *indented[1:]])


def _join(*parts):
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > _MAX_TEXT:
        raise ValueError("A text is too long.")
    return "".join(texts)


def _check_size(text, *args):
    """Refuse a method call that may build a too long text, by inserting an argument everywhere."""
    longest = max((len(x) for x in args if isinstance(x, str)), default=0)
    if len(text) * (longest + 1) > 4 * _MAX_TEXT:
        raise ValueError("A text may become too long.")


def _replace(text, old, new, count=None):
    text = str(text)
    _check_size(text, old, new)
    return text.replace(old, new, -1 if count is None else count)


def _compile_template(environment, source):
    """Compile a template so that its loops are counted and its joined texts are limited.

    The counting functions are attributes of the environment, which a template cannot access.
    """
    from jinja2 import nodes, visitor

    def call(name, arguments, lineno):
        return nodes.Call(
            nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=lineno
        )

    class Counting(visitor.NodeTransformer):
        def visit_For(self, node):
            self.generic_visit(node)
            node.iter = call("counted", [node.iter], node.lineno)
            return node

        def visit_Concat(self, node):
            self.generic_visit(node)
            return call("joined", node.nodes, node.lineno)

    tree = Counting().visit(environment.parse(source))
    tree.set_environment(environment)
    return environment.from_string(tree)


def _describe_error(error):
    return f"{type(error).__name__}: {to_one_line(error, 120)}"


def _content(token):
    return token.get("content") if isinstance(token, dict) else token
