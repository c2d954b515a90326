"""Parallelism: configs, device topology, runtime, meshes, layouts, schedules and collectives."""
