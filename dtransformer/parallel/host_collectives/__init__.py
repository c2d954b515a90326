"""A mesh's collectives on CPUs, between processes on one host: kernels through shared memory.

TensorFlow's own send tensors through gRPC, which copies each several times. The kernels are C++:
`dtransformer doctor --install-horovod` compiles them (`library` says from what, to where), and
`start` has TensorFlow use them, on request, where all processes of the mesh can read each other's
memory.
Elsewhere TensorFlow's own do the same work.
"""
