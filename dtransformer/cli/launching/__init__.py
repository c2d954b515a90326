"""`dtransformer launch`: starts horovodrun, and starts it again after a failure.

`hosts` (which there are, and which are left out for a while) and `outcome` (why a start has ended)
are pure; `processes` reaches the job's processes on all hosts, `supervisor` is the loop.
"""
