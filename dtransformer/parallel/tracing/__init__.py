"""Tracing context, functions shared by equal layers, and random numbers of layers."""
