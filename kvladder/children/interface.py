"""Interfaces of calls: a class whose methods' types say what may be sent."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec

T = TypeVar("T")

_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
_encode = msgspec.msgpack.Encoder().encode


class Method:
    """A method of an interface, with encoders and decoders of its types.

    Parameters
    ----------
    function:
        The method as the interface defines it. All its parameters have types and no defaults.
    one_way:
        True if its caller does not wait for its end.

    Raises
    ------
    TypeError
        A parameter or the result has no type, or a parameter has a default.
    """

    def __init__(self, function: Callable[..., Any], *, one_way: bool) -> None:
        self.name = function.__name__
        self.is_async = inspect.iscoroutinefunction(function)
        self.one_way = one_way or not self.is_async
        types = get_type_hints(function)
        signature = inspect.signature(function)
        parameters = [*signature.parameters.values()][1:]
        self._signature = signature.replace(parameters=parameters)
        self._count = len(parameters)
        for one in parameters:
            if one.kind not in _POSITIONAL or one.default is not one.empty or one.name not in types:
                raise TypeError(f"{self.name}: {one}: expected a type and no default")
        if "return" not in types or (self.one_way and types["return"] is not type(None)):
            raise TypeError(f"{self.name}: expected the type of its result, None if it is one-way")
        wanted: Any = tuple.__class_getitem__(tuple(types[one.name] for one in parameters))
        self._arguments = msgspec.msgpack.Decoder[tuple[Any, ...]](wanted)
        self._result = msgspec.msgpack.Decoder[Any](types["return"])

    def pack(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> msgspec.Raw:
        """Return the arguments of a call, encoded.

        Raises
        ------
        TypeError
            They are not those of the method, or hold something other than plain data.
        """
        if named or len(arguments) != self._count:
            arguments = self._signature.bind(*arguments, **named).args
        try:
            return msgspec.Raw(_encode(arguments))
        except (ValueError, OverflowError, RecursionError) as error:
            raise TypeError(f"{self.name}: {error}") from error

    def unpack(self, arguments: msgspec.Raw) -> tuple[Any, ...]:
        """Return the arguments; raise ValidationError if their types are wrong."""
        unpacked: tuple[Any, ...] = self._arguments.decode(arguments)
        return unpacked

    def result(self, value: msgspec.Raw) -> Any:
        """Return the result; raise ValidationError if its type is wrong."""
        return self._result.decode(value)


class Interface(Generic[T]):
    """The methods of a class that another process may call.

    An ``async`` method is a call: its caller waits for the result. A plain method is a
    notification: its caller does not wait, and its result is None.

    Parameters
    ----------
    of:
        The class, usually a protocol. Names that begin with ``_`` are left out.
    one_way:
        Names of ``async`` methods whose caller does not wait.
    """

    def __init__(self, of: type[T], *, one_way: Collection[str] = ()) -> None:
        functions = {
            name: function
            for base in reversed(of.__mro__)
            for name, function in vars(base).items()
            if inspect.isfunction(function) and not name.startswith("_")
        }
        if unknown := sorted({*one_way}.difference(functions)):
            raise TypeError(f"{of.__name__} has no method {', '.join(unknown)}")
        self.methods = {
            name: Method(function, one_way=name in one_way) for name, function in functions.items()
        }
        """The methods by name."""
