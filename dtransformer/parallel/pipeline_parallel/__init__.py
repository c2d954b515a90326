"""Pipeline parallelism: stage assignment, dataflow between stages, and execution."""
