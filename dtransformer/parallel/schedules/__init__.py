"""Pipeline schedules: instructions, their order, a simulator, placements; pure."""
