"""Expert parallelism: dispatch of tokens to experts, which are separate feed-forward layers.

`places` plans the dispatch from the router's choices. On one device, tokens are sorted by expert
(`dispatch`). On a mesh or with XLA, each expert has a buffer with the size of its capacity
(`buffers`). On a mesh, an all-to-all sends the buffers to the devices of the experts.
"""
