"""Heads of `transformers` classes that label sequences or tokens."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence

import keras

from dtransformer.errors import InputError, check_int, short_repr
from dtransformer.layers.heads import LabelHead, PoolingHead, SequenceHead, TokenHead
from dtransformer.models import weight_shapes
from dtransformer.models.base import TokenModel
from dtransformer.models.causal_lm import CausalLM
from dtransformer.models.one_stack import OneStackModel, with_task_head
from dtransformer.models.pretrained.families import FAMILIES, HEADS
from dtransformer.models.pretrained.families.keys import Key, read_row
from dtransformer.models.pretrained.families.weights import read_table, stored_tensors
from dtransformer.models.pretrained.folder import read_pooling_head
from dtransformer.models.pretrained.stored_tensor import StoredTensor

_MAX_LABELS = 2**20  # maximum number of labels that get a name
SEQUENCE = "ForSequenceClassification"
TOKENS = "ForTokenClassification"
# Families whose class without a head, which returns text vectors, can be saved.
WITH_VECTORS = (
    *("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "modernbert"),
    *("llama", "mistral", "qwen2", "qwen3"),
)
_HEADS = "head/", "sentence_head/"  # prefixes of the heads' weight paths


@dataclasses.dataclass(frozen=True)
class TaskHead:
    """Head of one `transformers` class of a family.

    Args:
        layer: Class of the head layer.
        dense: Dict from names of the head's parts in `transformers` to paths in the layer.
        arguments: Dict of the layer's arguments, except the number of labels and dropout.
        fields: Tuple of `Key`s for other arguments of the layer.
        dropouts: Tuple of config keys of the dropout rate. The first one in a config counts.
            An empty tuple disables dropout.
        default_dropout: Default dropout rate.
    """

    layer: Callable
    dense: Mapping[str, str]
    arguments: Mapping = dataclasses.field(default_factory=dict)
    fields: tuple[Key, ...] = ()
    dropouts: tuple[str, ...] = ("classifier_dropout", "hidden_dropout_prob")
    default_dropout: float = 0.1

    def head(
        self, labels: Sequence[str], network: keras.Model, rate: float, config: Mapping
    ) -> LabelHead:
        """Return a head that is not built.

        Args:
            labels: Names of the labels.
            network: Network for the head, which has the same data type.
            rate: Float. Dropout rate.
            config: Published config, possibly empty.
        """
        arguments = {name: x for field in self.fields for name, x in field.from_hf(config).items()}
        arguments |= {**self.arguments, "dropout_rate": rate if self.dropouts else 0.0}
        if network.pad_id is None and self.arguments.get("pooling") == "last":
            arguments["pad_id"] = config.get("pad_token_id")
        head = self.layer(len(labels), dtype=network.dtype_policy, **arguments)
        head.label_names = tuple(labels)
        head.problem_type = config.get("problem_type")
        return head

    def tensors(self, head: LabelHead) -> list[StoredTensor]:
        """Return the `StoredTensor`s of a head."""
        shapes = weight_shapes.layer_shapes(head, (None, None, 1))
        weights = {f"head/{path}": shape for path, shape in shapes.items()}
        names = {hf_name: f"head/{path}" for hf_name, path in self.dense.items()}
        return stored_tensors(read_table(names), weights)


_LAYERS = {SEQUENCE: SequenceHead, TOKENS: TokenHead}


def _read_heads(heads):
    """Return the task heads of an entry of `heads` in `families.yaml`."""
    result = {}
    for ending, options in heads.items():
        fields = tuple(read_row(name, x) for name, x in options.get("fields", {}).items())
        result[ending] = TaskHead(_LAYERS[ending], **{**options, "fields": fields})
    return result


_HEADS_BY_KIND = {kind: _read_heads(heads) for kind, heads in HEADS.items()}


def task_heads(kind: str) -> Mapping[str, TaskHead]:
    """Return the task heads of a family, by the suffix of their class names.

    Args:
        kind: `model_type` of the family, a key of `FAMILIES`.
    """
    is_decoder = issubclass(FAMILIES[kind].network, CausalLM)
    return _HEADS_BY_KIND.get(kind, _HEADS_BY_KIND["decoder"] if is_decoder else {})


def with_stored_head(network: TokenModel, config: Mapping, folder: pathlib.Path) -> TokenModel:
    """Add the task head of a folder, if it has one, to a network that is not built.

    Labels come from the config. A folder of sentence-transformers specifies the pooling. A
    class without the pretraining head, such as `BertModel`, returns vectors: the mean over
    positions for encoders, the last position for decoders.

    Args:
        network: Network that is not built.
        config: Content of `config.json`.
        folder: Path of the folder.

    Returns:
        The network.

    Raises:
        InputError: If the head's class is not supported.
    """
    architectures = config.get("architectures") or [""]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise InputError(
            f"{folder}: `architectures` must be a list of names, got {short_repr(architectures)}."
        )
    name = architectures[0]
    ending = next((x for x in (SEQUENCE, TOKENS) if name.endswith(x)), None)
    if ending is None:
        pooling = read_pooling_head(folder, network.dtype_policy)
        is_base = name.endswith("Model") and name != FAMILIES[config["model_type"]].architecture
        is_decoder = isinstance(network, CausalLM)
        is_complete = is_decoder and network.arguments["tied_head"]
        if pooling is None and is_base and isinstance(network, OneStackModel) and not is_complete:
            pooling = PoolingHead("last" if is_decoder else "mean", dtype=network.dtype_policy)
        return network if pooling is None else with_task_head(network, pooling)
    form = task_heads(config["model_type"]).get(ending)
    if form is None:
        raise InputError(f"The head of {name} is not supported.")
    rates = (config.get(field) for field in form.dropouts)
    rate = next((rate for rate in rates if rate is not None), form.default_dropout)
    fields = {**FAMILIES[config["model_type"]].ids, **config}
    return with_task_head(network, form.head(read_labels(config, folder), network, rate, fields))


def new_head(network: OneStackModel, ending: str, labels: Sequence[str]) -> LabelHead | None:
    """Return a new head in the form of the network's family.

    Args:
        network: Network, from `from_pretrained` or not.
        ending: `SEQUENCE` or `TOKENS`.
        labels: Names of the labels.

    Returns:
        A head that is not built, or `None` if the network's family is unknown or has no such
        head.
    """
    form = network.origin and task_heads(network.origin[0]).get(ending)
    # Texts end with the end token if the vocabulary has no padding.
    fallback = {"pad_token_id": getattr(network, "end_id", None)}
    return form and form.head(labels, network, network.arguments["dropout_rate"], fallback)


def read_labels(config: Mapping, folder: pathlib.Path) -> list[str]:
    """Return the label names of a config in order. A config without labels has two.

    Raises:
        InputError: If `id2label` is not a dict from indices to names.
    """
    names = config.get("id2label")
    num_labels = config.get("num_labels", 2)
    if not names:
        return default_labels(min(check_int(f"{folder}: num_labels", num_labels), _MAX_LABELS))
    if not isinstance(names, dict) or not all(key.isdigit() for key in names):
        raise InputError(
            f"{folder}: `id2label` must be a dict from indices to names, got {short_repr(names)}."
        )
    return [str(names[key]) for key in sorted(names, key=int)]


def default_labels(num_labels: int) -> list[str]:
    """Return the default names of labels: `"LABEL_0"`, `"LABEL_1"` and so on."""
    return [f"LABEL_{index}" for index in range(num_labels)]


def network_tensors(kind: str, network: TokenModel) -> list[StoredTensor]:
    """Return the `StoredTensor`s in a file of a network, including its task head.

    Args:
        kind: `model_type` of the family, a key of `FAMILIES`.
        network: The network.

    Raises:
        InputError: If the family has no class with the network's head.
    """
    tensors = FAMILIES[kind].tensors(network.arguments)
    if not getattr(network, "has_task_head", False):
        return tensors
    is_pooling = isinstance(network.head, PoolingHead)
    head_tensors = [] if is_pooling else _find_form(kind, network.head)[1].tensors(network.head)
    return [*(x for x in tensors if not x.weights[0].startswith(_HEADS)), *head_tensors]


def head_fields(kind: str, network: TokenModel) -> dict:
    """Return the config fields of a network's task head; empty without a task head.

    Args:
        kind: `model_type` of the family, a key of `FAMILIES`.
        network: The network.

    Raises:
        InputError: If the family has no class with the network's head.
    """
    if not getattr(network, "has_task_head", False):
        return {}
    head = network.head
    base = FAMILIES[kind].architecture.removesuffix("LMHeadModel").partition("For")[0]
    if kind == "gemma3_text":  # the plain name belongs to the multimodal class
        base += "Text"
    if isinstance(head, PoolingHead):
        if kind not in WITH_VECTORS:
            raise InputError(f"Saving text vectors is not supported for the family {kind!r}.")
        return {"architectures": [f"{base}Model"]}
    ending, form = _find_form(kind, head)
    names = getattr(head, "label_names", None) or default_labels(head.num_labels)
    optional_fields = [("problem_type", "problem_type"), ("pad_token_id", "pad_id")]
    return {
        "architectures": [base + ending],
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
        # Blocks use the key `dropout` as well, so the head must not set it.
        **{x: head.dropout_rate for x in form.dropouts[:1] if x != "dropout"},
        **{x: y for field in form.fields for x, y in field.to_hf(vars(head)).items()},
        **{
            x: y
            for x, attribute in optional_fields
            if (y := getattr(head, attribute, None)) is not None
        },
    }


def file_name(kind: str, name: str, network: TokenModel) -> str:
    """Return the name in a network's files for a tensor of `network_tensors`."""
    family = FAMILIES[kind]
    if isinstance(getattr(network, "head", None), PoolingHead):
        return name.removeprefix(family.base_prefix)
    return family.file_name(name)


def _find_form(kind, head):
    """Return the class suffix and the `TaskHead` for a head."""
    ending = TOKENS if isinstance(head, TokenHead) else SEQUENCE
    form = task_heads(kind).get(ending)
    config = head.get_config()
    expected = {} if form is None else {"use_bias": True, **form.arguments}
    differs = {x: config.get(x) for x, value in expected.items() if config.get(x) != value}
    if form is None or not isinstance(head, form.layer) or differs:
        detail = f" with {differs}" if differs else ""
        raise InputError(
            f"Models of the family {kind!r} have no {type(head).__name__}{detail}. Save the network as "
            "another family."
        )
    return ending, form
