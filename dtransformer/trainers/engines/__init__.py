"""What runs the forward and backward pass of a batch: local, on the mesh, or in a pipeline."""
