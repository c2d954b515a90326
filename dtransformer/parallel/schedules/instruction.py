"""Instructions: what a stage of a pipeline does for a micro-batch, and which need each other.

Who sends to whom follows from the placement of the model chunks alone, whatever the schedule.
"""

import dataclasses

from dtransformer.parallel.schedules.placement import Placement

FORWARD, BACKWARD, WEIGHT_GRADIENTS = "forward", "backward", "weight_gradients"
SEND_ACTIVATIONS, RECEIVE_ACTIVATIONS = "send_activations", "receive_activations"
SEND_GRADIENTS, RECEIVE_GRADIENTS = "send_gradients", "receive_gradients"
COMPUTATIONS = (FORWARD, BACKWARD, WEIGHT_GRADIENTS)
SENDS = (SEND_ACTIVATIONS, SEND_GRADIENTS)
RECEIVES = (RECEIVE_ACTIVATIONS, RECEIVE_GRADIENTS)

_LETTERS = {
    FORWARD: "F",
    BACKWARD: "B",
    WEIGHT_GRADIENTS: "W",
    SEND_ACTIVATIONS: "a>",
    RECEIVE_ACTIVATIONS: "a<",
    SEND_GRADIENTS: "g>",
    RECEIVE_GRADIENTS: "g<",
}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One thing that a stage does for one micro-batch.

    A backward pass is one computation, or, where the schedule divides it, two: `BACKWARD` is then
    that for inputs, and `WEIGHT_GRADIENTS` what it leaves.

    Sends go on by themselves. A receive says that something may come from now on: the
    computation that needs it waits for it.

    Args:
        kind: one of this module's constants.
        micro_batch: number of the micro-batch.
        chunk: number of the model chunk that computes, gives or takes; see `Placement`.
        peer: the stage at the other end of a send or a receive; None elsewhere.
    """

    kind: str
    micro_batch: int
    chunk: int = 0
    peer: int | None = None

    def __str__(self):
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{_LETTERS[self.kind]}{self.micro_batch}{chunk}"


def with_transfers(computations: list[Instruction], placement: Placement) -> list[Instruction]:
    """Return the computations of a stage with the sends and receives that they need.

    A stage says that it is ready to receive what its next computation needs before it
    starts the current one, so that sends go on meanwhile.
    """
    inputs = [input_of(one, placement) for one in computations]
    received = [[i] if i and i.kind not in COMPUTATIONS else [] for i in inputs]
    result = received[0][:]
    for one, nexts in zip(computations, [*received[1:], []]):
        result += [*nexts, one, *send_of(one, placement)]
    return result


def without_backward(instructions: list[Instruction], first_trained: int) -> list[Instruction]:
    """Return a stage's instructions where no weight of the chunks before one is trained.

    They have no backward passes, and nobody sends them gradients.

    Args:
        instructions: of a stage, in their order.
        first_trained: number of the first model chunk with a weight that is trained.

    Example:

    >>> passes = [Instruction(FORWARD, 0, 1), Instruction(BACKWARD, 0, 1)]
    >>> second_stage = with_transfers(passes, Placement.looped(2))
    >>> print(*second_stage)
    a<0.1 F0.1 B0.1 g>0.1
    >>> print(*without_backward(second_stage, first_trained=1))
    a<0.1 F0.1 B0.1
    """
    last_without = {SEND_GRADIENTS: first_trained}
    last_without |= dict.fromkeys(
        (BACKWARD, WEIGHT_GRADIENTS, RECEIVE_GRADIENTS), first_trained - 1
    )
    return [one for one in instructions if one.chunk > last_without.get(one.kind, -1)]


def needed_by(computation: Instruction, placement: Placement) -> Instruction | None:
    """Return the computation, of any stage, that gives a computation what it computes with.

    That of the chunk before or after: for the backward pass of the last chunk its own forward
    pass, for the gradients of weights the backward pass. None for the network's inputs.
    """
    k, chunk = computation.micro_batch, computation.chunk
    if computation.kind == WEIGHT_GRADIENTS:
        return Instruction(BACKWARD, k, chunk)
    if computation.kind == FORWARD:
        return Instruction(FORWARD, k, chunk - 1) if chunk else None
    if chunk == placement.last_chunk:
        return Instruction(FORWARD, k, chunk)
    return Instruction(BACKWARD, k, chunk + 1)


def input_of(computation: Instruction, placement: Placement) -> Instruction | None:
    """Return the instruction of the same stage that gives a computation what it computes with.

    The computation itself, where that is on the same stage, else a receive.
    """
    needed = needed_by(computation, placement)
    if needed is None:
        return None
    peer, chunk = placement.stage_of(needed.chunk), computation.chunk
    if peer == placement.stage_of(chunk):
        return needed
    receive = RECEIVE_ACTIVATIONS if needed.kind == FORWARD else RECEIVE_GRADIENTS
    return Instruction(receive, computation.micro_batch, chunk, peer)


def send_of(computation: Instruction, placement: Placement) -> list[Instruction]:
    """Return the send of what a computation gives to another stage: a list of at most one."""
    k, chunk = computation.micro_batch, computation.chunk
    if computation.kind == WEIGHT_GRADIENTS:
        return []
    if computation.kind == FORWARD:
        kind, peer = SEND_ACTIVATIONS, placement.stage_after(chunk)
    else:
        kind, peer = SEND_GRADIENTS, placement.stage_before(chunk)
    if peer is None or peer == placement.stage_of(chunk):
        return []
    return [Instruction(kind, k, chunk, peer)]


def receive_of(send: Instruction, placement: Placement) -> Instruction:
    """Return the instruction of the stage `send.peer` that receives a send."""
    sender = placement.stage_of(send.chunk)
    if send.kind == SEND_ACTIVATIONS:
        return Instruction(RECEIVE_ACTIVATIONS, send.micro_batch, send.chunk + 1, sender)
    return Instruction(RECEIVE_GRADIENTS, send.micro_batch, send.chunk - 1, sender)
