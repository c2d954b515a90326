"""Instructions of a pipeline stage and the dependencies between them.

The placement of the model chunks alone determines senders and receivers, for every schedule.
"""

import dataclasses

from dtransformer.parallel.schedules.placement import Placement

FORWARD = "forward"
BACKWARD = "backward"
WEIGHT_GRADIENTS = "weight_gradients"
SEND_ACTIVATIONS = "send_activations"
RECEIVE_ACTIVATIONS = "receive_activations"
SEND_GRADIENTS = "send_gradients"
RECEIVE_GRADIENTS = "receive_gradients"
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
    """One operation of a stage on one micro-batch.

    A backward pass is one computation, or two if the schedule divides it. In that case `BACKWARD`
    computes input gradients and `WEIGHT_GRADIENTS` the rest.

    Sends and receives run in the background. A receive only announces that the stage is ready. The
    computation that needs the tensor waits for it.

    Args:
        kind: Constant of this module.
        micro_batch: Integer. Index of the micro-batch.
        chunk: Integer. Index of the model chunk that computes, sends or receives. See `Placement`.
        peer: Integer. Stage at the other end of a send or a receive, and `None` for computations.
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

    Before each computation, a stage posts the receive of the next one, so that transfers overlap
    with computations.
    """
    inputs = [get_input(computation, placement) for computation in computations]
    received = [[i] if i and i.kind not in COMPUTATIONS else [] for i in inputs]
    result = received[0][:]
    for computation, next_receives in zip(computations, [*received[1:], []]):
        result += [*next_receives, computation, *get_sends(computation, placement)]
    return result


def without_backward(instructions: list[Instruction], first_trained: int) -> list[Instruction]:
    """Return a stage's instructions if the weights of the first chunks are frozen.

    Frozen chunks have no backward passes and receive no gradients.

    Args:
        instructions: Ordered list of the instructions of a stage.
        first_trained: Integer. Index of the first model chunk with a trained weight.

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
    return [
        instruction
        for instruction in instructions
        if instruction.chunk > last_without.get(instruction.kind, -1)
    ]


def get_producer(computation: Instruction, placement: Placement) -> Instruction | None:
    """Return the computation, on any stage, that produces the input of a computation.

    A forward pass needs the forward pass of the previous chunk, and a backward pass the backward
    pass of the next chunk. The last chunk's backward pass needs its forward pass, and weight
    gradients need the backward pass. The result is `None` for the inputs of the network.
    """
    k = computation.micro_batch
    chunk = computation.chunk
    if computation.kind == WEIGHT_GRADIENTS:
        return Instruction(BACKWARD, k, chunk)
    if computation.kind == FORWARD:
        return Instruction(FORWARD, k, chunk - 1) if chunk else None
    if chunk == placement.last_chunk:
        return Instruction(FORWARD, k, chunk)
    return Instruction(BACKWARD, k, chunk + 1)


def get_input(computation: Instruction, placement: Placement) -> Instruction | None:
    """Return the instruction, on the same stage, that provides the input of a computation.

    It is the producing computation if that runs on the same stage, and otherwise a receive.
    """
    producer = get_producer(computation, placement)
    if producer is None:
        return None
    peer = placement.get_stage(producer.chunk)
    chunk = computation.chunk
    if peer == placement.get_stage(chunk):
        return producer
    receive = RECEIVE_ACTIVATIONS if producer.kind == FORWARD else RECEIVE_GRADIENTS
    return Instruction(receive, computation.micro_batch, chunk, peer)


def get_sends(computation: Instruction, placement: Placement) -> list[Instruction]:
    """Return a list with the send of a computation's result, empty if no other stage needs it."""
    k = computation.micro_batch
    chunk = computation.chunk
    if computation.kind == WEIGHT_GRADIENTS:
        return []
    if computation.kind == FORWARD:
        kind = SEND_ACTIVATIONS
        peer = placement.stage_after(chunk)
    else:
        kind = SEND_GRADIENTS
        peer = placement.stage_before(chunk)
    if peer is None or peer == placement.get_stage(chunk):
        return []
    return [Instruction(kind, k, chunk, peer)]


def get_receive(send: Instruction, placement: Placement) -> Instruction:
    """Return the receive on stage `send.peer` that matches a send."""
    sender = placement.get_stage(send.chunk)
    if send.kind == SEND_ACTIVATIONS:
        return Instruction(RECEIVE_ACTIVATIONS, send.micro_batch, send.chunk + 1, sender)
    return Instruction(RECEIVE_GRADIENTS, send.micro_batch, send.chunk - 1, sender)
