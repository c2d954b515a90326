"""Pipelines: schedules, where layers are, and what stages send each other."""
