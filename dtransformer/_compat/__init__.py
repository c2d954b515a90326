"""Every private name of TensorFlow, Keras and Horovod that the package uses: none elsewhere.

Each has its reason, and what would make it unnecessary. tests/test_compat.py fails for each
one that a new version has taken away or changed, and for each one that is used past this folder.
Of Horovod none is used.
"""

from dtransformer._compat.of_keras import (
    SUBCLASS_HOOKS,
    CompileLoss,
    adds_losses,
    autocast,
    current_path,
    drop_value,
    dropped_value,
    exclude_parts_from_weight_decay,
    flat_layers,
    forget_weight,
    in_symbolic_scope,
    known_as,
    knows,
    learning_rate_of,
    mask_of,
    masks_of,
    optimizer_states,
    own_trainable_variables,
    own_variables,
    rename,
    replace_layer,
    stateless_value,
    take_weights,
    to_snake_case,
    told_as_it_is,
    train_validation_split,
    uses_weight_decay,
    variable_key,
    with_mask,
    with_masks,
    without_autocast,
)
from dtransformer._compat.of_tensorflow import (
    call_of_function,
    called_by_shapes,
    captures_replaced,
    constants_are_copied,
    expect_many_traces,
    forget_context,
    forget_dtensor_device,
    function_def,
    function_names,
    graph_of_function,
    is_compiled_by_xla,
    is_on_a_tape,
    packer,
    read_long_errors,
    with_cardinality,
    with_gradient,
)
