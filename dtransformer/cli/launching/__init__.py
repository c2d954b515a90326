"""`dtransformer launch`: starts horovodrun, and starts it again after a failure.

`hosts` (which there are, and which are left out for a while) is pure; `processes` reaches the job's
processes on all hosts, `supervisor` is the loop, and reads why a start has ended.
"""
