"""Damage folders of published models, adapters and token shards, and `.keras` files.

The cases compare the loaded values with the undamaged ones. Values without checksums may differ only
in the changed bytes. Edited fields must appear in the loaded object.
"""

import functools
import io
import json
import os
import shutil
import warnings
import zipfile

import h5py
import numpy as np
import safetensors.numpy
from fuzz_damage import ODD_TEXTS, Failure, damaged, edit
from fuzz_inputs import SENTENCES, small_network

from dtransformer import Trainer
from dtransformer.datasets import SubwordTokenizer, TokenShards, load_tokenizer, write_token_shards
from dtransformer.layers.heads import PoolingHead
from dtransformer.models import (
    CausalLM,
    MaskedLM,
    add_lora,
    from_pretrained,
    load_lora,
    save_lora,
    save_pretrained,
)
from dtransformer.models.lora import get_adapters
from dtransformer.models.one_stack import with_task_head
from dtransformer.models.pretrained.save import hf_config
from harness.byte_tokenizer import write_byte_tokenizer

VOCABULARY = 300
LLAMA = {
    "hidden_size": 8,
    "num_heads": 2,
    "num_kv_heads": 1,
    "num_layers": 1,
    "ffn_hidden_size": 12,
    "positions": "rotary",
    "hidden_act": "silu",
    "norm": "rms_norm",
    "gated": True,
    "use_bias": False,
    "tied_head": False,
    "embedding_scale": 1.0,
    "dropout_rate": 0.0,
    "pad_id": None,
    "start_id": 1,
    "end_id": 2,
}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [{"role": "user", "content": "A cat?"}, {"role": "assistant", "content": "Yes."}]


def prepare(folder):
    """Save the undamaged files and return a dict of kinds to functions of (rng, folder)."""
    warnings.simplefilter("ignore")
    published(folder / "llama")
    sentence_encoder(folder / "sentences")
    network = from_pretrained(folder / "llama")
    add_lora(network, 2, 8, "*kernel")
    for i, variable in enumerate(network.trainable_variables):
        variable.assign(np.random.default_rng(i).normal(size=variable.shape))
    for name, family in (("own", "dtransformer"), ("peft", "llama")):
        save_lora(network, folder / name, family)
    tokenizer = SubwordTokenizer.train(SENTENCES, 75)
    rng = np.random.default_rng(0)
    texts = [[SENTENCES[i] or "no" for i in rng.integers(0, 4, 3)] for _ in range(40)]
    for name, documents in (("shards", ["\n".join(x) for x in texts]), ("parts", texts)):
        write_token_shards(documents, tokenizer, folder / name, shard_tokens=400)
    trainer = Trainer(small_network())
    trainer.compile("adam", "mse", jit_compile=False)
    trainer.fit(np.ones((8, 4)), np.ones((8, 3)), batch_size=4, verbose=0)
    trainer.save(folder / "x.keras")
    return {
        ".keras": functools.partial(keras_file, folder / "x.keras", trainer, trainer.get_weights()),
        "published folder": functools.partial(published_folder, folder / "llama"),
        "sentence encoder": functools.partial(published_folder, folder / "sentences"),
        "adapters: own": functools.partial(adapters, folder / "llama", folder / "own"),
        "adapters: peft": functools.partial(adapters, folder / "llama", folder / "peft"),
        "token shards": functools.partial(shards, folder / "shards"),
        "token shards of parts": functools.partial(shards, folder / "parts"),
    }


def published(folder):
    """Save a Llama in two files with an index, its tokenizer and its generation config."""
    network = CausalLM(VOCABULARY, **LLAMA)
    network.build()
    save_pretrained(network, folder, "llama")
    write_byte_tokenizer(folder, SENTENCES, TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 5}))
    original_file = folder / "model.safetensors"
    tensors, file_by_tensor = safetensors.numpy.load_file(original_file), {}
    for i in range(2):
        name = f"model-{i}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::2]}
        safetensors.numpy.save_file(part, folder / name, metadata={"format": "pt"})
        file_by_tensor |= dict.fromkeys(part, name)
    original_file.unlink()
    index = {"metadata": {}, "weight_map": file_by_tensor}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def sentence_encoder(folder):
    """Save a BERT with pooled vectors in the format of sentence-transformers, and its tokenizer."""
    network = MaskedLM(VOCABULARY, hidden_size=8, num_heads=2, num_layers=1, max_length=32)
    network = with_task_head(network, PoolingHead("mean", normalize=True))
    network.build()
    save_pretrained(network, folder, "bert")
    write_byte_tokenizer(folder, SENTENCES, TEMPLATE)


def damage_file(rng, path):
    """Damage a random file of a folder.

    Returns:
        A `(name, changed)` tuple: the name of the file and the number of changed bytes. `changed` is
        `None` if the size changed, the file was removed, or its JSON was edited.
    """
    file = rng.choice(sorted(x for x in path.rglob("*") if x.is_file()))
    name, content, kind = file.relative_to(path).as_posix(), file.read_bytes(), rng.randrange(8)
    if kind == 0:
        file.unlink()
        if rng.random() < 0.5:
            rng.choice([os.mkfifo, os.mkdir])(file)
        return name, None
    if file.suffix == ".json" and kind <= 5:
        file.write_text(json.dumps(edit(rng, json.loads(content))))
        return name, None
    if kind == 6:  # Changes of single bytes keep the size.
        changed = bytearray(content)
        for _ in range(rng.choice([1, 1, 4])):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        file.write_bytes(changed)
        return name, sum(a != b for a, b in zip(content, changed))
    changed = damaged(rng, content)
    file.write_bytes(changed)
    same = len(changed) == len(content)
    return name, sum(a != b for a, b in zip(content, changed)) if same else None


def compare(actual, expected, name, changed):
    """Raise a Failure if more values differ than bytes were changed."""
    shapes = [[np.shape(x) for x in arrays] for arrays in (actual, expected)]
    if shapes[0] != shapes[1]:
        raise Failure(f"wrong data: {name}: {shapes[0]}, expected {shapes[1]}")
    if not all(np.isfinite(x).all() for x in actual):
        raise Failure(f"wrong data: {name}: not finite")
    num_differences = sum(int((a != b).sum()) for a, b in zip(actual, expected))
    if num_differences > (changed or 0):
        raise Failure(f"wrong data: {name}: {num_differences} numbers differ, of {changed} bytes")


@functools.cache
def get_weights(folder):
    return from_pretrained(folder).get_weights()


def published_folder(good, rng, folder):
    path = folder / "model"
    shutil.copytree(good, path)
    name, changed = damage_file(rng, path)
    network, expected = from_pretrained(path), get_weights(good)
    if name == "config.json":
        check_fields(json.loads((path / name).read_text()), network)
        shapes = [x.shape for x in network.get_weights()]
        if shapes == [x.shape for x in expected]:
            compare(network.get_weights(), expected, name, None)
    elif name.endswith(".safetensors"):  # An edited header can move the bytes of a tensor.
        if changed is not None:
            compare(network.get_weights(), expected, name, changed)
    elif not name.endswith("index.json"):
        compare(network.get_weights(), expected, name, None)
    outputs = network(np.ones((1, 3), "int32"))
    if not np.isfinite(np.asarray(outputs)).all() and name == "config.json":
        raise Failure(f"wrong data: outputs are not finite after damage to {name}")
    use_tokenizer(path, rng)


def check_fields(config, network):
    """Raise a Failure if the network's saved config differs from the loaded config."""
    saved = hf_config(network)
    loose = {"architectures", "dtype", "torch_dtype", *(x for x in saved if x.endswith("_id"))}
    for name, value in saved.items():
        if name in loose or config.get(name) is None:
            continue
        if name == "rope_theta" and config.get(
            "rope_parameters"
        ):  # `rope_parameters` has precedence.
            continue
        config_value = config[name]
        if config_value != value and not (
            isinstance(config_value, dict) and isinstance(value, dict)
        ):
            raise Failure(
                f"wrong data: {name} is {config_value!r:.60}, and the network's {value!r:.60}"
            )


def use_tokenizer(path, rng):
    """Load the tokenizer of a folder and encode, decode and render with it."""
    tokenizer = load_tokenizer(path)
    texts = [*SENTENCES, rng.choice(ODD_TEXTS).replace("\udce9", "?")]
    ids = tokenizer.encode(texts)
    tokenizer.decode(ids)
    if rng.random() < 0.5:
        tokenizer.encode_with_offsets(texts)
        tokenizer.chat(CHAT)


@functools.cache
def load_adapters(model, folder):
    network = from_pretrained(model)
    load_lora(network, folder)
    return get_adapters(network), [x.numpy() for x in network.trainable_variables]


def adapters(model, good, rng, folder):
    path = folder / "adapters"
    shutil.copytree(good, path)
    name, changed = damage_file(rng, path)
    network, (kernels, expected) = from_pretrained(model), load_adapters(model, good)
    load_lora(network, path)
    weights = [x.numpy() for x in network.trainable_variables]
    if name.endswith(".json"):
        compare(weights, expected, name, None)
        check_scales(json.loads((path / name).read_text()), get_adapters(network))
        return
    if get_adapters(network) != kernels:
        raise Failure(f"wrong data: {get_adapters(network)}")
    if changed is not None:
        compare(weights, expected, name, changed)


def check_scales(config, kernels):
    """Raise a Failure if ranks or alphas of the adapters differ from the edited config."""
    if "peft_type" not in config:
        requested = {path: (x["rank"], float(x["alpha"])) for path, x in config["kernels"].items()}
        if requested != {path: (x["rank"], float(x["alpha"])) for path, x in kernels.items()}:
            raise Failure(f"wrong data: {kernels}, asked for {requested}")
        return
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        return
    alpha = config["lora_alpha"] * (config["r"] ** 0.5 if config.get("use_rslora") else 1)
    for path, adapter in kernels.items():
        if adapter["rank"] != config["r"] or not np.isclose(adapter["alpha"], alpha):
            raise Failure(f"wrong data: {path} has {adapter}, of r={config['r']}, alpha={alpha}")


@functools.cache
def read_documents(folder):
    shards_reader = TokenShards(folder)
    return [part for i in range(len(shards_reader)) for part in shards_reader.parts(i)]


def shards(good, rng, folder):
    path = folder / "shards"
    shutil.copytree(good, path)
    name, changed = damage_file(rng, path)
    token_shards, expected = TokenShards(path), read_documents(good)
    if rng.random() < 0.5:
        token_shards.verify()
        changed = None
    lengths = token_shards.lengths()
    parts = [part for i in range(len(token_shards)) for part in token_shards.parts(i)]
    if name.endswith((".documents.npy", ".parts.npy")) and changed:
        # Without checksums, bounds can move, but all tokens must be present in order.
        parts, expected = [np.concatenate(parts)], [np.concatenate(expected)]
    if lengths.min() < 1 or lengths.sum() != token_shards.num_tokens:
        raise Failure(f"wrong data: {name}: documents of {lengths.min()} tokens")
    if not name.startswith("tokenizer"):
        compare(parts, expected, name, changed)


def keras_file(good, trainer, expected, rng, folder):
    path, content = folder / "x.keras", good.read_bytes()
    if rng.random() < 0.6:
        path.write_bytes(damaged(rng, content))
        is_same = True  # The archive has checksums.
    else:
        is_same = repack(rng, good, path)
    trainer.load_weights(path)
    weights = trainer.get_weights()
    if is_same:
        compare(weights, expected, path.name, None)
    elif not all(np.isfinite(x).all() for x in weights):
        raise Failure("wrong data: not finite")


def repack(rng, good, path):
    """Write a changed archive with valid checksums, and return whether its weights are unchanged."""
    kind = rng.randrange(6)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(path, "w") as target:
        members = {name: source.read(name) for name in source.namelist()}
        if kind == 0:
            members.pop(rng.choice(list(members)))
        elif kind == 1:
            name = rng.choice(list(members))
            members[name] = damaged(rng, members[name])
        elif kind == 2:
            members["config.json"] = json.dumps(edit(rng, json.loads(members["config.json"])))
        elif kind == 3:
            members["model.weights.h5"] = with_odd_values(rng, members["model.weights.h5"])
        names = {name: name for name in members}
        if kind == 4:
            name = rng.choice(list(members))
            names[name] = rng.choice(
                ["../../outside", "/tmp/outside", "a" * 70_000, "model.weights"]
            )
        for name, data in members.items():
            packed = kind == 5 and rng.random() < 0.7
            how = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                target.writestr(names[name][:65_000], data, how)
    return kind not in (1, 3)


def with_odd_values(rng, content):
    """Return a weights file in which a value or an array is replaced by an unusual one."""
    buffer, names = io.BytesIO(content), []
    with h5py.File(buffer, "a") as file:
        file.visititems(lambda name, item: names.append(name))
        arrays = [x for x in names if isinstance(file[x], h5py.Dataset) and file[x].size > 1]
        name = rng.choice(arrays)
        if rng.random() < 0.6:
            file[name][0] = rng.choice([np.nan, np.inf, -np.inf])
        else:
            del file[name]
            file[name] = rng.choice([np.zeros((2, 2)), np.zeros(10**5), np.array([1, 2, 3])])
    return buffer.getvalue()
