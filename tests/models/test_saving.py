"""Promise: what was trained is not lost to a name that is taken, and knows what it was made of."""

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
    """A folder of a Llama with its tokenizer."""
    network = CausalLM(30, **LLAMA)
    network.build()
    tokenizer = SubwordTokenizer.train(["one two three"], vocab_size=26)
    return save_pretrained(network, tmp_path / "llama", "llama", tokenizer=tokenizer)


def adapted(folder, **options):
    network = from_pretrained(folder)
    add_lora(network, rank=2, **options)
    return network


def test_adapters_that_are_saved_twice(folder, tmp_path):
    """What is the same is no other; what is other goes beside, and the message says where."""
    network, place = adapted(folder), tmp_path / "mine"
    assert save_lora(network, place) == place == save_lora(network, place)
    network.trainable_variables[0].assign_add(np.ones([16, 2]))
    with pytest.warns(
        UserWarning, match=r"mine already exists and was not changed.* saved to .*mine-2"
    ):
        beside = save_lora(network, place)
    with pytest.warns(UserWarning, match="mine-3"):
        save_lora(network, place, family="dtransformer")
    assert load_lora(from_pretrained(folder), place) == load_lora(from_pretrained(folder), beside)
    for x, other in ((place, False), (beside, True)):
        again = from_pretrained(folder)
        load_lora(again, x)
        value = again.trainable_variables[0].numpy()
        assert np.array_equal(value, network.trainable_variables[0].numpy()) == other
    assert save_lora(network, place, overwrite=True) == place
    (tmp_path / "file").write_text("precious")
    with pytest.warns(UserWarning, match="file-2"):
        save_lora(network, tmp_path / "file", overwrite=True)


def test_a_network_that_is_saved_where_another_is(folder):
    network = from_pretrained(folder, name="other")
    assert save_pretrained(network, folder) == folder
    network.weights[0].assign_add(np.ones(network.weights[0].shape))
    with pytest.warns(UserWarning, match="llama-2"):
        beside = save_pretrained(network, folder)
    np.testing.assert_array_equal(from_pretrained(beside).weights[0], network.weights[0])
    (beside / "model.safetensors").rename(beside / "model-00001-of-00001.safetensors")
    names = load_file(beside / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (beside / "model.safetensors.index.json").write_text(json.dumps(index))
    network.weights[0].assign_add(np.ones(network.weights[0].shape))
    with pytest.warns(UserWarning, match="llama-2-2"):  # where an index would be read instead
        save_pretrained(network, beside)
    assert save_pretrained(network, beside, overwrite=True) == beside
    np.testing.assert_array_equal(from_pretrained(beside).weights[0], network.weights[0])


def test_a_target_is_checked_before_training(folder, tmp_path):
    check_target(tmp_path / "new" / "folder")
    (tmp_path / "empty").mkdir()
    check_target(tmp_path / "empty")
    save_lora(adapted(folder), tmp_path / "adapters")
    (tmp_path / "one.weights.h5").write_text("")
    for taken in (folder, tmp_path / "adapters", tmp_path / "one.weights.h5"):
        with pytest.raises(InputError, match="is there already: give another name, or overwrite"):
            check_target(taken)
        check_target(taken, overwrite=True)


def test_a_network_of_a_folder_knows_where_it_is_from(folder, tmp_path):
    network = adapted(folder)
    copy = CausalLM.from_config(network.get_config())
    copy.build()
    assert network.origin == copy.origin == ("llama", str(folder))
    config = json.loads((save_lora(copy, tmp_path / "x") / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["base_model_name_or_path"] == str(folder)
    again = save_pretrained(from_pretrained(folder), tmp_path / "again")
    assert (
        load_tokenizer(again).encode(["two"]).to_list()
        == load_tokenizer(folder).encode(["two"]).to_list()
    )
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    with pytest.warns(UserWarning, match="tokenizer is not saved with the network: there is no"):
        save_pretrained(copy_without_adapters(copy), tmp_path / "last")


def copy_without_adapters(network):
    own = CausalLM(30, **LLAMA)
    own.build()
    own.origin = network.origin
    return own


def test_adapters_that_their_family_cannot_hold_are_saved_by_own_names(tmp_path):
    network = CausalLM(30, **{**LLAMA, **GPT_2})
    network.build()
    save_pretrained(network, tmp_path / "gpt2", "gpt2")
    network = adapted(tmp_path / "gpt2")  # queries and values, which share a tensor there
    with pytest.warns(UserWarning, match="gpt2 has no tensor for .*; they are in .*one by this"):
        save_lora(network, tmp_path / "one")
    with pytest.raises(InputError, match="gpt2 has no tensor for .*; they are in .*two by this"):
        save_lora(network, tmp_path / "two", family="gpt2")
    for name in ("one", "two"):
        assert len(load_lora(from_pretrained(tmp_path / "gpt2"), tmp_path / name)) == 2


def test_experts_are_no_llama(tmp_path):
    moe = {"expert_num": 2, "num_experts_chosen": 1}
    network = CausalLM(30, **LLAMA, moe_config=moe)
    network.build()
    with pytest.raises(InputError, match="moe_config=.*, the published family None"):
        save_pretrained(network, tmp_path / "x", "llama")


@pytest.mark.parametrize("options", [{"num_layers": 2}, {"tied_head": False}])
def test_adapters_of_a_larger_network(options, tmp_path):
    """Blocks that a network lacks, a head where it is tied: named, whatever the family."""
    own = {**LLAMA, "num_layers": 1, "tied_head": True}
    larger = CausalLM(30, **{**own, **options})
    larger.build()
    head = ["head/kernel"] if "tied_head" in options else []
    add_lora(larger, rank=2, targets=["blocks/*query_kernel", *head])
    save_lora(larger, tmp_path, family="llama")
    network = CausalLM(30, **own)
    network.build()
    told = "model.layers.1.self_attn.q_proj" if "num_layers" in options else "lm_head"
    with pytest.raises(InputError, match=f"kernels that the network has not: {told}"):
        load_lora(network, tmp_path)


def test_beside_a_folder_whose_parent_takes_none_it_is_inside(tmp_path, monkeypatch):
    """As where the folder is a disk of its own."""
    monkeypatch.chdir(tmp_path)
    write = lambda text: lambda fresh: (fresh / "n").write_text(text)
    first = write_into("/proc/self/cwd", write("1"))
    with pytest.warns(UserWarning, match="cwd"):
        second = write_into("/proc/self/cwd", write("2"))
    assert second.is_relative_to(first)
    assert [(one / "n").read_text() for one in (first, second)] == ["1", "2"]


def test_adapters_are_read_as_the_own_family_s_alone(folder, tmp_path, monkeypatch):
    """Other families' forms need the shapes of all weights once more, each."""
    save_lora(adapted(folder), tmp_path / "mine")
    network, counted, of_network = from_pretrained(folder), [], weight_shapes.of_network
    monkeypatch.setattr(weight_shapes, "of_network", lambda *x: counted.append(x) or of_network(*x))
    load_lora(network, tmp_path / "mine")
    assert len(counted) == 3
