"""How work is divided: configs, the grid of ranks, the job, layouts."""
