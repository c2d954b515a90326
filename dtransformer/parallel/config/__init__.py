"""The config, its validation, ranks and their coordinates: pure."""
