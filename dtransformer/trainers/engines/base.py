"""Base class of engines.

An engine runs the forward and backward passes of a batch: on one device (`LocalEngine`), on a mesh
(`MeshEngine`) or in a pipeline (`PipelineEngine`). It receives a `ForwardStep`, not the trainer.
"""


class Engine:
    """Base class of objects that run the forward and backward passes of this rank's rows.

    The methods of the single-device engine are traced into the caller's `tf.function`. The other
    engines are called from Python and compile their functions themselves. All ranks must call the
    same methods in the same order. Labels and sample weights are nested tensors, or `None`.

    Attributes:
        takes_micro_batches: Whether the engine divides a batch into micro-batches itself.
        input_shapes: Nested shapes of the inputs of one forward pass in the last training step, or
            `None` if unknown.
        num_stored_passes: Number of such forward passes whose activations are stored at the same time.
    """

    takes_micro_batches = False
    input_shapes = None
    num_stored_passes = 1

    def build(self, first) -> None:
        """Build this rank's part of the network, unless it is built.

        Args:
            first: First batch, see `trainers.data.peek`. `None` if it is unknown.
        """

    def forward_backward(self, inputs, labels, sample_weight, scalars):
        """Run the forward and backward passes of a batch.

        Returns:
            A `(gradients, outputs, sums)` tuple: a list of the gradients of the scaled loss, one
            tensor per local shard of each trainable weight, the outputs for metrics (see
            `ForwardStep.metric_outputs`), `None` if they are on another rank, and the local sums
            (see `ForwardStep.sums`).
        """

    def training_outputs(self, inputs, seed):
        """Return `ForwardStep.training_outputs`."""

    def evaluate(self, inputs, labels, sample_weight, counts):
        """Return `(outputs, sums)` as in `forward_backward`; `counts` as in `StepScalars`."""

    def predict(self, inputs):
        """Return the network's outputs on every rank."""

    def example_outputs(self):
        """Return zeros with the shapes and dtypes of outputs that are on other ranks."""

    def collectives(self):
        """Return the list of `Collective`s of a step, as it was compiled last."""
        return []
