"""The watchdog ends a job whose ranks have failed or hang.

A thread of each rank exchanges heartbeats with rank 0 over a separate TCP connection. Rank 0 judges
the job by these heartbeats: a silent rank, a rank that has ended, or a step without progress. Its
verdict ends the job on every rank, with a line that names rank, host, step and cause. A rank that
receives no heartbeats from rank 0 ends without a verdict from it.

A rank that works but slows down the others is reported once per slow period.

The decisions are pure functions and classes: `activity` (time limits of activities), `watch`
(verdicts and stragglers) and `stop_barrier` (the last step before all ranks stop together). They are
carried out by `links` (connections), `activity_tracker` (activity of this rank) and `thread` (the
watchdog thread, and how a rank leaves).
"""
