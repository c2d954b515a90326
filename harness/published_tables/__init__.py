"""Published measurements next to the planner's estimates: data, systems and errors."""
