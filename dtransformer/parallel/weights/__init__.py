"""Storage of weights, and the part of one that a rank has."""
