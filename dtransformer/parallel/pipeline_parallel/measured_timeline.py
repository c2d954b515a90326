"""Measured timeline of a step, gathered from all stages."""

import collections
import dataclasses

from dtransformer.parallel.collectives.objects import all_gather_json
from dtransformer.parallel.runtime import job
from dtransformer.parallel.schedules.timeline import Event, Timeline


def gather_timeline(computations: list[Event], sent: dict, received: dict) -> Timeline:
    """Return the measured `Timeline` of a step. All ranks must call this.

    Args:
        computations: List of `Event` objects of this rank's computations.
        sent: Dict of the start times of sends in seconds, by name.
        received: Dict of the `Event` objects of receives, by name.

    Raises:
        ValueError: If a stage has not computed anything yet.
    """
    as_json = {name: dataclasses.asdict(event) for name, event in received.items()}
    local_records = [dataclasses.asdict(event) for event in computations], sent, as_json
    all_records = all_gather_json(local_records, "timeline")
    events, sent, received = zip(*(all_records[rank] for rank in job.pipeline_group().ranks))
    if not all(events):
        raise ValueError("No training step was run yet. Call `fit` or `train_on_batch` first.")
    events = [Event.from_fields(event) for local_records in events for event in local_records]
    sent = collections.ChainMap(*sent)
    for local_records in received:  # A transfer starts when both ends are ready.
        for name, event in local_records.items():
            event = Event.from_fields(event)
            start = min(max(event.start, sent[name]), event.end)
            events.append(dataclasses.replace(event, start=start))
    return Timeline(tuple(sorted(events, key=lambda event: event.start)), job.placement())
