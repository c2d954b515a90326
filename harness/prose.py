"""Search docstrings, comments, messages and Markdown for stilted English.

    python -m harness.prose                   hits per 1,000 words, by folder and by page
    python -m harness.prose --show PATH...    every hit, with its file and line
    python -m harness.prose --lower           lower the ceilings in tests/prose_ceilings.tsv

A rule is a hint: each phrase is good English in some sentence. Well-written projects score 1 to 3
hits per 1,000 words. A clean score does not make a text clear.
"""

import argparse
import ast
import collections
import io
import math
import pathlib
import re
import tokenize
import typing

import yaml

ROOT = pathlib.Path(__file__).parents[1]
CEILINGS = ROOT / "tests" / "prose_ceilings.tsv"
DEFAULT_CEILING = 3
"""Ceiling of a folder or page that is not listed, in hits per 1,000 words."""

FOLDERS = ("dtransformer", "harness", "benchmarks", "examples", "docs", "tests")
MIN_MESSAGE_WORDS = 4
"""Shorter string constants are names, keys or formats, not messages."""


class Passage(typing.NamedTuple):
    """A line of prose.

    Attributes:
        path: File that contains it. line: Line number, from 1. kind: "summary" (first line of a
        docstring), "docstring", "comment" (first line of a block of
            comments), "comment_rest", "message" (string constant of the program) or "markdown".
        text: The prose itself.
    """

    path: pathlib.Path
    line: int
    kind: str
    text: str


class Rule(typing.NamedTuple):
    """A phrase that usually marks stilted English.

    Attributes:
        name: What to avoid.
        pattern: Compiled regular expression.
        kinds: Kinds of passages to search. Empty for all kinds.
    """

    name: str
    pattern: re.Pattern
    kinds: tuple = ()


_AFTER_WHAT = (
    "is are was were has have had it they come comes goes a an the of each all one other others ranks "
    "rank layers layer tests test needs need makes make can does do reads read this that those these "
    "users user"
)
_PREPOSITIONS = "of in by for with over to at from on after before under"
_OPENERS = "which whose of that as where in to but and or so with by for than what who"


def _words(text):
    """Return an alternation of the words of a string."""
    return "(?:" + "|".join(text.split()) + ")"


def _rule(name, pattern, kinds=(), flags=re.IGNORECASE):
    return Rule(name, re.compile(pattern, flags), kinds)


RULES = (
    _rule("free relative clause", rf"\bwhat {_words(_AFTER_WHAT)}\b"),
    _rule("preposition + which", rf"\b{_words(_PREPOSITIONS)} which\b"),
    _rule("those/that of", r"\bthose (?:of|that|in|which|with|on|without)\b|\bthat of\b"),
    _rule("None for/where", r"\bNone (?:for|where|of|without|if there)\b"),
    _rule("as of/from/there", r"\bas (?:of|from|there|with|by)\b(?! (?:now|follows)\b)"),
    _rule("archaic adverb", r"\b(?:but for|anew|once more|besides|alike)\b|, too\b"),
    _rule("things that tell", r"\b(?:tells?|told|says?|said)\b"),
    _rule("predicate genitive", r"\b(?:is|are) of (?:a|an|the|one|all|each|no|its|their)\b"),
    _rule(
        "existential tail",
        r"\bthat there (?:is|are|was|were)\b|\bthere (?:is|are) none\b"
        r"|\b(?:is|are) there\b(?!\?)|\bwhere there (?:is|are)\b",
    ),
    _rule(
        "vague quantity",
        r"\b(?:so|as) many\b|\bone after the other\b|\bat once\b|\bby (?:itself|themselves)\b",
    ),
    _rule("own", r"\b(?:its|their|of|one's|his) own\b"),
    _rule("has to", r"\b(?:has|have|had) to\b"),
    _rule("number for index", r"\b(?:its|their|by) numbers?\b"),
    _rule("whatever", r"\b(?:whatever|wherever|whoever|whichever)\b"),
    _rule(
        "question as summary",
        r"^(?:What|How|Which|Whether|Where|Who|Whose|In which|Of which|By which)\b(?!.*\?)",
        ("summary",),
        0,
    ),
    _rule("Return what", r"\bReturns? (?:what|those|that|how|which|whether .* is there)\b"),
    _rule(
        "Raises without if",
        r"^(?:\w*Error|\w*Exception): (?!If |if |When )",
        ("summary", "docstring"),
        0,
    ),
    _rule(
        "odd verb",
        r"\bgo(?:es)? on\b|\bmend(?:s|ed)?\b|\bhitherto\b|\bthereof\b|\bmeanwhile\b|\bin place of\b",
    ),
    _rule("fragment as comment", rf"^{_words(_OPENERS)}\b", ("comment",)),
)

_WORD = re.compile(r"[A-Za-z][A-Za-z'-]+")
_CODE = re.compile(r"``[^`]*``|`[^`]*`|\[[^\]]*\]\([^)]*\)|https?://\S+")
_NOT_PROSE = ("noqa", "type:", "fmt:", "ruff:", "usr/bin")


def count_words(text: str) -> int:
    """Return the number of words of two letters or more."""
    return len(_WORD.findall(text))


def broken_rules(passage: Passage) -> list[str]:
    """Return the name of a rule for each stilted phrase of a passage.

    >>> broken_rules(Passage(None, 1, "summary", "Return what is held."))
    ['free relative clause', 'Return what']
    """
    text = _CODE.sub("X", passage.text)
    names = []
    for rule in RULES:
        if not rule.kinds or passage.kind in rule.kinds:
            names += [rule.name] * len(rule.pattern.findall(text))
    return names


def passages(path: pathlib.Path) -> list[Passage]:
    """Return the prose of a Python, Markdown or YAML file.

    Args:
        path: File to read. Of a YAML file only comments and `help` texts count.
    """
    readers = {".py": _python_passages, ".md": _markdown_passages, ".yaml": _yaml_passages}
    source = path.read_text("utf-8")
    return [Passage(path, *rest) for rest in readers[path.suffix](source)]


def _python_passages(source):
    tree = ast.parse(source)
    bare_strings = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    yield from _docstrings(tree)
    yield from _messages(tree, bare_strings)
    yield from _comments(source)


def _docstrings(tree):
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        docstring = ast.get_docstring(node) if isinstance(node, documented) else None
        for offset, line in enumerate((docstring or "").splitlines()):
            line = line.strip()
            if line and not line.startswith((">>>", "...")):
                kind = "docstring" if offset else "summary"
                yield node.body[0].lineno + offset, kind, line


def _messages(tree, skipped):
    """Yield string constants that are long enough to be sentences."""
    parts_of_fstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            constants = [part for part in node.values if isinstance(part, ast.Constant)]
            parts_of_fstrings.update(constants)
            text = " X ".join(constant.value for constant in constants)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node in skipped or node in parts_of_fstrings:
                continue
            text = node.value
        else:
            continue
        if count_words(text) >= MIN_MESSAGE_WORDS:
            yield node.lineno, "message", " ".join(text.split())


def _comments(source):
    last_line = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        text = token.string.lstrip("#!: ").strip()
        if text and not text.startswith(_NOT_PROSE):
            is_first = line > last_line + 1
            yield line, "comment" if is_first else "comment_rest", text
        last_line = line


def _markdown_passages(source):
    is_code = False
    for line_number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and line.strip():
            yield line_number, "markdown", line.strip()


def _yaml_passages(source):
    for line_number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("#"):
            yield line_number, "markdown", line.strip("# ")
    for event in yaml.compose(source).value if source.strip() else ():
        yield from _help_texts(event)


def _help_texts(pair):
    """Yield the `help` and `usage` texts below a pair of YAML nodes."""
    key, value = pair
    if isinstance(value, yaml.MappingNode):
        for inner in value.value:
            yield from _help_texts(inner)
    elif key.value in ("help", "usage"):
        yield value.start_mark.line + 1, "message", " ".join(value.value.split())


def default_files() -> list[pathlib.Path]:
    """Return the files with prose of the repository, sorted."""
    files = [*ROOT.glob("*.md"), ROOT / "dtransformer" / "cli" / "commands.yaml"]
    for folder in FOLDERS:
        for suffix in ("py", "md"):
            files += (ROOT / folder).rglob(f"*.{suffix}")
    return sorted(file for file in files if "__pycache__" not in file.parts)


def group_name(passage: Passage) -> str:
    """Return the name of the group that a passage counts for.

    Markdown and YAML files are scored one by one, Python files by folder. The package's
    strings, such as error texts, are scored separately from its docstrings and comments.
    """
    path = passage.path.resolve().relative_to(ROOT)
    if path.suffix != ".py":
        return path.as_posix()
    folder = path.parent.as_posix()
    is_package_message = passage.kind == "message" and path.parts[0] == "dtransformer"
    return f"{folder} (messages)" if is_package_message else folder


class Score(typing.NamedTuple):
    """Number of stilted phrases and of words."""

    hits: int
    words: int

    @property
    def per_thousand(self) -> float:
        """Hits per 1,000 words."""
        return 1000 * self.hits / max(self.words, 1)


def scores(prose: typing.Iterable[Passage]) -> dict[str, Score]:
    """Return the score of each folder and page, by `group_name`."""
    hits, words = collections.Counter(), collections.Counter()
    for passage in prose:
        # The strings of tests, benchmarks and the like are data more often than sentences.
        if passage.kind == "message" and not group_name(passage).startswith("dtransformer"):
            continue
        group = group_name(passage)
        hits[group] += len(broken_rules(passage))
        words[group] += count_words(passage.text)
    return {group: Score(hits[group], words[group]) for group in sorted(words)}


def read_ceilings(text: str) -> dict[str, int]:
    """Return the ceilings of a table: a group, a tab and an integer in each line."""
    rows = (line.rsplit("\t", 1) for line in text.splitlines() if line)
    return {group: int(ceiling) for group, ceiling in rows}


def lower_ceilings() -> None:
    """Write the current scores, rounded up, as ceilings; keep ceilings that are lower already."""
    old = read_ceilings(CEILINGS.read_text("utf-8")) if CEILINGS.exists() else {}
    lines = []
    for group, score in scores(_read(default_files())).items():
        ceiling = max(math.ceil(score.per_thousand), DEFAULT_CEILING)
        ceiling = min(ceiling, old.get(group, ceiling))
        if ceiling > DEFAULT_CEILING:
            lines.append(f"{group}\t{ceiling}\n")
    CEILINGS.write_text("".join(lines), "utf-8")


def _read(files):
    return [passage for file in files for passage in passages(file)]


def _expand(path):
    if path.is_file():
        return [path]
    suffixes = (".py", ".md")
    return sorted(file for file in path.rglob("*") if file.suffix in suffixes)


def main() -> None:
    """Print scores or hits, or lower the ceilings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "paths", nargs="*", type=pathlib.Path, help="files or folders (default: all)"
    )
    parser.add_argument("--show", action="store_true", help="print every hit")
    parser.add_argument(
        "--lower", action="store_true", help="lower the ceilings to the current scores"
    )
    args = parser.parse_args()
    if args.lower:
        lower_ceilings()
        return
    files = [file for path in args.paths for file in _expand(path)] or default_files()
    prose = _read(files)
    if args.show:
        for passage in prose:
            for name in broken_rules(passage):
                print(f"{passage.path}:{passage.line}: {name}: {passage.text[:110]}")
    table = scores(prose)
    for group, score in table.items():
        print(f"{score.per_thousand:6.1f}  {score.words:7,} words  {group}")
    hits = sum(score.hits for score in table.values())
    words = sum(score.words for score in table.values())
    print(f"{Score(hits, words).per_thousand:.1f} hits per 1,000 words ({hits:,} in {words:,})")


if __name__ == "__main__":
    main()
