"""Pipeline schedules: what each stage does, in which order, as lists of instructions.

A schedule is a function that gives the order of a stage's computations. `instructions`
adds the messages that these need. Stages with several chunks hold parts of the network
that do not follow each other: chunk c of stage r is part c·p + r of v·p.

References: GPipe, Huang et al., 2018, arXiv 1811.06965; 1F1B, Narayanan et al., 2019,
"PipeDream", and Narayanan et al., 2020, arXiv 2006.09503; interleaved 1F1B, Narayanan et
al., 2021, arXiv 2104.04473, §2.2.
"""

import dataclasses

from dtransformer.parallel import validators

FORWARD, BACKWARD = "forward", "backward"
SEND_ACTIVATIONS, RECEIVE_ACTIVATIONS = "send_activations", "receive_activations"
SEND_GRADIENTS, RECEIVE_GRADIENTS = "send_gradients", "receive_gradients"
REDUCE, UPDATE = "reduce", "update"
COMPUTATIONS = (FORWARD, BACKWARD)

_LETTERS = {
    FORWARD: "F",
    BACKWARD: "B",
    SEND_ACTIVATIONS: "a>",
    RECEIVE_ACTIVATIONS: "a<",
    SEND_GRADIENTS: "g>",
    RECEIVE_GRADIENTS: "g<",
    REDUCE: "reduce",
    UPDATE: "update",
}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One thing that a stage does.

    Sends go on by themselves. A receive says that a message may come from now on: the
    computation that needs it waits for it.

    Args:
        kind: one of this module's constants.
        micro_batch: number of the micro-batch; None for the whole step's.
        chunk: number of the part of the network among those of the stage.
        peer: the stage at the other end of a message; None elsewhere.
    """

    kind: str
    micro_batch: int | None = None
    chunk: int = 0
    peer: int | None = None

    def __str__(self):
        number = "" if self.micro_batch is None else str(self.micro_batch)
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{_LETTERS[self.kind]}{number}{chunk}"


def gpipe(stage, num_stages, num_micro_batches, num_chunks=1):
    """All forward passes, then all backward passes: m micro-batches are alive at once.

    Args:
        stage: number r of the stage, from 0.
        num_stages: number p of stages.
        num_micro_batches: number m of micro-batches of a step.
        num_chunks: must be 1.

    Returns:
        A list of `Instruction`s that are computations only.

    Example:

    >>> print(*gpipe(0, num_stages=2, num_micro_batches=3))
    F0 F1 F2 B0 B1 B2
    """
    numbers = range(num_micro_batches)
    return [Instruction(kind, k) for kind in (FORWARD, BACKWARD) for k in numbers]


def one_forward_one_backward(stage, num_stages, num_micro_batches, num_chunks=1):
    """A backward pass as soon as it can be: min(p − r, m) micro-batches are alive at once.

    Arguments and result are those of `gpipe`.

    Example:

    >>> print(*one_forward_one_backward(0, num_stages=2, num_micro_batches=3))
    F0 F1 B0 F2 B1 B2
    """
    ahead = min(num_stages - stage - 1, num_micro_batches)
    numbers = range(num_micro_batches)
    return _alternate(
        ahead,
        [Instruction(FORWARD, k) for k in numbers],
        [Instruction(BACKWARD, k) for k in numbers],
    )


def interleaved(stage, num_stages, num_micro_batches, num_chunks):
    """1F1B with v chunks a stage: p micro-batches go through a chunk, then through the next.

    Arguments and result are those of `gpipe`; m is a multiple of p.

    Example:

    >>> print(*interleaved(1, num_stages=2, num_micro_batches=2, num_chunks=2))
    F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1
    """
    total, turn = num_micro_batches * num_chunks, num_stages * num_chunks

    def place(number):
        """Return the micro-batch and the chunk of the number-th forward pass."""
        group, within = divmod(number, turn)
        return group * num_stages + within % num_stages, within // num_stages

    forwards = [Instruction(FORWARD, *place(i)) for i in range(total)]
    last = num_chunks - 1
    backwards = [Instruction(BACKWARD, f.micro_batch, last - f.chunk) for f in forwards]
    ahead = min(2 * (num_stages - stage - 1) + last * num_stages, total)
    return _alternate(ahead, forwards, backwards)


def _alternate(ahead, forwards, backwards):
    """Return so many forward passes, then one of each in turn, then what is left."""
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead :]


SCHEDULES = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "interleaved": interleaved}


def instructions(name, num_stages, num_micro_batches, num_chunks=1):
    """Return what every stage does in a step.

    A stage says that it is ready to receive what its next computation needs before it
    starts the current one, so that messages travel meanwhile.

    Args:
        name: `"gpipe"`, `"1f1b"` or `"interleaved"`.
        num_stages: number p of stages.
        num_micro_batches: number m of micro-batches of a step.
        num_chunks: number v of chunks of each stage.

    Returns:
        A list with the list of `Instruction`s of each stage.

    Raises:
        ValueError: see `check_schedule`.

    Example:

    >>> for stage in instructions("1f1b", num_stages=2, num_micro_batches=2):
    ...     print(*stage)
    F0 a>0 g<0 F1 a>1 g<1 B0 B1 reduce update
    a<0 F0 a<1 B0 g>0 F1 B1 g>1 reduce update
    """
    validators.check_schedule(name, num_stages, num_micro_batches, num_chunks)
    return [
        _with_messages(
            SCHEDULES[name](stage, num_stages, num_micro_batches, num_chunks),
            stage,
            num_stages,
            num_chunks,
        )
        for stage in range(num_stages)
    ]


def _with_messages(computations, stage, num_stages, num_chunks):
    """Add the messages, the reduction of the gradients and the update."""
    received = [_receive(one, stage, num_stages, num_chunks) for one in computations]
    result = received[0][:]
    for one, nexts in zip(computations, [*received[1:], []]):
        result += [*nexts, one, *_send(one, stage, num_stages, num_chunks)]
    return [*result, Instruction(REDUCE), Instruction(UPDATE)]


def _receive(computation, stage, num_stages, num_chunks):
    """Return what a computation needs from another stage: a list of at most one."""
    k, chunk = computation.micro_batch, computation.chunk
    if computation.kind == FORWARD:
        if stage == chunk == 0:
            return []
        return [Instruction(RECEIVE_ACTIVATIONS, k, chunk, (stage - 1) % num_stages)]
    if (stage, chunk) == (num_stages - 1, num_chunks - 1):
        return []
    return [Instruction(RECEIVE_GRADIENTS, k, chunk, (stage + 1) % num_stages)]


def _send(computation, stage, num_stages, num_chunks):
    """Return the message of what a computation gives: a list of at most one."""
    k, chunk = computation.micro_batch, computation.chunk
    if computation.kind == FORWARD:
        if (stage, chunk) == (num_stages - 1, num_chunks - 1):
            return []
        return [Instruction(SEND_ACTIVATIONS, k, chunk, (stage + 1) % num_stages)]
    if stage == chunk == 0:
        return []
    return [Instruction(SEND_GRADIENTS, k, chunk, (stage - 1) % num_stages)]


def receiver(instruction, stage, num_stages):
    """Return the stage and the instruction that a send is received by."""
    if instruction.kind == SEND_ACTIVATIONS:
        chunk = instruction.chunk + (stage == num_stages - 1)
        return instruction.peer, Instruction(
            RECEIVE_ACTIVATIONS, instruction.micro_batch, chunk, stage
        )
    chunk = instruction.chunk - (stage == 0)
    return instruction.peer, Instruction(RECEIVE_GRADIENTS, instruction.micro_batch, chunk, stage)
