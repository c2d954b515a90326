"""C++ files for Horovod's GPU operations, which compile without the CUDA compiler."""
