"""One meaning a word: the private words that this library once had are gone.

docs/glossary.md has the words that are used, and what they mean. A pattern here matches what can
only be an old word: phrases and names, where the word alone is English, Python's or TensorFlow's.
"""

import ast
import pathlib
import re
import typing

import pytest

ROOT = pathlib.Path(__file__).parents[1]


class Old(typing.NamedTuple):
    """A word that is not used any more.

    Args:
        pattern: what it is found by.
        say: what to say instead.
        where: in which files it is looked for, a pattern; by default in all.
    """

    pattern: str
    say: str
    where: str = ""


# Where tensors, weights and layouts are spoken of, not sentences, files or text.
TENSORS = r"dtransformer/(parallel|layers|models|trainers|reports)|docs/|README"
PACKAGE = r"dtransformer/"
CHECKPOINT = r"dtransformer/trainers/(checkpoint|resume_state)|tests/trainers/checkpoint|docs/check"

OLD_WORDS = [
    # The devices that compute together.
    Old(r"\b[Ii]slands?\b", "mesh, or model-parallel group"),
    Old(r"\b[Dd]ata[ _]groups?\b", "data-parallel group"),
    Old(r"\b[Mm]odel[ _]groups?\b", "model-parallel group"),
    # Who computes.
    Old(r"\b[Pp]lanes?\b|_planes?\b|[a-z]Planes?\b", "engine, or optimizer step",
        r"(?!dtransformer/datasets/embedded|tests/datasets|benchmarks/gpu_parts/kernels|tests/trainers/test_xla)"),
    # Parts of tensors, and tensors that have none.
    Old(r"num_slices|slice_(entries|size|elements)|is_sliced|own_slices?\b|_slices\b"
        r"(?<!from_tensor_slices)(?<!shape_and_slices)", "shard"),
    Old(r"\b(flat|row|column|weight|gradient|local|own|its|rank's) slices?\b", "shard"),
    Old(r"\bslices? (of|over) (the |each |an? |all )?(\w+'s )?(batch|weight|sequence|expert|"
        r"operation|table|gradient|tensor|model|data|group)", "shard"),
    Old(r"\bcuts? (over|along|by (rows|columns)|into (flat )?slices)\b", "sharded over", TENSORS),
    Old(r"\b(is|are|be|was|not|axis|that) cuts?\b(?! (off|short))", "is sharded", TENSORS),
    Old(r"\bcuts? (a |the |every |each )?(weights?|operations?|tables?|embeddings?|it|them) ",
        "shards", TENSORS),
    Old(r"\b(stays?|keeps?|are|is|kept|has the) whole\b", "replicated, unsharded or full", TENSORS),
    Old(r"\bwhole (weights?|tables?|gradients?)\b|why_whole", "full, or unsharded", TENSORS),
    Old(r"\bentries of (a |the |each |its )?(weights?|gradients?|tensors?|shards?)\b|num_entries",
        "elements"),
    Old(r"\b[Pp]ins?\b|\b[Pp]inn(ed|ing)\b", "relayout, or constrain", TENSORS + "|tests/"),
    # What is sent.
    Old(r"\b[Ww]ires?\b", "collective, or send/recv"),
    Old(r"\b(one|a|small|of the) messages?\b|\bmessages? (between|from|to|of) (the |both )?"
        r"(stages?|ranks?)\b|Messages\b|\bname of the message\b", "collective, or send/recv"),
    Old(r"\bfusion[ _]groups?\b", "bucket"),
    # Pipelines.
    Old(r"\b[Ss]tand[-_]ins?\b|\b[Ss]tand in for\b", "placeholder output"),
    Old(r"pipeline_parts|with_copies|num_parts|\bpart_of\(|_parts_of\(|stage_plan|StagePlan",
        "model chunk, or dataflow"),
    Old(r"\balike (blocks?|chunks?|calls?)\b|[Aa]like_?(Blocks|Chunks|[Cc]alls)\b|\b[Ll]ikeness\b",
        "shared block, shared chunk, call grouping; signature", PACKAGE),
    Old(r"loop_constants|around_loop|computed_once", "loop invariant, hoist", PACKAGE),
    Old(r"\blistening\b(?! (to|on|for))|\btold_as\b(?!_it_is)|tell_all", "report, collect", PACKAGE),
    Old(r"first_values|same_batch\.|SameBatch|\brefit\.",
        "initial broadcast; replica consistency; elastic config", PACKAGE),
    Old(r"HeldParameter|UpdateUnits?\b|updated_shards|UpdatedShard",
        "parameter proxy, optimizer parameters, shard plan", PACKAGE),
    Old(r"call_views|CallViews|OwnStage|own_stage\b|OneDevice",
        "stage dispatch, local stage, local executor", PACKAGE),
    # Checkpoints.
    Old(r"\b[Bb]ox(es)?\b|_box\b|box_", "bounds, or offsets and sizes", CHECKPOINT),
    Old(r"\b[Pp]ieces?\b|pieces_|_pieces?\b", "checkpoint shard", CHECKPOINT),
    Old(r"\bslices?\b(?![(:,\]])", "shard", CHECKPOINT),
]  # fmt: skip

# The changelog may say what things were called.
TEXTS = [
    path
    for pattern in ("*", *(f"{top}/**/*" for top in ("dtransformer", "docs", "examples")),
                    *(f"{top}/**/*" for top in ("tests", "benchmarks", "harness", ".ci")))
    for path in sorted(ROOT.glob(pattern))
    if (path.suffix in {".py", ".md", ".svg", ".sh", ".yaml", ".yml", ".cfg", ".toml"}
        or path.name == "Makefile")
    and path != pathlib.Path(__file__) and path.name != "CHANGELOG.md"
]  # fmt: skip


@pytest.mark.parametrize("old", OLD_WORDS, ids=lambda old: f"{old.say}: {old.pattern}"[:60])
def test_words(old):
    found = []
    for path in TEXTS:
        name = path.relative_to(ROOT).as_posix()
        if re.match(old.where, name):
            for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
                if re.search(old.pattern, line):
                    found.append(f"{name}:{number}: {line.strip()}")
    assert not found, "\n".join([f"say {old.say!r}; see docs/glossary.md:", *found])


# A module's docstring begins with a noun or a verb.
QUESTIONS = {"What", "How", "Which", "Where", "Whether", "Why", "Who", "When"}


def test_docstrings_of_modules_ask_no_questions():
    wrong = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in sorted((ROOT / "dtransformer").rglob("*.py"))
        if (text := ast.get_docstring(ast.parse(path.read_text("utf-8")))) is not None
        and text.split()[0] in QUESTIONS
    ]
    assert not wrong, "\n".join(["begin with a noun or a verb:", *wrong])
