"""The exceptions that do not mean a fault of ours: the command line answers them in one line, without a trace."""


class InputError(ValueError):
    """Bad input (exit code 2): the message names the place, the value, the limit and the way out."""


class OutsideError(RuntimeError):
    """A program that was asked for something failed (exit code 1): the message holds its own last words."""
