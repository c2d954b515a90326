"""The watchdog: no stop of a rank is waited for without end.

A thread of each rank sends heartbeats to rank 0, over a TCP connection of their own, and hears of
it. Rank 0 judges the job by them: a rank that is not heard of, one that has ended, a step that
makes no progress. Its verdict ends the job on every rank, with a line that names rank, host, step
and cause. A rank that does not hear of rank 0 ends by itself.

A rank that goes on and holds up the others is named, once.

What is decided is pure: `activity` (how long a rank may do what), `watch` (the verdict, and who
is slow), `stop_barrier` (after which step all ranks stop together, when one is asked to). What
carries it out: `links` (the connections), `activity_tracker` (what this rank does) and `thread`
(which also says how a rank leaves).
"""
