"""The part of docs/planner.md that is made: every published row beside ours."""

from dtransformer.planner import check

BEGIN = "<!-- made by python benchmarks/planner_page.py -->"
END = "<!-- made until here -->"


def made_part() -> str:
    """Return the tables as Markdown."""
    found = check.tables()
    lines = [*_markdown(check.summary(found)), *check.lines_of(found, _markdown)]
    return "\n".join(
        line.replace("## ", "### ", 1) if line[:3] == "## " else line for line in lines
    )


def with_made_part(page: str) -> str:
    """Return a page whose part between the two marks is made anew."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{made_part()}\n\n{END}{after}"


def _markdown(rows):
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    rule = "|" + "|".join([" --- ", *[" ---: "] * (len(rows[0]) - 1)]) + "|"
    return [lines[0], rule, *lines[1:]]
