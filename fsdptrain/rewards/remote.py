"""Objects of another process, used as if they were here. Imports nothing of this package: the sandbox loads it alone.

The tests of a response run in one process and its program in another. Numbers, texts and containers of them are copied,
and compared where the tests run. Everything else stays in its process and is used by a handle: its calls, attributes
and operators are requests. Objects of two processes are never equal, so no operator of the program decides a test.
"""

import builtins
import importlib
import json
import socket
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"]
_OF_TWO = ("eq", "ne", "lt", "le", "gt", "ge")  # asked only if both objects are there
_OTHER = "neg pos abs invert len iter next getitem setitem delitem str repr bool int float index enter exit round"
OPERATORS = {f"__{x}__" for x in (*_BINARY, *(f"r{y}" for y in _BINARY), *_OF_TWO, *_OTHER.split(), "instancecheck")}
_CONTAINERS: dict[str, Any] = {  # subclasses count as what they extend
    cls.__name__: cls for cls in (list, tuple, set, frozenset, deque, bytearray, bytes)
}
_TEXTS: dict[str, Any] = {cls.__name__: cls for cls in (Decimal, Fraction, complex)}


class GoneError(BaseException):
    """The other process has ended. No Exception, so that no test takes it for an error of the program."""


class Proxy:
    """An object of the other process."""

    def __init__(self, peer: "Peer", number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer.ask("call", self, "", *args, **kwargs)

    def __hash__(self) -> int:
        return object.__hash__(self)


def _operator(name: str) -> Callable[..., Any]:
    asks_two = name[2:-2] in _OF_TWO

    def ask(self: Proxy, *args: Any) -> Any:
        if asks_two and type(args[0]) is not Proxy:
            return NotImplemented
        if name in ("__instancecheck__", "__exit__") and type(args[0]) is not Proxy:
            args = (None, None, None) if name == "__exit__" else args
            if name == "__instancecheck__":
                return False
        return self._peer.ask("operator", self, name, *args)

    return ask


for _name in OPERATORS:
    setattr(Proxy, _name, _operator(_name))


class Peer:
    """One end of the connection. While it waits for an answer, it answers the other end."""

    def __init__(self, connection: socket.socket, names: Mapping[str, Any] | None) -> None:
        """Serve. names: those that the other end may get. None: it gets only what it is passed, to call and to compute
        with, and public attributes of classes of the tests."""
        self._file = connection.makefile("rw", encoding="utf-8", errors="surrogatepass", newline="\n")
        self._names = names
        self._ours: dict[int, Any] = {}
        self._theirs: dict[int, Any] = {}
        self.is_gone = False

    def serve(self) -> None:
        """Answer until the other end closes."""
        while (message := self._read()) is not None:
            self._answer(message)

    def ask(self, what: str, target: Proxy | None, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Use an object of the other process and return the result, or raise its error. Raises GoneError."""
        number = None if target is None else target._number
        self._write(["ask", what, number, name, self._encode(list(args)), self._encode(kwargs)])
        while (message := self._read()) is not None:
            kind, *content = message
            if kind == "ask":
                self._answer(message)
            elif kind == "raised":
                raise self._decode(content[0])(*self._decode(content[1]))
            else:
                for index, state in content[1]:
                    _refill(args[index], self._decode(state))
                return self._decode(content[0])
        self.is_gone = True
        raise GoneError

    def _answer(self, message: list[Any]) -> None:
        try:
            args, kwargs = self._decode(message[4]), self._decode(message[5])
            before = [json.dumps(state) for state in message[4][1]]
            value = self._encode(self._do(message[1], message[2], message[3], args, kwargs))
            after = [self._encode(arg) for arg in args]
            changed = [[i, state] for i, state in enumerate(after) if json.dumps(state) != before[i]]
            reply = ["returned", value, changed]
        except GoneError:
            raise
        except BaseException as error:  # noqa: BLE001  # the program may raise anything
            raised = error if isinstance(error, Exception) else RuntimeError(type(error).__name__)
            reply = ["raised", self._encode(type(raised)), self._encode([str(arg) for arg in raised.args])]
        self._write(reply)

    def _do(self, what: str, number: int | None, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if number is None:
            if self._names is None or name not in self._names:
                raise NameError(name)
            return self._names[name]
        target = self._ours[number]
        is_defined_here = type(target).__module__ == "solution"  # by the tests; frames of generators have no secrets
        if self._names is None and (what == "set" or (what == "get" and (name[:1] == "_" or not is_defined_here))):
            raise AttributeError(name)
        if what == "get":
            return getattr(target, name)
        if what == "set":
            return setattr(target, name, *args)
        if what == "call":
            return target(*args, **kwargs)
        if name not in OPERATORS or (not hasattr(type(target), name) and name != "__bool__"):
            raise TypeError(f"{type(target).__name__} has no {name}")
        if name == "__iter__":
            return iter(target)
        if name == "__bool__":
            return bool(target)
        result = getattr(type(target), name)(target, *args)
        if result is NotImplemented:
            raise TypeError(f"unsupported operand for {name}")
        return result

    def _write(self, message: list[Any]) -> None:
        try:
            self._file.write(json.dumps(message) + "\n")
            self._file.flush()
        except (OSError, ValueError) as error:
            self.is_gone = True
            raise GoneError from error

    def _read(self) -> Any:
        try:
            line = self._file.readline()
        except (OSError, ValueError):
            line = ""
        return json.loads(line) if line.endswith("\n") else None

    def _encode(self, value: Any) -> list[Any]:
        return self._scalar(value) or self._container(value) or self._object(value)

    def _scalar(self, value: Any) -> list[Any] | None:
        kind = type(value)
        if value is None or kind is bool:
            return ["plain", value]
        if isinstance(value, int):
            return ["int", hex(int.__index__(value))]
        if isinstance(value, str):
            return ["plain", str.__add__(value, "")]
        if isinstance(value, float):
            return ["plain", float.__add__(value, 0.0)]
        if kind is _TEXTS.get(kind.__name__):
            return ["text", kind.__name__, str(value)]
        return None

    def _container(self, value: Any) -> list[Any] | None:
        kind = type(value)
        if isinstance(value, dict):
            pairs = [[self._encode(key), self._encode(x)] for key, x in dict.items(value)]
            return ["Counter" if isinstance(value, Counter) else "dict", pairs]
        for name, cls in _CONTAINERS.items():
            if isinstance(value, cls):
                return [name, [self._encode(x) for x in cls.__iter__(value)]]
        if kind is range:
            return ["range", [self._encode(x) for x in (value.start, value.stop, value.step)]]
        if kind.__module__ == "numpy" and hasattr(value, "tolist"):
            is_array = kind.__name__ == "ndarray"
            return ["array", str(value.dtype), value.tolist()] if is_array else self._encode(value.item())
        return None

    def _object(self, value: Any) -> list[Any]:
        if isinstance(value, type) and issubclass(value, Exception):
            own = next(cls for cls in value.__mro__ if getattr(builtins, cls.__name__, None) is cls)
            return ["error", own.__name__, value.__name__, None if own is value else self._handle(value)]
        if isinstance(value, Proxy):
            return ["yours", value._number]
        if isinstance(value, type(builtins)):
            return ["module", value.__name__]
        return ["ours", self._handle(value)]

    def _handle(self, value: Any) -> int:
        self._ours[id(value)] = value
        return id(value)

    def _decode(self, encoded: list[Any]) -> Any:
        kind, *content = encoded
        if kind == "plain":
            return content[0]
        if kind == "int":
            return int(content[0], 16)
        if kind in ("dict", "Counter"):
            pairs = {self._decode(key): self._decode(x) for key, x in content[0]}
            return Counter(pairs) if kind == "Counter" else pairs
        if kind in _CONTAINERS:
            return _CONTAINERS[kind]([self._decode(x) for x in content[0]])
        if kind == "text":
            return _TEXTS[content[0]](content[1])
        if kind == "range":
            return range(*map(self._decode, content[0]))
        if kind == "array":
            import numpy as np

            return np.array(content[1], dtype=np.dtype(content[0]))
        if kind == "error":
            base, name, number = content
            cls = getattr(builtins, base)
            cls = cls if isinstance(cls, type) and issubclass(cls, Exception) else RuntimeError
            return cls if number is None else self._theirs.setdefault(number, type(name, (cls,), {}))
        if kind == "module":
            if content[0].partition(".")[0] not in {*sys.stdlib_module_names, "numpy"}:
                raise NameError(content[0])
            return importlib.import_module(content[0])
        if kind == "yours":
            return self._ours[content[0]]
        return self._theirs.setdefault(content[0], Proxy(self, content[0]))


def _refill(ours: Any, now: Any) -> None:
    """Give a container that was passed the content that it has there after the call."""
    if isinstance(ours, list | bytearray):
        ours[:] = now
    elif isinstance(ours, dict | set):
        ours.clear()
        ours.update(now)
    elif isinstance(ours, deque):
        ours.clear()
        ours.extend(now)
    elif type(ours).__module__ == "numpy":
        ours[...] = now
