"""A program's function with constants for some of its arguments."""

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import update_wrapper
from typing import Any

from graftlm.errors import RequestError

__all__ = ["BoundFunction", "bind_free", "free_signature"]


class BoundFunction:
    """Calls a function with constants for some arguments; callers pass the other arguments."""

    def __init__(self, function: Callable[..., Any], constants: Mapping[str, Any]) -> None:
        """Bind constants to arguments.

        Raises:
            RequestError: a constant is no argument of the function.
        """
        self._function = function
        self._constants = dict(constants)
        update_wrapper(self, function, updated=())
        self.__signature__ = free_signature(function, constants)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the constants. Raises TypeError if the arguments do not match the free arguments."""
        bound = bind_free(self._function.__name__, self.__signature__, self._constants, *args, **kwargs)
        given = dict(bound.arguments)
        state = given.pop(next(iter(self.__signature__.parameters)))
        return self._function(state, **given, **self._constants)


def free_signature(function: Callable[..., Any], constants: Mapping[str, Any]) -> inspect.Signature:
    """Return the signature without the constants: the state and the free arguments.

    Raises:
        RequestError: a constant is no argument of the function, or an argument cannot be passed by name.
    """
    signature = inspect.signature(function)
    state, *arguments = signature.parameters.values()
    _check_named(function, state, arguments)
    names = [p.name for p in arguments]
    if unknown := set(constants) - set(names):
        raise RequestError(
            f"{function.__name__}() has no argument {', '.join(sorted(unknown))}; it has: {', '.join(names) or 'none'}"
        )
    return signature.replace(parameters=[state, *(p for p in arguments if p.name not in constants)])


def bind_free(
    program: str, signature: inspect.Signature, constants: Collection[str], /, *args: Any, **kwargs: Any
) -> inspect.BoundArguments:
    """Bind a state and free arguments to their names.

    Args:
        program: name of the program, for the message.
        signature: result of `free_signature`.
        constants: names of the bound arguments, for the message.

    Raises:
        TypeError: the arguments do not match the signature.
    """
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        free = ", ".join(list(signature.parameters)[1:]) or "none"
        bound = ", ".join(constants) or "none"
        raise TypeError(f"{program}(): {error}; its free arguments: {free}; bound already: {bound}") from None


def _check_named(function: Callable[..., Any], state: inspect.Parameter, arguments: list[inspect.Parameter]) -> None:
    unnamed = [state] if state.kind in (state.VAR_POSITIONAL, state.KEYWORD_ONLY, state.VAR_KEYWORD) else []
    unnamed += [p for p in arguments if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if unnamed:
        raise RequestError(
            f"{function.__name__}{inspect.signature(function)} cannot be bound, traced or compiled: "
            f"{', '.join(f'{p} ({p.kind.description})' for p in unnamed)} cannot be passed by name. Declare the state "
            "and then each argument, without *, ** or /"
        )
