"""How a weight is stored, and which part of it a rank has."""
