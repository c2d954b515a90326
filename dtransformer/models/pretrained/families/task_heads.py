"""Classes of `transformers` that label sequences or tokens: their heads here, and their tensors."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence

import keras

from dtransformer.errors import InputError, check_int, shown
from dtransformer.layers.heads import LabelHead, PoolingHead, SequenceHead, TokenHead
from dtransformer.models import weight_shapes
from dtransformer.models.base import TokenModel
from dtransformer.models.causal_lm import CausalLM
from dtransformer.models.one_stack import OneStackModel, with_task_head
from dtransformer.models.pretrained.families import FAMILIES
from dtransformer.models.pretrained.families.family import bias, linear
from dtransformer.models.pretrained.families.parts import Field, choice
from dtransformer.models.pretrained.folder import pooling_of
from dtransformer.models.pretrained.stored_tensor import StoredTensor

_MOST_LABELS = 2**20  # that are named
SEQUENCE, TOKENS = "ForSequenceClassification", "ForTokenClassification"
# Families whose class without a head is written, for vectors of texts.
WITH_VECTORS = (
    *("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "modernbert"),
    *("llama", "mistral", "qwen2", "qwen3"),
)
_HEADS = "head/", "sentence_head/"  # what paths of heads' weights begin with


@dataclasses.dataclass(frozen=True)
class TaskHead:
    """The head of one class of a family.

    Args:
        layer: the class of the layer.
        dense: dict of their layers and ours.
        arguments: those of the layer, besides the number of labels and dropout.
        fields: the fields of a config that say other arguments of the layer.
        dropouts: fields of the rate of dropout, of which the first that is given counts; none for no
            dropout.
        usual_dropout: the rate where none is given.
    """

    layer: Callable
    dense: Mapping[str, str]
    arguments: Mapping = dataclasses.field(default_factory=dict)
    fields: tuple[Field, ...] = ()
    dropouts: tuple[str, ...] = ("classifier_dropout", "hidden_dropout_prob")
    usual_dropout: float = 0.1

    def head(
        self, labels: Sequence[str], network: keras.Model, rate: float, config: Mapping
    ) -> LabelHead:
        """Return the head of a network for some labels, not built.

        Args:
            labels: their names.
            network: of which it has the type.
            rate: of dropout.
            config: fields of a published config, perhaps none.
        """
        own = {name: x for field in self.fields for name, x in field.read(config).items()}
        own |= {**self.arguments, "dropout_rate": rate if self.dropouts else 0.0}
        if network.pad_id is None and self.arguments.get("pooling") == "last":
            own["pad_id"] = config.get("pad_token_id")
        head = self.layer(len(labels), dtype=network.dtype_policy, **own)
        head.label_names, head.problem_type = tuple(labels), config.get("problem_type")
        return head

    def tensors(self, head: LabelHead) -> list[StoredTensor]:
        """Return the tensors of a file that are a head's."""
        shapes = weight_shapes.of_layer(head, (None, None, 1))
        names = {"kernel": ("weight", linear), "gamma": ("weight", bias)}
        names |= {"bias": ("bias", bias), "beta": ("bias", bias)}
        return [
            make(f"{theirs}.{name}", f"head/{ours}/{kind}")
            for theirs, ours in self.dense.items()
            for kind, (name, make) in names.items()
            if f"{ours}/{kind}" in shapes
        ]


def _heads(sequence, tokens="classifier", **options):
    """Return the heads of a family's sequences, and of its tokens, and their options."""
    return {
        SEQUENCE: TaskHead(SequenceHead, **sequence),
        TOKENS: TaskHead(TokenHead, {tokens: "classifier"}, **options),
    }


def _first(pooler, classifier, activation="tanh"):
    return {
        "dense": {pooler: "pooler", classifier: "classifier"},
        "arguments": {"pooling": "first", "hidden_act": activation},
    }


_ROBERTA = _heads(_first("classifier.dense", "classifier.out_proj"))
# Of decoders: the last token that is no padding, without dropout; `score` of tokens has a bias.
_LAST = {
    "dense": {"score": "classifier"},
    "arguments": {"pooling": "last", "use_bias": False},
    "dropouts": (),
}
_RATES = ("classifier_dropout", "hidden_dropout")
_DECODER = _heads(_LAST, "score", dropouts=_RATES)
_MODERNBERT = {
    "dense": {"head.dense": "pooler", "head.norm": "norm", "classifier": "classifier"},
    "arguments": {"hidden_act": "gelu", "hidden_bias": False, "norm": "layer_norm_without_beta"},
    "fields": (Field("norm_epsilon", "norm_eps", 1e-5),),
    "dropouts": ("classifier_dropout",),
    "usual_dropout": 0.0,
}
_POOLING = choice("pooling", "classifier_pooling", "cls", {"cls": "first", "mean": "mean"})
_OF_KIND = {
    # Of these tokens have no class there.
    **{
        kind: {SEQUENCE: _DECODER[SEQUENCE]}
        for kind in ("olmo2", "olmo3", "deepseek_v2", "gemma3_text", "hunyuan_v1_dense", "opt")
    },
    **{kind: _heads(_LAST, dropouts=_RATES) for kind in ("gpt2", "gpt_neox", "falcon")},
    # And these have none.
    **{kind: {} for kind in ("granite", "olmoe", "glm4_moe")},
    **{kind: {} for kind in ("cohere", "cohere2", "ernie4_5")},
    "bert": _heads(_first("bert.pooler.dense", "classifier")),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": _heads(
        {
            **_first("pre_classifier", "classifier", "relu"),
            "dropouts": ("seq_classif_dropout",),
            "usual_dropout": 0.2,
        },
        dropouts=("dropout",),
    ),
    "modernbert": {
        SEQUENCE: TaskHead(
            SequenceHead, **{**_MODERNBERT, "fields": (*_MODERNBERT["fields"], _POOLING)}
        ),
        TOKENS: TaskHead(TokenHead, **_MODERNBERT),
    },
}


def task_heads(kind: str) -> Mapping[str, TaskHead]:
    """Return the heads of a family by what the names of their classes end with.

    Args:
        kind: its `model_type`, a key of `FAMILIES`.
    """
    return _OF_KIND.get(kind, _DECODER if issubclass(FAMILIES[kind].network, CausalLM) else {})


def with_head_of(network: TokenModel, config: Mapping, folder: pathlib.Path) -> TokenModel:
    """Give a network that is not built the head of its folder, where that is a task's.

    Labels are those of the config's class. A folder of sentence-transformers specifies the pooling.
    A class without the head of the network, such as `BertModel`, gives vectors: the mean of an
    encoder's positions, or a decoder's last one.

    Raises:
        InputError: If the family has no such class here.
    """
    names = config.get("architectures") or [""]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise InputError(f"{folder}: architectures is {shown(names)}, expected a list of names")
    name = names[0]
    ending = next((x for x in (SEQUENCE, TOKENS) if name.endswith(x)), None)
    if ending is None:
        pooling = pooling_of(folder, network.dtype_policy)
        is_base = name.endswith("Model") and name != FAMILIES[config["model_type"]].architecture
        is_decoder = isinstance(network, CausalLM)
        is_complete = is_decoder and network.arguments["tied_head"]
        if pooling is None and is_base and isinstance(network, OneStackModel) and not is_complete:
            pooling = PoolingHead("last" if is_decoder else "mean", dtype=network.dtype_policy)
        return network if pooling is None else with_task_head(network, pooling)
    form = task_heads(config["model_type"]).get(ending)
    if form is None:
        raise InputError(f"{name}: its head is not built here")
    rates = (config.get(field) for field in form.dropouts)
    rate = next((rate for rate in rates if rate is not None), form.usual_dropout)
    fields = {**FAMILIES[config["model_type"]].ids, **config}
    return with_task_head(network, form.head(labels_of(config, folder), network, rate, fields))


def new_head(network: OneStackModel, ending: str, labels: Sequence[str]) -> LabelHead | None:
    """Return a head as the family of a network has it; None where that is not known.

    Args:
        network: a network as `from_pretrained` returns it, or any other one.
        ending: `SEQUENCE` or `TOKENS`.
        labels: names of the labels.
    """
    form = network.origin and task_heads(network.origin[0]).get(ending)
    usual = {"pad_token_id": getattr(network, "end_id", None)}  # where there is no other one
    return form and form.head(labels, network, network.arguments["dropout_rate"], usual)


def labels_of(config: Mapping, folder: pathlib.Path) -> list[str]:
    """Return the names of a config's labels in their order; two where it says nothing.

    Raises:
        InputError: it names none.
    """
    names, number = config.get("id2label"), config.get("num_labels", 2)
    if not names:
        return usual_labels(min(check_int(f"{folder}: num_labels", number), _MOST_LABELS))
    if not isinstance(names, dict) or not all(key.isdigit() for key in names):
        raise InputError(f"{folder}: id2label is {shown(names)}, expected numbers and names")
    return [str(names[key]) for key in sorted(names, key=int)]


def usual_labels(number: int) -> list[str]:
    """Return what labels are called that have no names."""
    return [f"LABEL_{place}" for place in range(number)]


def tensors_of(kind: str, network: TokenModel) -> list[StoredTensor]:
    """Return the tensors of a file of a network of a family, which may have a task's head.

    Raises:
        InputError: the family has no class with such a head.
    """
    tensors = FAMILIES[kind].tensors(network.arguments)
    if not getattr(network, "has_task_head", False):
        return tensors
    is_pooling = isinstance(network.head, PoolingHead)
    own = [] if is_pooling else _form_of(kind, network.head)[1].tensors(network.head)
    return [*(x for x in tensors if not x.weights[0].startswith(_HEADS)), *own]


def head_fields(kind: str, network: TokenModel) -> dict:
    """Return the fields of a published config that say a network's head: of a task, or none.

    Raises:
        InputError: the family has no class with such a head.
    """
    if not getattr(network, "has_task_head", False):
        return {}
    head = network.head
    base = FAMILIES[kind].architecture.removesuffix("LMHeadModel").partition("For")[0]
    base += "Text" * (kind == "gemma3_text")  # beside classes that see images
    if isinstance(head, PoolingHead):
        if kind not in WITH_VECTORS:
            raise InputError(f"vectors of the family {kind!r} have no published form here")
        return {"architectures": [f"{base}Model"]}
    ending, form = _form_of(kind, head)
    names = getattr(head, "label_names", None) or usual_labels(head.num_labels)
    kept = [("problem_type", "problem_type"), ("pad_token_id", "pad_id")]
    return {
        "architectures": [base + ending],
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
        **{x: head.dropout_rate for x in form.dropouts[:1] if x != "dropout"},  # of the blocks, too
        **{x: y for field in form.fields for x, y in field.written(vars(head)).items()},
        **{x: y for x, own in kept if (y := getattr(head, own, None)) is not None},
    }


def file_name(kind: str, name: str, network: TokenModel) -> str:
    """Return what a tensor of `tensors_of` is called in the files of a network."""
    family = FAMILIES[kind]
    if isinstance(getattr(network, "head", None), PoolingHead):
        return name.removeprefix(family.base_prefix)
    return family.file_name(name)


def _form_of(kind, head):
    """Return the end of the class' name, and the form, of a head."""
    ending = TOKENS if isinstance(head, TokenHead) else SEQUENCE
    form = task_heads(kind).get(ending)
    own = head.get_config()
    wanted = {} if form is None else {"use_bias": True, **form.arguments}
    differs = {x: own.get(x) for x, value in wanted.items() if own.get(x) != value}
    if form is None or not isinstance(head, form.layer) or differs:
        told = f", which has {differs}" if differs else ""
        raise InputError(
            f"published models of the family {kind!r} have no head of the kind "
            f"{type(head).__name__}{told}: it cannot be saved as one of them"
        )
    return ending, form
