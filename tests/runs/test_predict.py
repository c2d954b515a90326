"""`predict` and `embed` return the network's result for each line, in order."""

import io
import json
import types

import numpy as np
import pytest

from dtransformer.cli import main
from dtransformer.runs.run import make_trainer
from dtransformer.runs.tasks import load_run
from tests.runs.small_records import CONFIGS, write, write_config

TEXTS = ["one or two, yes", "", "zero", "seven or six and five or four, no", "one or two, yes"]
BIO = [
    {"tokens": ["Ann", "Lee", "saw", "Rome", "."], "labels": ["B-P", "I-P", "O", "B-L", "O"]},
    {"tokens": ["Rome", "has", "Bob", "."], "labels": ["B-L", "O", "B-P", "O"]},
]
SETTINGS = {"token_classification": ["data.train=bio.jsonl", "data.dev=bio.jsonl"]}
COMMANDS = {
    "classification": "predict --run {} < FILE",
    "token_classification": "predict --run {} < FILE",
    "regression": "predict --run {} < FILE",
    "reward": "predict --run {} < FILE",
    "embedding": "embed --run {} < FILE > vectors.npy",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Working folder for a short run of each task."""
    folder = tmp_path_factory.mktemp("place")
    write(folder)
    (folder / "bio.jsonl").write_text("\n".join(map(json.dumps, BIO * 6)))
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def trained(place):
    """Function that trains a task once and returns the printed text."""
    printed = {}

    def train(name, capsys):
        if name not in printed:
            path = write_config(name, place)
            settings = ["training.max_steps=3", *SETTINGS.get(name, ())]
            assert main(["train", "--config", str(path), "--set", *settings]) == 0
            printed[name] = capsys.readouterr().out
        return printed[name]

    return train


def run(monkeypatch, capsys, *command, lines=TEXTS):
    """Run a command with lines of standard input and return the printed lines."""
    data = "".join(f"{line}\n" for line in lines).encode()
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=io.BytesIO(data)))
    code = main([*map(str, command)])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err.splitlines()


def softmax(logits):
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def alone(task, text):
    """Return the network's output for one text in a row without padding."""
    ids = task.tokenizer.encode([text], add_special_ids=True).to_list()[0]
    ids = ids[: task.config.data.length]
    tokens = np.array([ids or [0]], "int32")
    mask = np.full_like(tokens, len(ids) > 0)
    return task.core({"tokens": tokens, "attention_mask": mask}).numpy()[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_last_line_is_a_command_for_the_run(name, trained, capsys):
    command = COMMANDS[name].format(f"runs/{name}")
    printed = trained(name, capsys).splitlines()
    assert f"Next:       dtransformer {command}" in printed


def test_probabilities_of_a_text_do_not_depend_on_other_texts(trained, monkeypatch, capsys):
    trained("classification", capsys)
    task = load_run("runs/classification")
    for batch_size in (1, 4):
        command = ["predict", "--run", "runs/classification", "--batch-size", batch_size]
        code, lines, _ = run(monkeypatch, capsys, *command, "--json")
        assert code == 0 and len(lines) == len(TEXTS)
        for text, line in zip(TEXTS, lines):
            result, expected = json.loads(line), softmax(alone(task, text))
            assert list(result["probabilities"]) == task.config.data.labels == ["no", "yes"]
            np.testing.assert_allclose(list(result["probabilities"].values()), expected, atol=1e-6)
            assert result["label"] == ["no", "yes"][expected.argmax()]
            assert result["probability"] == pytest.approx(expected.max(), abs=1e-6)
    code, lines, _ = run(monkeypatch, capsys, "predict", "--run", "runs/classification")
    assert lines[0] == f"{json.loads(line)['label']}\t{json.loads(line)['probability']:.4f}"


def test_regression_predictions_of_text_pairs_match_evaluation(trained, place, monkeypatch, capsys):
    """The predictions match `evaluate`. Records have a second text and token types."""
    trained("regression", capsys)
    command = ["predict", "--run", "runs/regression", "--data", "numbers.jsonl"]
    code, lines, _ = run(monkeypatch, capsys, *command)
    task = load_run("runs/regression")
    task.config.data.dev = task.config.data.train
    task.read("dev")
    expected = task.predictions(make_trainer(task, 1), "dev")[:, 0]
    np.testing.assert_allclose([float(x) for x in lines], expected, rtol=1e-5)
    assert code == 0 and len(lines) == 24


def test_words_have_character_offsets_labels_and_probabilities(trained, monkeypatch, capsys):
    trained("token_classification", capsys)
    command = ["predict", "--run", "runs/token_classification"]
    texts = ["  Ann (Lee)  saw U.S. cities.", "", "Ann\tLee"]
    code, lines, _ = run(monkeypatch, capsys, *command, "--json", lines=texts)
    result = [json.loads(line)["words"] for line in lines]
    words = [[word["word"] for word in row] for row in result]
    punctuated = ["Ann", "(", "Lee", ")", "saw", "U.S", ".", "cities", "."]
    assert code == 0 and words == [punctuated, [], ["Ann", "Lee"]]
    for text, row in zip(texts, result):
        for word in row:
            assert text[word["start"] : word["end"]] == word["word"]
    task = load_run("runs/token_classification")
    # A word's first token may be the space before it, or begin with it.
    ((_, places, _),) = task.tokenizer.encode_with_offsets(["Ann Lee"])
    first = [next(i for i, (_, end) in enumerate(places) if end > start) for start in (0, 3)]
    probabilities = softmax(alone(task, "Ann Lee")[first])
    names = [task.config.data.labels[x] for x in probabilities.argmax(-1)]
    assert [word["label"] for word in result[2]] == names
    predicted = [word["probability"] for word in result[2]]
    np.testing.assert_allclose(predicted, probabilities.max(-1), atol=1e-6)
    code, lines, _ = run(monkeypatch, capsys, *command, lines=["Ann\tLee"])
    assert lines == [f"Ann/{names[0]} Lee/{names[1]}"]


def test_entities_of_predicted_labels(trained, monkeypatch, capsys):
    trained("token_classification", capsys)
    task = load_run("runs/token_classification")
    names = task.config.data.labels
    record = {"tokens": ["Ann", "Lee", "saw"]}
    expected_names = ["B-P", "I-P", "O"]
    output = np.stack([5.0 * (np.array(names) == name) for name in expected_names])
    row = [(np.arange(3), np.arange(3))]
    result = task.prediction(record, row, output)
    assert result["entities"] == [{"type": "P", "start": 0, "end": 7}]
    assert [word["label"] for word in result["words"]] == expected_names


def test_logged_f1_is_the_entity_f1_for_every_batch_size(trained, place, capsys):
    trained("token_classification", capsys)
    lines = (place / "runs/token_classification/metrics.jsonl").read_text().splitlines()
    logged = json.loads(lines[-1])["val_f1"]
    for batch_size in (1, 5, 12):
        task = load_run("runs/token_classification")
        task.config.training.batch_size = batch_size
        task.read("dev")
        trainer = make_trainer(task, 1)
        assert task.results(trainer, task.batches("dev"))["f1"] == pytest.approx(logged)
    names = task.config.data.labels
    ids = [np.array([names.index(x) for x in record["labels"]]) for record in BIO]
    predicted = [ids[0].copy(), ids[1]]
    predicted[0][1] = names.index("O")  # "Ann" alone is no entity of the labels
    assert task.label_scores(ids, predicted)["f1"] == pytest.approx(2 * 3 / (4 + 4))
    # An entity ends with its sentence.
    split = [np.array([names.index("B-P")]), np.array([names.index("I-P")])]
    full = [np.array([names.index("B-P")]), np.array([names.index("O")])]
    assert task.label_scores(split, full)["f1"] == pytest.approx(2 * 1 / (2 + 1))


def test_vectors_are_pooled_and_normalized_as_in_training(trained, place, monkeypatch, capsys):
    assert "val_recall@1" in trained("embedding", capsys)
    command = ["embed", "--run", "runs/embedding"]
    code, _, _ = run(monkeypatch, capsys, *command, "--out", "vectors.npy", "--max-length", 16)
    vectors, task = np.load("vectors.npy"), load_run("runs/embedding")
    assert code == 0 and vectors.dtype == np.float32 and vectors.shape == (len(TEXTS), 16)
    np.testing.assert_allclose(vectors, [alone(task, text) for text in TEXTS], atol=1e-6)
    code, lines, notes = run(monkeypatch, capsys, *command, "--json")
    np.testing.assert_array_equal([json.loads(line) for line in lines], vectors)
    assert "1 of 5 texts have more than 16 tokens" in notes[-1]


def test_vectors_go_to_a_pipe_and_not_to_a_terminal(trained, place, monkeypatch, capsysbinary):
    command = ["embed", "--run", "runs/embedding", "--data", "queries.jsonl"]
    assert main(command) == 0
    vectors = np.load(io.BytesIO(capsysbinary.readouterr().out))
    assert vectors.shape == (8, 16)
    assert main([*command, "--field", "positive"]) == 0
    others = np.load(io.BytesIO(capsysbinary.readouterr().out))
    assert np.abs(others - vectors).max() > 1e-3
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(command) == 2
    assert b"NumPy file would go to the terminal" in capsysbinary.readouterr().err


def test_recall_counts_equal_texts_as_one(trained, place, capsys):
    trained("embedding", capsys)
    task = load_run("runs/embedding")
    rows = [{"query": f"{n}?", "positive": "same"} for n in range(8)]
    (place / "same.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["evaluate", "--run", "runs/embedding", "--data", "same.jsonl", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["recall@1"] == result["mrr"] == 1 and "loss" in result
    assert task.config.data.dev  # The file of --data replaced it.


def test_rewards_of_answers_texts_and_pairs(trained, place, monkeypatch, capsys):
    trained("reward", capsys)
    command = ["predict", "--run", "runs/reward"]
    code, pairs, _ = run(monkeypatch, capsys, *command, "--data", "pairs.jsonl", "--json")
    records = list(map(json.loads, (place / "pairs.jsonl").read_text().splitlines()))
    result = list(map(json.loads, pairs))
    assert code == 0 and len(result) == len(records)
    for side in ("chosen", "rejected"):
        chats = [json.dumps({"messages": x["prompt"] + x[side]}) for x in records]
        code, lines, _ = run(monkeypatch, capsys, *command, lines=chats)
        np.testing.assert_allclose(
            [float(line) for line in lines], [row[side] for row in result], rtol=1e-4
        )
    code, lines, _ = run(monkeypatch, capsys, *command, lines=["one", "two"])
    assert code == 0 and len(lines) == 2


def test_exported_folder_predicts_as_its_run(place, monkeypatch, capsys):
    path = write_config("token_classification", place)
    command = ["train", "--config", str(path), "--run", "runs/labels"]
    settings = ["training.max_steps=2", "export.folder=models/labels"]
    assert main([*command, "--set", *settings]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].endswith("and dtransformer predict --model models/labels < FILE")
    outputs = [
        run(monkeypatch, capsys, "predict", *source, "--json")
        for source in (["--run", "runs/labels"], ["--model", "models/labels"])
    ]
    for line, expected in zip(outputs[1][1], outputs[0][1], strict=True):
        line, expected = json.loads(line)["words"], json.loads(expected)["words"]
        assert [word["label"] for word in line] == [word["label"] for word in expected]
        np.testing.assert_allclose(
            [word["probability"] for word in line],
            [word["probability"] for word in expected],
            atol=1e-6,
        )
    assert main(["generate", "--model", "models/labels", "--prompt", "a"]) == 2
    assert "dtransformer predict" in capsys.readouterr().err


def test_exported_classifier_keeps_its_labels(place, capsys):
    """Also if it was trained from scratch, with a head of no published family."""
    path = write_config("classification", place)
    command = ["train", "--config", str(path), "--run", "runs/bert"]
    settings = ["data.length=16", "model.positions=learned", "export.family=bert"]
    settings += ["training.max_steps=1", "export.folder=models/bert"]
    assert main([*command, "--set", *settings]) == 0
    capsys.readouterr()
    config = json.loads((place / "models/bert/config.json").read_text())
    assert config["id2label"] == {"0": "no", "1": "yes"}
    command = ["predict", "--data", "labels.jsonl", "--json"]
    assert main([*command, "--run", "runs/bert"]) == 0
    expected = capsys.readouterr().out.splitlines()
    assert main([*command, "--model", "models/bert"]) == 0
    for exported_line, line in zip(capsys.readouterr().out.splitlines(), expected, strict=True):
        exported_line, line = (json.loads(x)["probabilities"] for x in (exported_line, line))
        assert exported_line == pytest.approx(line, abs=1e-6)


@pytest.mark.parametrize(
    "command, lines, message",
    [
        (["predict", "--run", "runs/embedding"], ["a"], "dtransformer embed --run FOLDER"),
        (
            ["embed", "--run", "runs/regression", "--json"],
            ["a"],
            "dtransformer predict --run FOLDER",
        ),
        (["predict", "--model", "llama"], ["a"], "which predicts neither labels nor vectors"),
        (["predict", "--run", "runs/classification"], [], "No text was given"),
        (["predict", "--run", "runs/classification"], ['{"text": "a"}', ""], "line 2"),
        (
            ["predict", "--run", "runs/classification"],
            ['{"text": 3}'],
            "line 1: `text` must be a text, got 3",
        ),
        (
            ["predict", "--run", "runs/classification"],
            ["{"],
            "add --text if the lines are not JSON",
        ),
        (["predict", "--run", "runs/classification", "--max-length", 99], ["a"], "32 positions"),
        (
            ["embed", "--run", "runs/embedding", "--json", "--field", "x"],
            ['{"y": "a"}'],
            "`text` is missing",
        ),
    ],
)
def test_predict_rejects_wrong_input_in_one_line(
    command, lines, message, trained, monkeypatch, capsys
):
    for name in ("embedding", "regression", "classification"):
        trained(name, capsys)
    code, printed, error = run(monkeypatch, capsys, *command, lines=lines)
    assert code == 2 and message in error[-1] and not printed


def test_text_option_reads_lines_in_braces(trained, monkeypatch, capsys):
    trained("classification", capsys)
    command = ["predict", "--run", "runs/classification", "--text"]
    code, lines, _ = run(monkeypatch, capsys, *command, lines=["{one}", '{"text": "a"}'])
    assert code == 0 and len(lines) == 2


@pytest.mark.parametrize(
    "name, expected",
    [
        ("classification", "Records (train): 24 with 249 tokens, 2 labels: no 18, yes 6"),
        ("token_classification", "2 labels: False 72, True 24"),
        ("regression", "labels from 1.4 to 1.7, 1.546 on average"),
    ],
)
def test_dry_run_counts_labels(name, expected, place, capsys):
    path = write_config(name, place)
    assert main(["train", "--config", str(path), "--dry-run"]) == 0
    assert expected in capsys.readouterr().out


def test_all_tasks_name_a_command():
    from dtransformer.cli.options import make_parser
    from dtransformer.runs.config import RunConfig
    from dtransformer.runs.tasks import make_task

    for name in CONFIGS:
        task = CONFIGS[name]["task"]
        command = make_task(RunConfig(task)).command.format("runs/x").partition(" <")[0]
        assert make_parser().parse_args(command.split()).run_by
