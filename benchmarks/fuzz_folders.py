"""Damage to folders of published models, adapters and token shards, and to `.keras` files.

What is loaded is compared with the undamaged: numbers without checksums may differ where bytes were
changed, and nowhere else; fields that were edited have to be those of what is loaded.
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
from dtransformer.models.lora import adapters_of
from dtransformer.models.one_stack import with_task_head
from dtransformer.models.pretrained.save import _config_of
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
    """Save what is harmed; return {kind: function of (rng, folder)}."""
    warnings.simplefilter("ignore")
    published(folder / "llama")
    sentence_encoder(folder / "sentences")
    network = from_pretrained(folder / "llama")
    add_lora(network, 2, 8, "*kernel")
    for number, variable in enumerate(network.trainable_variables):
        variable.assign(np.random.default_rng(number).normal(size=variable.shape))
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
    """Save a Llama in two files with an index, its tokenizer and its rules of generation."""
    network = CausalLM(VOCABULARY, **LLAMA)
    network.build()
    save_pretrained(network, folder, "llama")
    write_byte_tokenizer(folder, SENTENCES, TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 5}))
    whole = folder / "model.safetensors"
    tensors, places = safetensors.numpy.load_file(whole), {}
    for number in range(2):
        name = f"model-{number}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[number::2]}
        safetensors.numpy.save_file(part, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
    whole.unlink()
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def sentence_encoder(folder):
    """Save a BERT whose vectors are pooled, as sentence-transformers does, and its tokenizer."""
    network = MaskedLM(VOCABULARY, hidden_size=8, num_heads=2, num_layers=1, max_length=32)
    network = with_task_head(network, PoolingHead("mean", normalize=True))
    network.build()
    save_pretrained(network, folder, "bert")
    write_byte_tokenizer(folder, SENTENCES, TEMPLATE)


def harmed(rng, path):
    """Harm a file of a folder; return its name, and the number of bytes that may be others.

    None in place of the number where the file is another one, or of JSON that was edited.
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
    if kind == 6:  # single bytes, so that the file has its size
        changed = bytearray(content)
        for _ in range(rng.choice([1, 1, 4])):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        file.write_bytes(changed)
        return name, sum(a != b for a, b in zip(content, changed))
    changed = damaged(rng, content)
    file.write_bytes(changed)
    same = len(changed) == len(content)
    return name, sum(a != b for a, b in zip(content, changed)) if same else None


def compare(found, expected, name, changed):
    """Raise a Failure where arrays differ in more numbers than bytes of a file were changed."""
    shapes = [[np.shape(x) for x in arrays] for arrays in (found, expected)]
    if shapes[0] != shapes[1]:
        raise Failure(f"wrong data: {name}: {shapes[0]}, expected {shapes[1]}")
    if not all(np.isfinite(x).all() for x in found):
        raise Failure(f"wrong data: {name}: not finite")
    others = sum(int((a != b).sum()) for a, b in zip(found, expected))
    if others > (changed or 0):
        raise Failure(f"wrong data: {name}: {others} numbers differ, of {changed} bytes")


@functools.cache
def weights_of(folder):
    return from_pretrained(folder).get_weights()


def published_folder(good, rng, folder):
    path = folder / "model"
    shutil.copytree(good, path)
    name, changed = harmed(rng, path)
    network, expected = from_pretrained(path), weights_of(good)
    if name == "config.json":
        check_fields(json.loads((path / name).read_text()), network)
        shapes = [x.shape for x in network.get_weights()]
        if shapes == [x.shape for x in expected]:
            compare(network.get_weights(), expected, name, None)
    elif name.endswith(
        ".safetensors"
    ):  # whose edits of the header may give a tensor's bytes another place
        if changed is not None:
            compare(network.get_weights(), expected, name, changed)
    elif not name.endswith("index.json"):
        compare(network.get_weights(), expected, name, None)
    outputs = network(np.ones((1, 3), "int32"))
    if not np.isfinite(np.asarray(outputs)).all() and name == "config.json":
        raise Failure(f"wrong data: outputs that are not finite by {name}")
    use_tokenizer(path, rng)


def check_fields(config, network):
    """Raise a Failure where a network is saved with other fields than it was loaded with."""
    saved = _config_of(network, None)
    loose = {"architectures", "dtype", "torch_dtype", *(x for x in saved if x.endswith("_id"))}
    for name, value in saved.items():
        if name in loose or config.get(name) is None:
            continue
        if name == "rope_theta" and config.get("rope_parameters"):  # which say it
            continue
        own = config[name]
        if own != value and not (isinstance(own, dict) and isinstance(value, dict)):
            raise Failure(f"wrong data: {name} is {own!r:.60}, and the network's {value!r:.60}")


def use_tokenizer(path, rng):
    """Load a folder's tokenizer; encode, decode and render with it."""
    tokenizer = load_tokenizer(path)
    texts = [*SENTENCES, rng.choice(ODD_TEXTS).replace("\udce9", "?")]
    ids = tokenizer.encode(texts)
    tokenizer.decode(ids)
    if rng.random() < 0.5:
        tokenizer.encode_with_offsets(texts)
        tokenizer.chat(CHAT)


@functools.cache
def adapters_in(model, folder):
    network = from_pretrained(model)
    load_lora(network, folder)
    return adapters_of(network), [x.numpy() for x in network.trainable_variables]


def adapters(model, good, rng, folder):
    path = folder / "adapters"
    shutil.copytree(good, path)
    name, changed = harmed(rng, path)
    network, (kernels, expected) = from_pretrained(model), adapters_in(model, good)
    load_lora(network, path)
    found = [x.numpy() for x in network.trainable_variables]
    if name.endswith(".json"):
        compare(found, expected, name, None)
        check_scales(json.loads((path / name).read_text()), adapters_of(network))
        return
    if adapters_of(network) != kernels:
        raise Failure(f"wrong data: {adapters_of(network)}")
    if changed is not None:
        compare(found, expected, name, changed)


def check_scales(config, kernels):
    """Raise a Failure where ranks or alphas are not those of an edited config."""
    if "peft_type" not in config:
        asked = {path: (x["rank"], float(x["alpha"])) for path, x in config["kernels"].items()}
        if asked != {path: (x["rank"], float(x["alpha"])) for path, x in kernels.items()}:
            raise Failure(f"wrong data: {kernels}, asked for {asked}")
        return
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        return
    alpha = config["lora_alpha"] * (config["r"] ** 0.5 if config.get("use_rslora") else 1)
    for path, own in kernels.items():
        if own["rank"] != config["r"] or not np.isclose(own["alpha"], alpha):
            raise Failure(f"wrong data: {path} has {own}, of r={config['r']}, alpha={alpha}")


@functools.cache
def documents_of(folder):
    found = TokenShards(folder)
    return [part for number in range(len(found)) for part in found.parts(number)]


def shards(good, rng, folder):
    path = folder / "shards"
    shutil.copytree(good, path)
    name, changed = harmed(rng, path)
    found, expected = TokenShards(path), documents_of(good)
    if rng.random() < 0.5:
        found.verify()
        changed = None
    lengths = found.lengths()
    parts = [part for number in range(len(found)) for part in found.parts(number)]
    if name.endswith((".documents.npy", ".parts.npy")) and changed:
        # Bounds that moved, without their checksums: all tokens are there, in their order.
        parts, expected = [np.concatenate(parts)], [np.concatenate(expected)]
    if lengths.min() < 1 or lengths.sum() != found.num_tokens:
        raise Failure(f"wrong data: {name}: documents of {lengths.min()} tokens")
    if not name.startswith("tokenizer"):
        compare(parts, expected, name, changed)


def keras_file(good, trainer, expected, rng, folder):
    path, content = folder / "x.keras", good.read_bytes()
    if rng.random() < 0.6:
        path.write_bytes(damaged(rng, content))
        is_same = True  # as an archive has checksums
    else:
        is_same = repacked(rng, good, path)
    trainer.load_weights(path)
    found = trainer.get_weights()
    if is_same:
        compare(found, expected, path.name, None)
    elif not all(np.isfinite(x).all() for x in found):
        raise Failure("wrong data: not finite")


def repacked(rng, good, path):
    """Write an archive with right checksums, some of it changed; return whether weights are not."""
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
    """Return a file of weights with a value, or a whole array, that is none of them."""
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
