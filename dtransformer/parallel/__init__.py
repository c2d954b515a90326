"""How work is divided: configs, the grid of devices, the job, meshes, layouts, collectives."""
