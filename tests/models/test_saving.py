"""Saving replaces other weights only on request, and saved adapters record their base network."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from dtransformer.datasets import SubwordTokenizer, load_tokenizer
from dtransformer.errors import InputError
from dtransformer.files import write_into
from dtransformer.models import (
    CausalLM,
    add_lora,
    check_target,
    from_pretrained,
    load_lora,
    save_lora,
    save_pretrained,
    weight_shapes,
)
from tests.models.pretrained.test_wrong_folders import GPT_2, LLAMA


@pytest.fixture
def folder(tmp_path):
    """Folder of a Llama with its tokenizer."""
    network = CausalLM(30, **LLAMA)
    network.build()
    tokenizer = SubwordTokenizer.train(["one two three"], vocab_size=26)
    return save_pretrained(network, tmp_path / "llama", "llama", tokenizer=tokenizer)


def load_with_adapters(folder, **options):
    network = from_pretrained(folder)
    add_lora(network, rank=2, **options)
    return network


def test_different_adapters_are_saved_to_a_new_folder(folder, tmp_path):
    """Equal adapters are not saved again. Different ones go to a new folder, named in a warning."""
    network, target = load_with_adapters(folder), tmp_path / "mine"
    assert save_lora(network, target) == target == save_lora(network, target)
    network.trainable_variables[0].assign_add(np.ones([16, 2]))
    with pytest.warns(
        UserWarning, match=r"mine already exists and was not changed.* saved to .*mine-2"
    ):
        second = save_lora(network, target)
    with pytest.warns(UserWarning, match="mine-3"):
        save_lora(network, target, family="dtransformer")
    assert load_lora(from_pretrained(folder), target) == load_lora(from_pretrained(folder), second)
    for path, is_equal in ((target, False), (second, True)):
        loaded = from_pretrained(folder)
        load_lora(loaded, path)
        value = loaded.trainable_variables[0].numpy()
        assert np.array_equal(value, network.trainable_variables[0].numpy()) == is_equal
    assert save_lora(network, target, overwrite=True) == target
    (tmp_path / "file").write_text("precious")
    with pytest.warns(UserWarning, match="file-2"):
        save_lora(network, tmp_path / "file", overwrite=True)


def test_different_network_is_saved_to_a_new_folder(folder):
    network = from_pretrained(folder, name="other")
    assert save_pretrained(network, folder) == folder
    network.weights[0].assign_add(np.ones(network.weights[0].shape))
    with pytest.warns(UserWarning, match="llama-2"):
        second = save_pretrained(network, folder)
    np.testing.assert_array_equal(from_pretrained(second).weights[0], network.weights[0])
    (second / "model.safetensors").rename(second / "model-00001-of-00001.safetensors")
    names = load_file(second / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (second / "model.safetensors.index.json").write_text(json.dumps(index))
    network.weights[0].assign_add(np.ones(network.weights[0].shape))
    with pytest.warns(UserWarning, match="llama-2-2"):  # Loading would prefer the existing index.
        save_pretrained(network, second)
    assert save_pretrained(network, second, overwrite=True) == second
    np.testing.assert_array_equal(from_pretrained(second).weights[0], network.weights[0])


def test_save_target_is_checked_before_training(folder, tmp_path):
    check_target(tmp_path / "new" / "folder")
    (tmp_path / "empty").mkdir()
    check_target(tmp_path / "empty")
    save_lora(load_with_adapters(folder), tmp_path / "adapters")
    (tmp_path / "one.weights.h5").write_text("")
    for path in (folder, tmp_path / "adapters", tmp_path / "one.weights.h5"):
        with pytest.raises(
            InputError, match="exists already. Choose another name, or set `overwrite=True`"
        ):
            check_target(path)
        check_target(path, overwrite=True)


def test_loaded_network_records_its_folder(folder, tmp_path):
    network = load_with_adapters(folder)
    copy = CausalLM.from_config(network.get_config())
    copy.build()
    assert network.origin == copy.origin == ("llama", str(folder))
    config = json.loads((save_lora(copy, tmp_path / "x") / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["base_model_name_or_path"] == str(folder)
    saved = save_pretrained(from_pretrained(folder), tmp_path / "again")
    assert (
        load_tokenizer(saved).encode(["two"]).to_list()
        == load_tokenizer(folder).encode(["two"]).to_list()
    )
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    with pytest.warns(
        UserWarning, match="tokenizer was not saved with the network: .* does not exist"
    ):
        save_pretrained(copy_without_adapters(copy), tmp_path / "last")


def copy_without_adapters(network):
    copy = CausalLM(30, **LLAMA)
    copy.build()
    copy.origin = network.origin
    return copy


def test_adapters_that_a_family_cannot_store_keep_library_names(tmp_path):
    network = CausalLM(30, **{**LLAMA, **GPT_2})
    network.build()
    save_pretrained(network, tmp_path / "gpt2", "gpt2")
    network = load_with_adapters(tmp_path / "gpt2")  # Queries and values share a tensor in GPT-2.
    with pytest.warns(
        UserWarning, match="gpt2 has no separate tensor for .* The adapters are in .*one in this"
    ):
        save_lora(network, tmp_path / "one")
    with pytest.raises(
        InputError, match="gpt2 has no separate tensor for .* The adapters are in .*two in this"
    ):
        save_lora(network, tmp_path / "two", family="gpt2")
    for name in ("one", "two"):
        assert len(load_lora(from_pretrained(tmp_path / "gpt2"), tmp_path / name)) == 2


def test_saving_experts_as_llama_raises_an_error(tmp_path):
    moe = {"expert_num": 2, "num_experts_chosen": 1}
    network = CausalLM(30, **LLAMA, moe_config=moe)
    network.build()
    with pytest.raises(InputError, match="`moe_config=.*`, but the family needs `moe_config=None`"):
        save_pretrained(network, tmp_path / "x", "llama")


@pytest.mark.parametrize("options", [{"num_layers": 2}, {"tied_head": False}])
def test_loading_adapters_of_a_larger_network_names_missing_kernels(options, tmp_path):
    """For every family, the error names missing blocks and the head that a tied network lacks."""
    arguments = {**LLAMA, "num_layers": 1, "tied_head": True}
    larger = CausalLM(30, **{**arguments, **options})
    larger.build()
    head = ["head/kernel"] if "tied_head" in options else []
    add_lora(larger, rank=2, targets=["blocks/*query_kernel", *head])
    save_lora(larger, tmp_path, family="llama")
    network = CausalLM(30, **arguments)
    network.build()
    missing = "model.layers.1.self_attn.q_proj" if "num_layers" in options else "lm_head"
    with pytest.raises(InputError, match=f"do not match the network's kernels: {missing}"):
        load_lora(network, tmp_path)


def test_new_folder_is_nested_if_the_parent_is_read_only(tmp_path, monkeypatch):
    """The parent in /proc accepts no new folders, like the parent of a mounted disk."""
    monkeypatch.chdir(tmp_path)
    write = lambda text: lambda new_folder: (new_folder / "n").write_text(text)
    first = write_into("/proc/self/cwd", write("1"))
    with pytest.warns(UserWarning, match="cwd"):
        second = write_into("/proc/self/cwd", write("2"))
    assert second.is_relative_to(first)
    assert [(path / "n").read_text() for path in (first, second)] == ["1", "2"]


def test_adapters_are_parsed_for_one_family_only(folder, tmp_path, monkeypatch):
    """Each other family would need the shapes of all weights again."""
    save_lora(load_with_adapters(folder), tmp_path / "mine")
    network, calls, original = from_pretrained(folder), [], weight_shapes.network_shapes
    monkeypatch.setattr(
        weight_shapes, "network_shapes", lambda *args: calls.append(args) or original(*args)
    )
    load_lora(network, tmp_path / "mine")
    assert len(calls) == 3
