"""An object of the code as the tests have it, and what they may do to it without believing what only it says."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import Client

PLAIN_EXPECTED = "the code returned an object of its own where a plain value was expected"
_BINARY = (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift",
    "and", "xor", "or",
)  # fmt: skip
FORWARDED = (
    *(f"__{name}__" for name in ("contains", "lt", "le", "gt", "ge", *_BINARY)),
    *(f"__r{name}__" for name in _BINARY),
    "__len__", "__getitem__", "__setitem__", "__delitem__", "__reversed__", "__neg__", "__pos__", "__invert__",
    "__abs__", "__round__", "__int__", "__float__", "__complex__", "__index__", "__trunc__", "__floor__", "__ceil__",
    "__bytes__",
)  # fmt: skip


class Remote:
    """An object of the code: calls and attributes are forwarded; equal to itself and to no plain value.

    Where a test expects a plain value, an object that computes, compares or holds items as it likes would pass it.
    So operators are forwarded only among objects of the code, or where the tests have made the object themselves: by
    calling what they call by a name that begins with a capital letter, as Python's classes do. Others can be iterated
    once, as generators are.
    """

    def __init__(self, client: "Client", number: int, text: str):
        self.__dict__.update(_client=client, _number=number, _text=text)
        self.__dict__.update(_is_class=False, _made=False, _exhausted=False)

    def named(self, name: str, text: str) -> None:
        """Note by which name the tests have asked for it."""
        self.__dict__.update(_text=text, _is_class=name[:1].isupper())

    def __getattr__(self, name: str) -> Any:
        found = self._client.ask(do="get", target=self._client.encode(self), name=name)
        if isinstance(found, Remote):
            found.named(name, f"{self._text}.{name}")
        return found

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._client.call(self, args, kwargs)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Remote) and self.__getattr__("__eq__")(other) is True

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Remote) and self.__getattr__("__instancecheck__")(instance) is True

    def __hash__(self) -> int:
        return hash(self.__getattr__("__hash__")())

    def __str__(self) -> str:
        return str(self.__getattr__("__str__")())

    def __repr__(self) -> str:
        return self._text

    def __bool__(self) -> bool:
        self._refuse_unless_asked_for()
        for name in ("__bool__", "__len__"):
            if (method := self._method(name)) is not None:
                return bool(method())
        return True

    def __iter__(self) -> Any:
        return self._forward("__iter__") if self._made else self

    def __next__(self) -> Any:
        if self._exhausted:
            raise StopIteration
        if (method := self._method("__next__")) is None:
            raise TypeError(PLAIN_EXPECTED)
        try:
            return method()
        except StopIteration:
            self.__dict__["_exhausted"] = True
            raise

    def __enter__(self) -> Any:
        return self._forward("__enter__")

    def __exit__(self, *args: object) -> Any:
        return self._forward("__exit__", *args)

    def _refuse_unless_asked_for(self, *others: object) -> None:
        if not self._made and not (others and all(isinstance(other, Remote) for other in others)):
            raise TypeError(PLAIN_EXPECTED)

    def _method(self, name: str) -> Callable[..., Any] | None:
        try:
            return self.__getattr__(name)
        except AttributeError:
            return None

    def _forward(self, name: str, *args: object) -> Any:
        if (method := self._method(name)) is None:
            raise TypeError(f"{self!r} has no {name}")
        return method(*args)


def _add_operator(name: str) -> None:
    def method(self: Remote, *args: object) -> Any:
        self._refuse_unless_asked_for(*args)
        return self._forward(name, *args)

    setattr(Remote, name, method)


for _name in FORWARDED:
    _add_operator(_name)
