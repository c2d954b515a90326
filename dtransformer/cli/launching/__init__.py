"""`dtransformer launch`: start the ranks of a job, and restart them after failures.

`hosts` parses and excludes hosts, and has no side effects. `job` starts processes on this host.
`processes` runs commands on all hosts, to find and end the job's processes. `supervisor` contains the
restart loop.
"""
