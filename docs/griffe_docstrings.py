"""Griffe extension that reads the sections of our docstrings, see CONTRIBUTING.md.

mkdocstrings reads Google's sections. The others are turned into Markdown here: Keras' "Call
arguments", "Input shape" and "Output shape", references, examples that are not indented, and
shapes in brackets, which Markdown takes for links.
"""

import re
import textwrap

import griffe

_SECTIONS = ("Call arguments", "Input shape", "Output shape", "Reference", "References")
_HEADING = re.compile(rf"({'|'.join(_SECTIONS)}|Example|Examples):\s*(.*)")
_ARGUMENT = re.compile(r"([\w*][\w*, ]*): (.*)")
_SHAPE = re.compile(r"(`[^`]*`)|(\[[^\[\]\n]*\])")


class Dialect(griffe.Extension):
    """Turns docstrings into what mkdocstrings reads."""

    def on_object(self, *, obj, **kwargs):
        """Rewrite the docstring of an object that was read."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_attribute_instance(self, *, attr, **kwargs):
        """Show the default of a config's field, not the call that makes the field."""
        if isinstance(attr.value, griffe.ExprCall) and str(attr.value.function).endswith(".field"):
            attr.value = attr.value.arguments[0]


def as_markdown(docstring):
    """Return a docstring whose sections that Google's style lacks are Markdown."""
    lines, result = docstring.split("\n"), []
    while lines:
        line = lines.pop(0)
        heading = _HEADING.fullmatch(line)
        if line.startswith(">>>"):
            result += ["```pycon", line, *_take(lines, lambda x: bool(x.strip())), "```"]
        elif heading and heading[2]:
            result += _with_code([f"**{heading[1]}:** {heading[2]}"])
        elif heading:
            body = _take(lines, lambda x: not x.strip() or x.startswith(" "))
            body = textwrap.dedent("\n".join(body)).split("\n")
            result += [f"**{heading[1]}:**", "", *_with_code(_as_list(heading[1], body)), ""]
        else:
            result += _with_code([line])
    return "\n".join(result)


def _take(lines, belongs):
    """Remove the first lines that belong together, and return them."""
    lines_of_item = []
    while lines and belongs(lines[0]):
        lines_of_item.append(lines.pop(0))
    return lines_of_item


def _as_list(name, lines):
    """Return the lines of a section. "Call arguments" become items of a list."""
    lines = [line for line in lines if line.strip()]
    if name != "Call arguments":
        return lines

    def item(match):
        return f"- `{match[1]}`: {match[2]}" if match else None

    return [item(_ARGUMENT.fullmatch(line)) or f"  {line.strip()}" for line in lines]


def _with_code(lines):
    """Return lines with shapes formatted as code."""

    def as_code(match):
        return match[1] or f"`{match[2]}`"

    return [_SHAPE.sub(as_code, line) for line in lines]
