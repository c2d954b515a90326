"""The error for what a user can mend: files, configs, command lines."""


class InputError(ValueError):
    """Something given to the library is wrong and the user can mend it.

    The message is one line: what came, what was expected, how to mend it. The
    command line prints it without a traceback and exits with code 2.
    """
