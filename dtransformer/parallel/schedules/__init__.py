"""Pipeline schedules: instructions, their order, placements and a simulator."""
