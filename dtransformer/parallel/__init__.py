"""Division of work: configs, the grid of devices, the job, meshes, layouts, collectives."""
