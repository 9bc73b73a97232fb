"""The reasons why solvers stop: a number on the device, words for people."""

import enum


class Status(enum.IntEnum):
    """The reason why a solver stopped, or that it has not stopped.

    Only ``CONVERGED`` means that the test for a solution was passed. A state holds the number as an array, so that it
    works under ``jit`` and ``vmap``; ``Status(int(state.status)).words`` is the reason in words.

    Example:
        >>> import paraxis as px
        >>> px.solve.Status(1)
        <Status.CONVERGED: 1>
        >>> px.solve.Status.ITERATION_LIMIT.words
        'the limit of iterations was reached before the error was as small as tol asks'
    """

    RUNNING = 0
    CONVERGED = 1
    ITERATION_LIMIT = 2
    LINE_SEARCH_FAILED = 3
    NOT_FINITE = 4
    PRECISION = 5
    INTERRUPTED = 6

    @property
    def words(self) -> str:
        """The reason in words."""
        return _WORDS[self]


_WORDS = {
    Status.RUNNING: "the solver has not stopped",
    Status.CONVERGED: "the error is as small as tol asks",
    Status.ITERATION_LIMIT: "the limit of iterations was reached before the error was as small as tol asks",
    Status.LINE_SEARCH_FAILED: (
        "no step along the direction of descent makes the value smaller: is the gradient the derivative of the value?"
    ),
    Status.NOT_FINITE: "the value or its gradient is not finite where the solver started or went",
    Status.PRECISION: (
        "neither the value nor the gradient becomes smaller by more than rounding lets one tell; a wider dtype, or "
        "columns on one scale, may allow more"
    ),
    Status.INTERRUPTED: "Ctrl-C ended the run before the error was as small as tol asks",
}
