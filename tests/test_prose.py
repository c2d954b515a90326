"""Language gate: no folder or page may become harder to read.

Each folder and page has a ceiling of stilted phrases per 1,000 words in tests/prose_ceilings.tsv.
After an improvement, run `python -m harness.prose --lower`, which never raises a ceiling.
"""

import functools
import pathlib
import subprocess

import pytest

from harness import prose

CEILINGS = prose.read_ceilings(prose.CEILINGS.read_text("utf-8"))
MAX_SHOWN = 40


@functools.cache
def read_passages():
    """Return the passages of all files. Reading takes seconds, so collecting tests does not."""
    return [passage for file in prose.default_files() for passage in prose.passages(file)]


def find_broken_rules(text, kind="docstring"):
    return prose.broken_rules(prose.Passage(pathlib.Path("example.py"), 1, kind, text))


def test_no_folder_or_page_exceeds_its_ceiling():
    lines = []
    for group, score in prose.scores(read_passages()).items():
        ceiling = CEILINGS.get(group, prose.DEFAULT_CEILING)
        if score.per_thousand > ceiling:
            lines.append(f"{group}: {score.per_thousand:.1f} per 1,000 words, at most {ceiling}")
            lines += hits_in_group(group)[:MAX_SHOWN]
    assert not lines, "\n".join(["rewrite in plain English (see CONTRIBUTING.md):", *lines])


def hits_in_group(group):
    return [
        f"    {passage.path.relative_to(prose.ROOT)}:{passage.line}: {name}: {passage.text[:90]}"
        for passage in read_passages()
        if prose.group_name(passage) == group
        for name in prose.broken_rules(passage)
    ]


def test_ceilings_name_existing_folders_and_pages():
    unknown = set(CEILINGS) - set(prose.scores(read_passages()))
    assert not unknown, f"run `python -m harness.prose --lower` to remove {sorted(unknown)}"


def test_ceilings_only_fall():
    path = prose.CEILINGS.relative_to(prose.ROOT).as_posix()
    log = git("log", "--format=%H", "--", path)
    if log is None:
        pytest.skip("not a git checkout")
    raised = []
    for commit in log.split():
        earlier = prose.read_ceilings(git("show", f"{commit}:{path}") or "")
        raised += [
            f"{group}: {ceiling}, but {earlier[group]} in {commit[:8]}"
            for group, ceiling in CEILINGS.items()
            if ceiling > earlier.get(group, ceiling)
        ]
    assert not raised, "\n".join(["ceilings may only fall:", *raised])


def git(*args):
    """Return the output of a git command, or `None` if it fails."""
    try:
        process = subprocess.run(["git", *args], cwd=prose.ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return None if process.returncode else process.stdout


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Return what is held.", "free relative clause"),
        ("The axes over which a weight is sharded.", "preposition + which"),
        ("Sums are those of the data-parallel group.", "those/that of"),
        ("group: None where no group exists.", "None for/where"),
        ("As from `counts`.", "as of/from/there"),
        ("Identical but for the seed.", "archaic adverb"),
        ("It tells of a lost mask.", "things that tell"),
        ("Positions are of a text.", "predicate genitive"),
        ("Load the checkpoint that there is.", "existential tail"),
        ("So many elements.", "vague quantity"),
        ("Read its own rows.", "own"),
        ("The mask has to be given.", "has to"),
        ("Stages by number.", "number for index"),
        ("Works whatever the layout.", "whatever"),
        ("ValueError: the mask is missing.", "Raises without if"),
        ("Training goes on.", "odd verb"),
    ],
)
def test_stilted_phrase_is_found(text, rule):
    assert rule in find_broken_rules(text)


def test_questions_are_found_in_summaries_only():
    assert find_broken_rules("How work is divided.", "summary") == ["question as summary"]
    assert not find_broken_rules("How work is divided.", "docstring")
    assert not find_broken_rules("Which layout fits?", "summary")


def test_fragments_are_found_at_the_start_of_comments_only():
    assert find_broken_rules("which the update changes", "comment") == ["fragment as comment"]
    assert not find_broken_rules("which the update changes", "comment_rest")


@pytest.mark.parametrize(
    "text",
    [
        "Return the segment ids of queries and keys.",
        "ValueError: If `num_heads` does not divide `hidden_size`.",
        "Call `what is held` in code, which no rule reads.",
        "See [what is held](https://example.org/what-is-held).",
    ],
)
def test_plain_sentence_passes(text):
    assert not find_broken_rules(text)


def test_all_kinds_of_prose_are_read(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        '"""Summary of the module.\n\nDetails.\n"""\n'
        "# First comment line\n# second line\n"
        "def check(x):\n"
        '    raise ValueError(f"Received {x} but expected four words.")\n'
    )
    kinds = {passage.kind: passage.text for passage in prose.passages(module)}
    assert kinds == {
        "summary": "Summary of the module.",
        "docstring": "Details.",
        "comment": "First comment line",
        "comment_rest": "second line",
        "message": "Received X but expected four words.",
    }
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```\nwhat is held\n```\n")
    assert [passage.text for passage in prose.passages(page)] == ["# Title"]
    commands = tmp_path / "commands.yaml"
    commands.write_text(
        'train:\n  help: "train a model"\n  options:\n    --run: {help: "run folder"}\n'
    )
    assert [passage.text for passage in prose.passages(commands)] == ["train a model", "run folder"]
