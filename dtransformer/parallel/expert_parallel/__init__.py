"""Tokens are sent to experts, each of which is a feed-forward layer of its own.

What is routed where is a plan, computed from the router's choice alone (`places`). On one device
tokens are sorted by their experts (`dispatch`); on a mesh, or under XLA, each expert has a
buffer of as many tokens as it takes (`buffers`), which on a mesh an all-to-all sends to the devices
that hold it.
"""
