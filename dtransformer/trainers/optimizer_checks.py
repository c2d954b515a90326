"""What an optimizer has to do to update shards of weights."""


def leave_clipping(optimizer):
    """Let a Keras optimizer clip no gradients, which are shards: `clip_as_whole` did.

    Raises:
        ValueError: the optimizer is to clip sums of several steps' gradients.
    """
    clips = optimizer.clipvalue or optimizer.clipnorm or optimizer.global_clipnorm
    if clips and optimizer.gradient_accumulation_steps:
        raise ValueError(
            f"{type(optimizer).__name__} is to accumulate gradients "
            f"(gradient_accumulation_steps={optimizer.gradient_accumulation_steps}) and to clip "
            "them, which does not work where weights are sharded: use micro_batch_num instead"
        )
    optimizer._clip_gradients = lambda gradients: gradients


# What Keras' optimizers compute from all elements of a weight together.
_NOT_ELEMENTWISE = ("Adafactor", "Lamb", "Muon")


def check_elementwise(optimizer):
    """Check that an optimizer can update the shards of a weight one by one.

    Raises:
        ValueError: names the optimizer, and others that can.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _NOT_ELEMENTWISE:
            raise ValueError(
                f"{type(optimizer).__name__} computes with full weights, and model_parallel or "
                "optimizer_shard shards them: use an optimizer that updates each entry by itself, "
                "such as AdamW, Adam, Lion, SGD, RMSprop or Nadam"
            )


def check_shards(optimizer):
    """Refuse what an optimizer keeps of full weights, or does not do in every step.

    Raises:
        ValueError: names the option.
    """
    for name in ("use_ema", "gradient_accumulation_steps"):
        if getattr(optimizer, name):
            raise ValueError(
                f"{type(optimizer).__name__} has {name}={getattr(optimizer, name)}, which does not "
                "work where optimizer_shard shards weights"
                + ("" if name == "use_ema" else ": use micro_batch_num instead")
            )
