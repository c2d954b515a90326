"""The timeline of a step that was run: every stage tells what it did, and when."""

import collections
import dataclasses

from dtransformer.parallel.collectives.objects import all_gather_json
from dtransformer.parallel.runtime import job
from dtransformer.parallel.schedules.timeline import Event, Timeline


def gather_timeline(computations: list[Event], sent: dict, received: dict) -> Timeline:
    """Return the `Timeline` of a step. All ranks have to call.

    Args:
        computations: list of the `Event`s of this rank's computations.
        sent: dict of the names of sends and when they began, in seconds.
        received: dict of the names of receives and their `Event`s.

    Raises:
        ValueError: a stage has computed nothing yet.
    """
    as_json = {name: dataclasses.asdict(event) for name, event in received.items()}
    own = [dataclasses.asdict(event) for event in computations], sent, as_json
    everyone = all_gather_json(own, "timeline")
    events, sent, received = zip(*(everyone[rank] for rank in job.pipeline_group().ranks))
    if not all(events):
        raise ValueError("no training step was run yet: call fit or train_on_batch first")
    events = [Event.of(event) for own in events for event in own]
    sent = collections.ChainMap(*sent)
    for own in received:  # a transfer begins once both ends are ready
        for name, event in own.items():
            event = Event.of(event)
            start = min(max(event.start, sent[name]), event.end)
            events.append(dataclasses.replace(event, start=start))
    return Timeline(tuple(sorted(events, key=lambda event: event.start)), job.placement())
