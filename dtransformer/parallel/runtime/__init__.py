"""Runtime of a job: start, devices, process groups and shutdown."""
