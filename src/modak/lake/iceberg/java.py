"""The border to Iceberg's Java API: loops that run inside the JVM, and Java's exceptions as ours.

A call over Py4J costs a fifth of a millisecond, so nothing here is done per file from Python. Method handles become
Java functions and consumers, and a Java stream runs the loop; files and lists cross the border as a few long texts.
Chunks bound what is in flight on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from modak.core.errors import ModakError
from modak.lake.model import DataFile, EqualityDeletes, Vector
from modak.spark.gateway import Gateway
from modak.storage.client import scrubbed

_CHUNK_CHARS = 4 << 20
_CHUNK_LINES = 10_000
_PRIMITIVES = {"int": "Integer", "long": "Long", "boolean": "Boolean"}
_ICEBERG = "org.apache.iceberg."
_AWS = ("software.amazon.",)
_CLOUDS = (*_AWS, "com.google.cloud.", "com.azure.")
_JSON_NODE = _ICEBERG + "shaded.com.fasterxml.jackson.databind.JsonNode"


class JavaFailure(Exception):
    """An exception that Java threw, by class name and message; callers turn it into what it means there."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name
        self.message = message

    @property
    def simple_name(self) -> str:
        """The class name without its package."""
        return self.name.rpartition(".")[2]


def plainly(failure: JavaFailure, doing: str) -> ModakError:
    """What a failure means wherever it comes from."""
    match failure.simple_name:
        case "UncheckedSQLException":
            return ModakError(
                "lake.catalog_unreachable",
                f"Iceberg could not read its catalog tables while {doing}.",
                hint="Is Postgres reachable over TCP, and was `modak-worker migrate` run?",
                retryable=True,
            )
        case _ if failure.name.startswith(_CLOUDS):
            denied = failure.name.startswith(_AWS) and "Status Code: 403" in failure.message
            return ModakError(
                "storage.denied" if denied else "lake.storage",
                f"The object store failed while {doing}: {scrubbed(failure.message.partition('(')[0])}",
                hint="Check the credentials and rights." if denied else "The work is tried again.",
                retryable=not denied,
            )
        case _ if "No FileSystem for scheme" in failure.message or "UnsupportedFileSystemException" in str(failure):
            return ModakError(
                "spark.jars_needed",
                f"The JVM of this process was started without the jars of the store, while {doing}.",
                hint="Start the worker again; it brings the jars that the storage profiles need.",
                retryable=True,
            )
        case "NotFoundException":
            return ModakError("lake.file_missing", f"A file of the lake is missing while {doing}: {failure.message}")
        case "RuntimeIOException" | "UncheckedIOException":
            return ModakError(
                "lake.storage",
                f"Storage failed while {doing}: {failure.message}",
                hint="Check the space in the warehouse and the right to write there; the work is tried again.",
                retryable=True,
            )
        case _:
            return ModakError("lake.failed", f"Iceberg failed while {doing}: {failure}")


def _told(thrown: Any) -> str:
    """What Java says, with the reason at the bottom (read-only, no space) that its wrappers leave out."""
    message, root = thrown.getMessage() or "", thrown
    while (cause := root.getCause()) is not None:
        root = cause
    reason = root.getMessage() or ""
    return message if not reason or reason in message else f"{message} ({reason})"


class _Names:
    """A package or a class, whose parts are asked for once: Py4J asks the JVM for every part of a name, every time."""

    def __init__(self, named: Any) -> None:
        self._named = named

    def __getattr__(self, name: str) -> Any:
        from py4j.java_gateway import JavaClass, JavaPackage

        found = getattr(self._named, name)
        if isinstance(found, JavaClass | JavaPackage):
            found = _Names(found)
        self.__dict__[name] = found
        return found

    def __call__(self, *arguments: Any) -> Any:
        return self._named(*arguments)


class Java:
    """A JVM with Iceberg in it, and the few idioms that keep calls to it few."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.jvm = _Names(gateway.jvm)
        self.iceberg = self.jvm.org.apache.iceberg
        self._types: dict[str, Any] = {}
        self._handles: dict[tuple[str, ...], Any] = {}
        self._lasting: dict[int, Any] = {}
        """Handles that are the same for every call, by identity; so is what is made of them alone."""
        self._made: dict[tuple[object, ...], Any] = {}
        self._loader = self.jvm.java.lang.Thread.currentThread().getContextClassLoader()
        self._here: Any | None = None

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Turn what Java throws into a `JavaFailure`; a JVM that is gone is a `ModakError`."""
        from py4j.protocol import Py4JError, Py4JJavaError

        with self.gateway.guard():
            try:
                yield
            except Py4JJavaError as error:
                thrown = error.java_exception
                raise JavaFailure(thrown.getClass().getName(), _told(thrown)) from error
            except Py4JError as error:
                if self.gateway.is_loss(error):
                    raise
                raise JavaFailure("py4j.Py4JError", str(error)) from error

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Give every failure inside its plain meaning."""
        try:
            with self.failures():
                yield
        except JavaFailure as failure:
            raise plainly(failure, what) from failure

    def type(self, name: str) -> Any:
        """A class by name, or a primitive type; `.Name` is one of Iceberg's."""
        if name not in self._types:
            self._types[name] = self._type(name)
        return self._types[name]

    def _type(self, name: str) -> Any:
        if name in _PRIMITIVES:
            return getattr(self.jvm.java.lang, _PRIMITIVES[name]).TYPE
        return self.jvm.java.lang.Class.forName(_ICEBERG + name[1:] if name[0] == "." else name, True, self._loader)

    def objects(self, items: Iterable[Any]) -> Any:
        """A Java list of a few objects."""
        made = self.jvm.java.util.ArrayList()
        for item in items:
            made.add(item)
        return made

    @property
    def here(self) -> Any:
        """An executor whose work is done by whoever asks for it, before the asking returns."""
        if self._here is None:
            self._here = (
                self.iceberg.relocated.com.google.common.util.concurrent.MoreExecutors.newDirectExecutorService()
            )
        return self._here

    def strings(self, items: Iterable[str]) -> Any:
        """A Java list of strings, sent as one text."""
        text = "\n".join(items)
        if not text:
            return self.jvm.java.util.ArrayList()
        return self.jvm.java.util.regex.Pattern.compile("\n").splitAsStream(text).toList()

    def method(self, owner: str, name: str, returns: str, *takes: str) -> Any:
        """A handle of an instance method."""
        return self._handle("findVirtual", owner, name, returns, takes)

    def static(self, owner: str, name: str, returns: str, *takes: str) -> Any:
        """A handle of a static method."""
        return self._handle("findStatic", owner, name, returns, takes)

    def _handle(self, find: str, owner: str, name: str, returns: str, takes: tuple[str, ...]) -> Any:
        key = (find, owner, name, returns, *takes)
        if key not in self._handles:
            invoke = self.jvm.java.lang.invoke
            shape = invoke.MethodType.methodType(self.type(returns), self.objects(map(self.type, takes)))
            lookup = invoke.MethodHandles.publicLookup()
            self._handles[key] = self._last(getattr(lookup, find)(self.type(owner), name, shape))
        return self._handles[key]

    def _last(self, handle: Any) -> Any:
        self._lasting[id(handle)] = handle
        return handle

    def _once(self, how: str, handles: Sequence[Any], make: Callable[[], Any]) -> Any:
        """What is made of handles; kept when they last."""
        if not all(id(handle) in self._lasting for handle in handles):
            return make()
        key = (how, *map(id, handles))
        if key not in self._made:
            self._made[key] = self._last(make())
        return self._made[key]

    def after(self, first: Any, *then: Any) -> Any:
        """One handle that calls several in a row, each on the result of the one before."""
        return self._once("after", (first, *then), lambda: self._in_a_row(first, then))

    def _in_a_row(self, first: Any, then: Sequence[Any]) -> Any:
        for handle in then:
            fitting = handle.asType(handle.type().changeParameterType(0, first.type().returnType()))
            first = self.jvm.java.lang.invoke.MethodHandles.filterReturnValue(first, fitting)
        return first

    def bind(self, handle: Any, position: int, value: Any) -> Any:
        """A handle with one argument fixed."""
        values = self.array("java.lang.Object", [value])
        return self.jvm.java.lang.invoke.MethodHandles.insertArguments(handle, position, values)

    def spread(self, handle: Any, taken: str, *parts: Any) -> Any:
        """A handle of one object that calls `handle` with each of `parts` of that object."""
        handles, methods = self.jvm.java.lang.invoke.MethodHandles, self.jvm.java.lang.invoke.MethodType
        kind, shape = self.type(taken), handle.type()
        fitting = [part.asType(methods.methodType(shape.parameterType(i), kind)) for i, part in enumerate(parts)]
        filtered = handles.filterArguments(handle, 0, self.array("java.lang.invoke.MethodHandle", fitting))
        # A fresh int array is all zeros: every argument is the first and only one.
        order = self.jvm.java.lang.reflect.Array.newInstance(self.jvm.java.lang.Integer.TYPE, len(parts))
        return handles.permuteArguments(filtered, methods.methodType(shape.returnType(), kind), order)

    def function(self, handle: Any) -> Any:
        """A `java.util.function.Function`."""
        return self._proxy("java.util.function.Function", handle)

    def consumer(self, handle: Any) -> Any:
        """A `java.util.function.Consumer`."""
        return self._proxy("java.util.function.Consumer", handle)

    def predicate(self, handle: Any) -> Any:
        """A `java.util.function.Predicate`."""
        return self._proxy("java.util.function.Predicate", handle)

    def _proxy(self, interface: str, handle: Any) -> Any:
        proxies = self.jvm.java.lang.invoke.MethodHandleProxies
        return self._once(interface, (handle,), lambda: proxies.asInterfaceInstance(self.type(interface), handle))

    def array(self, element: str, items: Sequence[Any]) -> Any:
        """A Java array of a few objects."""
        made = self.jvm.java.lang.reflect.Array.newInstance(self.type(element), len(items))
        for index, item in enumerate(items):
            self.jvm.java.lang.reflect.Array.set(made, index, item)
        return made

    def stream(self, iterable: Any) -> Any:
        """A sequential stream over any Java iterable."""
        return self.stream_on(iterable.iterator())

    def stream_on(self, iterator: Any) -> Any:
        """A sequential stream of what an iterator still has; a limited one takes no more than its limit from it."""
        # Not the iterable's own `spliterator`: Py4J does not see default methods of classes that are not public.
        spliterator = self.jvm.java.util.Spliterators.spliteratorUnknownSize(iterator, 0)
        return self.jvm.java.util.stream.StreamSupport.stream(spliterator, False)

    def texts(self, items: Any, handle: Any = None) -> list[str]:
        """Every item of a Java list (or `handle` of it) as a string; fetched in a few calls."""
        if items.isEmpty():
            return []
        as_text = self.static("java.util.Objects", "toString", "java.lang.String", "java.lang.Object")
        if handle is not None:
            as_text = self.after(handle, as_text)
        found: list[str] = []
        function = self.function(as_text)
        size = items.size()
        for start in range(0, size, _CHUNK_LINES):
            part = items.subList(start, min(size, start + _CHUNK_LINES)).stream().map(function)
            found += part.collect(self.jvm.java.util.stream.Collectors.joining("\n")).split("\n")
        return found

    def feed(self, files: Sequence[DataFile | Vector | EqualityDeletes], specs: Any, consumer: Any) -> None:
        """Parse files from their JSON and hand each to a Java consumer, all inside the JVM."""
        from_json = self.static(".ContentFileParser", "fromJson", ".ContentFile", _JSON_NODE, "java.util.Map")
        parse = self.function(self.bind(from_json, 1, specs))
        mapper = self.iceberg.util.JsonUtil.mapper()
        for chunk in _chunks(file.json for file in files):
            self.stream(mapper.readTree(f"[{','.join(chunk)}]")).map(parse).forEach(consumer)


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    size = 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if size >= _CHUNK_CHARS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
