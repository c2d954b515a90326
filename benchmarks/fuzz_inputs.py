"""Cases of benchmarks/fuzz.py with hostile inputs: functions of a random generator and a folder."""

import functools
import gzip
import json
import shutil
import zlib

import h5py
import keras
import numpy as np
import yaml
from fuzz_damage import ODD_TEXTS, ODD_VALUES, Failure, command, damaged, edit

from dtransformer.datasets import read_lines, read_pairs, read_tsv
from dtransformer.datasets.tokenizer import SubwordTokenizer
from dtransformer.inputs.conversion import convert
from dtransformer.inputs.safetensors_file import SafetensorsFile
from dtransformer.inputs.weights_file import load_weights
from dtransformer.runs import config
from dtransformer.runs.options import DEFAULT_VOCAB_SIZE
from dtransformer.runs.tasks import make_task
from dtransformer.trainers.checkpoint import Checkpoint
from dtransformer.trainers.checkpoint.manifest import MANIFEST

SENTENCES = ["A cat eats.", "L'été dure, n'est-ce pas\u00a0?", "", "Salt & pepper < 4 > 2."]
YAML_PARTS = [
    "a", "b: ", "- ", "\n", "\n  ", "\n    ", "[", "]", "{", "}", "&a ", "*a", "<<: *a", "!!int ", "1",
    ".nan", "'", '"', "|\n", ">\n", "---\n", "? ", ", ", "#", "%", "\t", "training:", "data:", ": ",
    "epochs: 3", "learning_rate: 1e-3", "source: x", "parallel:", "recompute: {select: [norm]}",
]  # fmt: skip


def prepare(folder):
    """Write the undamaged files and return a dict of kinds to functions of (rng, folder)."""
    folder.mkdir()
    tokenizer = SubwordTokenizer.train(SENTENCES, 75)
    tokenizer.save(folder / "tokenizer")
    network = small_network()
    network.save_weights(folder / "x.weights.h5")
    checkpoint = folder / "step-00000006"
    make_checkpoint(checkpoint)
    import fuzz_records

    return {
        "YAML": yaml_file,
        "--set": setting,
        "options": options,
        "text": text_file,
        "gzip": gzip_file,
        "manifest": functools.partial(manifest, checkpoint),
        "safetensors": safetensors_file,
        "weights.h5": functools.partial(weights, folder / "x.weights.h5", network),
        "tokenizer": functools.partial(tokenizer_files, folder / "tokenizer"),
        **fuzz_records.prepare(folder),
    }


def small_network():
    return keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()]
    )


def make_checkpoint(path):
    """Save a checkpoint of a small network with an asset."""
    from dtransformer.trainers import Trainer

    trainer = Trainer(small_network())
    trainer.compile("adam", "mse")
    trainer.fit(np.ones((8, 4)), np.ones((8, 3)), batch_size=4, verbose=0)
    trainer.save(path, assets={"tokenizer": SubwordTokenizer.train(SENTENCES, 75)})


def yaml_file(rng, folder):
    if rng.random() < 0.5:
        text = "".join(rng.choice(YAML_PARTS) for _ in range(rng.randrange(30))).encode()
    else:
        sections = {name: dict(vars(part)) for name, part in config.RunConfig().sections().items()}
        sections["parallel"].pop("recompute")
        sections["parallel"] = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in sections["parallel"].items()
        }
        sections = edit(rng, sections) if rng.random() < 0.5 else sections
        text = yaml.safe_dump(sections).encode()
        text = damaged(rng, text) if rng.random() < 0.4 else text
    if rng.random() < 0.1:
        rows = "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * (i > 0) * 9}]\n" for i in range(30))
        text = rows.encode()
    (folder / "config.yaml").write_bytes(text)
    read = config.load_config(folder / "config.yaml")
    make_task(read).unbuilt(read.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE)
    config.save_config(read, folder / "saved.yaml")
    if config.load_config(folder / "saved.yaml") != read:
        raise Failure(f"wrong data: {text[:200]!r}")


def setting(rng, folder):
    keys = config.RunConfig().keys()
    likely = ["0", "1", "2", "0.5", "1e-3", "64", "true", "x", "null", "1000000", "1000000000"]
    values = rng.choice([likely, likely, ODD_TEXTS, list(map(str, ODD_VALUES))])
    settings = [f"{rng.choice(keys)}={rng.choice(values)}" for _ in range(rng.choice([1, 1, 3]))]
    settings += rng.sample(ODD_TEXTS, rng.choice([0, 0, 0, 1]))
    read = config.load_config(None, settings)
    make_task(read).unbuilt(read.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE)


def options(rng, folder):
    words = [
        "prepare", "train", "translate", "evaluate", "checkpoint", "inspect", "verify", "export",
        "--config", "--set", "--run", "--resume", "--beam-size", "--length-penalty", "--src", "--ref",
        "--json", "--out", "--embedded", "--num-train", "--seed", "--over",
        "--with-optimizer",
        "--wrong", *ODD_TEXTS,
    ]  # fmt: skip
    starts = {
        ("train", "--config"): 1,
        ("translate", "--run"): 1,
        ("translate", "--run", str(folder), "--beam-size"): 1,
        ("translate", "--run", str(folder), "--length-penalty"): 1,
        ("checkpoint", "verify"): 1,
        ("checkpoint", "inspect", "--json"): 1,
        ("prepare", "--out", str(folder / "out"), "--embedded", "--num-train", "3", "--seed"): 1,
        ("evaluate", "--run", str(folder), "--src", "x", "--ref"): 1,
    }
    start = rng.choice([(), *starts])
    arguments = [*start, *(rng.choice(words) for _ in range(rng.choice([1, 1, 2, 6])))]
    try:
        command([argument for argument in arguments if argument not in ("-h", "--help")])
    except SystemExit:
        raise Failure(f"command {arguments}: SystemExit") from None


def text_file(rng, folder):
    text = "\n".join(rng.choice([*SENTENCES, *ODD_TEXTS[:20], "a\tb"]) for _ in range(6))
    data = text.encode("utf-8", "surrogateescape")
    if rng.random() < 0.2:
        data = text.encode(rng.choice(["utf-16", "utf-16-le", "utf-32", "utf-7"]), "ignore")
    data = damaged(rng, data) if rng.random() < 0.7 else data
    (folder / "x.txt").write_bytes(data)
    (folder / "y.txt").write_bytes(damaged(rng, data) if rng.random() < 0.5 else data)
    lines = rng.choice([read_lines, read_tsv])(folder / "x.txt")
    read_pairs(folder / "x.txt", folder / "y.txt")
    if isinstance(lines, list) and len(lines) != data.count(b"\n") + (not data.endswith(b"\n")):
        raise Failure(f"wrong data: {data[:200]!r}")


@functools.cache
def packed(level, line, num_bytes):
    """Return compressed sentences followed by many repetitions of a line. Cached, as it is slow."""
    packer = zlib.compressobj(level, wbits=31)
    start = packer.compress("\n".join(SENTENCES).encode())
    chunk = line * (2**18 // len(line))
    return start + b"".join(packer.compress(chunk) for _ in range(num_bytes // 2**18))


def bomb(rng):
    """Return a truncated gzip stream of up to 256 MiB of one repeated line."""
    line = rng.choice([b"\0", b"\n", b"a", b"a b\n", "é\n".encode()])
    return packed(rng.choice([1, 9]), line, rng.choice([2**25, 2**28]))


def gzip_file(rng, folder):
    content = "".join(f"{line}\n" for line in SENTENCES).encode() * rng.choice([1, 100])
    kind, good = rng.randrange(4), gzip.compress(content)
    data = bomb(rng) if rng.random() < 0.02 else good * 2 if kind == 0 else damaged(rng, good)
    (folder / "x.gz").write_bytes(data)
    lines = read_lines(folder / "x.gz")
    expected = content.decode().split("\n")[:-1]
    repetitions, rest = divmod(len(lines), len(expected))
    if rest or lines != expected * repetitions:
        raise Failure("wrong data: the lines differ from the compressed ones")


def manifest(checkpoint, rng, folder):
    path = folder / checkpoint.name
    shutil.copytree(checkpoint, path)
    text = (path / MANIFEST).read_bytes()
    if rng.random() < 0.3:
        text = damaged(rng, text)
    else:
        body = edit(rng, json.loads(text)["checkpoint"])
        if rng.random() < 0.3:
            name = rng.choice(["../../outside", "/tmp/outside", "tokenizer/../../x", *ODD_TEXTS])
            body.setdefault("files", {})
            if isinstance(body["files"], dict):
                body["files"][name] = {"bytes": 0, "crc32": "00000000", "rank": 0}
                body["files"][f"replicas/{name}"] = {"bytes": 0, "crc32": "00000000", "rank": 0}
        crc = zlib.crc32(json.dumps(body, sort_keys=True).encode())
        text = json.dumps({"crc32": f"{crc:08x}", "checkpoint": body}).encode()
    (path / MANIFEST).write_bytes(text)
    if rng.random() < 0.3:
        command(["checkpoint", rng.choice(["inspect", "verify"]), str(path)])
    checkpoint_reader = Checkpoint(path)
    for name in checkpoint_reader.problems():
        checkpoint_reader.repair(name)
    if sum(1 for _ in checkpoint_reader.problems()) == 0:
        for name in checkpoint_reader.shapes:
            checkpoint_reader.read(name)


def safetensors_file(rng, folder):
    kinds = {"F32": 4, "F16": 2, "BF16": 2, "F8_E5M2": 1, "F64": 8}
    kinds |= {"U8": 1, "BOOL": 1, "I64": 8} if rng.random() < 0.3 else {}
    header, place = {"__metadata__": {"format": "x"}}, 0
    for name in "abc":
        kind, shape = rng.choice(list(kinds)), [rng.randrange(4) for _ in range(rng.randrange(3))]
        size = kinds[kind] * int(np.prod(shape))
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    data = rng.choice([rng.randbytes(place), b"\x11" * place])
    header = edit(rng, header) if rng.random() < 0.4 else header
    text = json.dumps(header).encode()
    text = damaged(rng, text) if rng.random() < 0.2 else text
    content = len(text).to_bytes(8, "little") + text + data
    content = damaged(rng, content) if rng.random() < 0.2 else content
    (folder / "x.safetensors").write_bytes(content)
    file = SafetensorsFile(folder / "x.safetensors")
    for name, shape in file.shapes.items():
        value = convert(file[name], "float32", name)
        if value.shape != shape or not np.isfinite(value).all():
            raise Failure("wrong data: not finite, or another shape")


def weights(good, network, rng, folder):
    path = folder / "x.weights.h5"
    shutil.copy(good, path)
    if rng.random() < 0.7:
        content = path.read_bytes()
        head = rng.choice([100, 1000, len(content)])  # The structure is at the start.
        path.write_bytes(damaged(rng, content[:head]) + content[head:])
    else:
        with h5py.File(path, "a") as file:
            groups = []
            file.visititems(lambda name, item: groups.append(name))
            name = rng.choice(groups)
            kind = rng.randrange(6)
            if kind == 0:
                del file[name]
            elif kind == 1:
                file[f"{name}_more"] = h5py.SoftLink(f"/{name}")
            elif kind == 2:
                file.create_dataset("huge", (2**20, 2**20), rng.choice(["f4", "f8", "i1"]))
            elif kind == 3:
                file.create_dataset("zip", (2**14, 2**14), "f4", compression="gzip", fillvalue=1)
            elif kind == 4:
                file["more"] = np.array(rng.choice([["a"], [b"b"]]), object)
            elif isinstance(file[name], h5py.Dataset):
                file[name][0] = rng.choice([np.nan, np.inf, 1e30])
    load_weights(network, path)
    if not all(np.isfinite(value).all() for value in network.get_weights()):
        raise Failure("wrong data: not finite")


def tokenizer_files(good, rng, folder):
    path = folder / "tokenizer"
    shutil.copytree(good, path)
    content = (path / "tokenizer.json").read_bytes()
    if rng.random() < 0.5:
        content = damaged(rng, content)
    else:
        fields = json.loads(content)
        pieces = list(fields["model"]["vocab"])
        odd = [*ODD_TEXTS, "▁", "##", "##▁", "\ufffd", "a" * 257, "]", "\\", "^", "-"]
        pieces[rng.randrange(len(pieces))] = rng.choice(odd)
        fields["model"]["vocab"] = {piece: i for i, piece in enumerate(pieces)}
        fields = edit(rng, fields) if rng.random() < 0.3 else fields
        content = json.dumps(fields).encode()
    (path / "tokenizer.json").write_bytes(content)
    tokenizer = SubwordTokenizer.load(path)
    for text in tokenizer.decode(tokenizer.encode(SENTENCES)):
        if "\n" in text:
            raise Failure("wrong data: a line break in a sentence")
