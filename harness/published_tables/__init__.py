"""Published tables beside the planner: the numbers, the systems they were measured with, the errors."""
