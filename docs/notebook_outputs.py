"""Run a notebook without a notebook server, and store its printed text and its plots.

python docs/notebook_outputs.py examples/quickstart.ipynb
"""

import argparse
import base64
import contextlib
import io
import json
import os
import pathlib

os.environ["MPLBACKEND"] = "Agg"


def run_cell(source, names):
    """Run the code of a cell. Return its outputs in the notebook format."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "cell", "exec"), names)
    outputs = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    return outputs + plots()


def plots():
    """Close the open figures of matplotlib. Return them as PNG outputs."""
    from matplotlib import pyplot

    outputs = []
    for figure_number in pyplot.get_fignums():
        data = io.BytesIO()
        pyplot.figure(figure_number).savefig(data, format="png", dpi=80, bbox_inches="tight")
        picture = {"image/png": base64.b64encode(data.getvalue()).decode()}
        outputs.append({"data": picture, "metadata": {}, "output_type": "display_data"})
    pyplot.close("all")
    return outputs


def main():
    """Run the notebook that the command line names, and write it with its outputs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=pathlib.Path)
    path = parser.parse_args().notebook
    notebook = json.loads(path.read_text("utf-8"))
    names = {"__name__": "__main__"}
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(codes, start=1):
        cell["outputs"] = run_cell("".join(cell["source"]), names)
        cell["execution_count"] = count
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    path.write_text(f"{text}\n", "utf-8")


if __name__ == "__main__":
    main()
