"""C++ files that Horovod's wheel is compiled with besides its own: NCCL without CUDA's compiler."""
