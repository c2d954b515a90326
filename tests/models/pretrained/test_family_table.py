"""An entry of the table of families describes a family, and unknown names in it are refused."""

import pytest

from dtransformer.models.pretrained.families import FAMILIES, SHARED, read_family

SIZES = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
    "num_attention_heads": 2,
}


def entry(**changes):
    fields = {"architecture": "Some", "keys": SHARED["llama_keys"]}
    return {**fields, "weights": SHARED["llama_weights"], **changes}


def test_rows_replace_shared_rows_and_null_removes_them():
    keys = {
        **SHARED["llama_keys"],
        "hidden_act": None,
        "norm_epsilon": {"row": "epsilon", "key": "eps", "default": 0.5},
        "dropout_rate": ["resid_pdrop", 0.25],
    }
    family = read_family(entry(keys=keys))
    arguments = family.from_hf({**SIZES, "resid_pdrop": 0.125})
    assert (arguments["norm_epsilon"], arguments["dropout_rate"]) == (0.5, 0.125)
    assert all(row.arguments != ("hidden_act",) for row in family.keys)
    assert any(row.arguments == ("hidden_act",) for row in read_family(entry()).keys)


def test_weight_names_depend_on_variants():
    t5 = FAMILIES["t5"]
    gated = t5.weight_names({"gated": True}).keys() - t5.weight_names({"gated": False}).keys()
    assert {name.rpartition(".")[2] for name in gated} == {"wi_0", "wi_1"}


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"kyes": {}}, TypeError),
        ({"kind": "barth"}, KeyError),
        ({"keys": {"hidden_size": {"row": "wide", "key": "width"}}}, KeyError),
        ({"keys": {"blocks": {"windows": {"rule": "qwn"}}}}, KeyError),
        ({"keys": {"blocks": {"windos": {}}}}, TypeError),
        ({"files": {"ignore": []}}, TypeError),
    ],
)
def test_unknown_names_are_refused(changes, error):
    with pytest.raises(error):
        read_family(entry(**changes))
