"""Tensor parallelism for layers of Keras and KerasHub, by weight path or by layer type."""
