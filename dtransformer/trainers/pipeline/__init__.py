"""Pipeline parallelism: schedules as lists of instructions, and what carries them out."""
