"""Storage of weights, and the shards that a rank has."""
