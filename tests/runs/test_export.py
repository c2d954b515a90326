"""An exported folder gives the same results as its run, in the types of its base."""

import json
import shutil

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from dtransformer.cli import main
from dtransformer.errors import InputError
from dtransformer.models import from_pretrained, save_pretrained
from dtransformer.runs.config import load_config
from dtransformer.runs.tasks import load_run
from harness.tolerances import PARITY_LOGITS
from tests.runs.small_records import CONFIGS, write

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
LLAMA, LLAMA_16 = {"from": "llama"}, {"from": "llama-16"}
ADAPTED = LLAMA_16 | {"adapters": {"rank": 2, "targets": "*attention/*_kernel"}}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Working folder with records and a Llama in float32 and bfloat16."""
    folder = tmp_path_factory.mktemp("place")
    write(folder)
    save_pretrained(from_pretrained(folder / "llama"), folder / "llama-16", dtype="bfloat16")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        yield folder


def train(task, place, name, model, *settings):
    """Train a task for two steps from a model, export it and return the exported folder."""
    path = place / f"{name}.yaml"
    path.write_text(json.dumps(CONFIGS[task] | {"model": model, "tokenizer": {}}))
    message = [f"export.folder=models/{name}", "training.max_steps=2", *settings]
    command = ["train", "--config", str(path), "--run", f"runs/{name}", "--set", *message]
    assert main(command) == 0
    return place / "models" / name


def read_types(folder):
    """Return the types of all tensors from the header of a folder's file."""
    with safe_open(folder / "model.safetensors", "np") as file:
        return {file.get_slice(name).get_dtype() for name in file.keys()}


@pytest.mark.parametrize(
    "name, task, settings",
    [
        ("reward", "reward", []),
        ("labels", "classification", []),
        ("last", "classification", ["data.pooling=last"]),
        ("numbers", "regression", []),
    ],
)
def test_exported_classifier_accepts_batches_in_transformers(name, task, settings, place):
    folder = train(task, place, name, LLAMA, *settings)
    config = json.loads((folder / "config.json").read_text())
    assert config["pad_token_id"] == 2  # The end token replaces the missing padding token.
    ids = np.random.default_rng(0).integers(3, 280, (3, 7))
    mask = np.arange(7) < np.array([[7], [4], [5]])
    ids = np.where(mask, ids, 2)
    ids[0, -1] = 2  # a text that ends with the end token
    model = transformers.LlamaForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        logits = model(**inputs).logits.numpy()
    inputs = {"tokens": ids, "attention_mask": mask.astype("int32")}
    run_logits = load_run(f"runs/{name}").core(inputs)
    np.testing.assert_allclose(run_logits, logits, rtol=0, atol=PARITY_LOGITS)


def test_padding_of_the_tokenizer_is_written(place):
    base = place / "padded"
    shutil.copytree(place / "llama", base)
    tokenizer = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"pad_token": "<unk>"}))
    folder = train("reward", place, "reward-padded", {"from": "padded"})
    assert json.loads((folder / "config.json").read_text())["pad_token_id"] == 0


@pytest.mark.parametrize("name, model", [("full", LLAMA_16), ("merged", ADAPTED)])
def test_weights_are_exported_in_the_type_of_their_base(name, model, place):
    folder = train("chat", place, name, model)
    assert read_types(folder) == {"BF16"}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    ids = np.arange(3, 13)[None]
    logits = load_run(f"runs/{name}").core(ids)
    np.testing.assert_allclose(from_pretrained(folder)(ids), logits, rtol=0, atol=3e-2)


def test_export_uses_the_requested_type(place):
    folder = train("chat", place, "wide", ADAPTED, "export.dtype=float32")
    assert read_types(folder) == {"F32"}
    ids = np.arange(3, 13)[None]
    logits = load_run("runs/wide").core(ids)
    np.testing.assert_allclose(from_pretrained(folder)(ids), logits, rtol=0, atol=1e-5)


def test_export_rejects_unknown_types(place):
    path = place / "wrong.yaml"
    path.write_text(json.dumps(CONFIGS["reward"] | {"export": {"dtype": "int8"}}))
    with pytest.raises(InputError, match="export.dtype"):
        load_config(path)


def test_each_tensor_keeps_its_type(place, tmp_path):
    """Files may contain a few float32 tensors. Weights of 16 bits keep their bits."""
    folder = tmp_path / "given"
    shutil.copytree(place / "llama-16", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype("float32") + 1e-4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    saved = save_pretrained(from_pretrained(folder), tmp_path / "saved")
    again = load_file(saved / "model.safetensors")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(again[name], tensor, strict=True)
    narrow = from_pretrained(place / "llama", dtype="bfloat16")
    assert read_types(save_pretrained(narrow, tmp_path / "narrow")) == {"BF16"}
    wide = save_pretrained(from_pretrained(folder), tmp_path / "wide", dtype="float32")
    assert read_types(wide) == {"F32"}


def test_export_rejects_values_outside_the_type(place, tmp_path):
    network = from_pretrained(place / "llama")
    network.embedding.table.assign(network.embedding.table * 1e8)
    with pytest.raises(InputError, match="not finite in float16.*Use .* a wider type"):
        save_pretrained(network, tmp_path / "saved", dtype="float16")
    assert not (tmp_path / "saved").exists()


def test_base_without_a_head_is_trained_for_labels_and_vectors(place, capsys):
    sizes = {"vocab_size": 290, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32}
    config = transformers.BertConfig(**sizes, num_attention_heads=2)
    transformers.BertModel(config).save_pretrained("bert")
    shutil.copy("llama/tokenizer.json", "bert")
    shutil.copy("llama/tokenizer_config.json", "bert")
    for task in ("classification", "embedding"):
        path = place / f"bert-{task}.yaml"
        path.write_text(json.dumps(CONFIGS[task] | {"model": {"from": "bert"}, "tokenizer": {}}))
        assert main(["train", "--config", str(path), "--dry-run"]) == 0
        folder = train(task, place, f"bert-{task}", {"from": "bert"})
        assert from_pretrained(folder).has_task_head
    path = place / "bert-masked.yaml"
    data = {"train": "text.txt", "length": 32}
    path.write_text(json.dumps({"task": "masked_lm", "data": data, "model": {"from": "bert"}}))
    assert main(["train", "--config", str(path), "--run", "runs/masked"]) == 2
    assert "bert has a PoolingHead, but task masked_lm trains" in capsys.readouterr().err


def test_runs_with_quantized_kernels_export_their_results(place, capsys):
    sizes = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 128}
    arguments = from_pretrained(place / "llama").arguments
    network = type(from_pretrained(place / "llama"))(**{**arguments, **sizes})
    network.build()
    shutil.copytree(place / "llama", place / "llama-64")
    save_pretrained(network, place / "llama-64", "llama", overwrite=True)
    adapters = {"rank": 2, "targets": "*_kernel", "base_dtype": "nf4"}
    model = {"from": "llama-64", "adapters": adapters}
    folder = train("chat", place, "quantized", model, "training.precision=float32")
    exported = from_pretrained(folder)
    run = load_run("runs/quantized").core
    assert any(weight.path.endswith("query_kernel_codes") for weight in run.weights)
    ids = np.random.default_rng(0).integers(3, 280, (2, 9))
    np.testing.assert_allclose(run(ids), exported(ids), rtol=0, atol=1e-5)
    again = {"from": "runs/quantized", "adapters": adapters}
    capsys.readouterr()
    path = place / "again.yaml"
    path.write_text(json.dumps(CONFIGS["chat"] | {"model": again, "tokenizer": {}}))
    assert main(["train", "--config", str(path), "--run", "runs/again"]) == 2
    assert "requires a published folder in `model.from`" in capsys.readouterr().err
