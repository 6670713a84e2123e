"""The one exception that means "your input, not our code"; the command line answers it with exit code 2."""


class InputError(ValueError):
    """Bad input: the message names the place, the value, the limit and the way out."""
