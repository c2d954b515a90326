"""Collectives on CPUs between processes on one host: kernels through shared memory.

TensorFlow's own send a mesh's tensors through gRPC, and Horovod sends those of a data-parallel group
through sockets; both copy each several times. The kernels are C++: `dtransformer doctor
--install-horovod` compiles them (`library` says from what, to where). `start` has TensorFlow use
them where all ranks of a group can read each other's memory; `operations` are the data-parallel
group's. Elsewhere the others do the same work.
"""
