"""Arrow batches out of Spark tasks as a DataFrame, and the errors of such tasks back as ours.

Each task runs a plain generator over its own item; what it yields crosses to the JVM as Arrow, batch by batch, so
memory is bounded by one batch. The items, addresses with passwords among them, travel inside the pickled function: no
plan, explain text or user interface shows them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from modak.core.errors import ModakError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

Item = TypeVar("Item")
_MARK = re.compile(r"modak-error (\{.*?\}) end", re.DOTALL)


@dataclass(frozen=True)
class _Work(Generic[Item]):
    """What is shipped to the tasks: all items, of which a task takes those whose numbers it is given."""

    items: Sequence[Item]
    produce: Callable[[Item], Iterator[pa.RecordBatch]]

    def run(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                try:
                    yield from self.produce(self.items[number])
                except ModakError as error:
                    raise RuntimeError(_marked(error)) from None


def frame_of(
    spark: SparkSession, schema: StructType, items: Sequence[Item], produce: Callable[[Item], Iterator[pa.RecordBatch]]
) -> DataFrame:
    """A frame whose rows `produce` yields in the tasks, one task per item."""
    if not items:
        return spark.createDataFrame([], schema)
    surface_errors()
    numbers = spark.range(0, len(items), 1, len(items))
    work = _Work(tuple(items), produce)
    return _map_in_arrow(numbers, work.run, schema)


def _map_in_arrow(numbers: DataFrame, run: Callable[..., Any], schema: StructType) -> DataFrame:
    """`DataFrame.mapInArrow`, which asks for pandas by mistake: neither side of it uses any."""
    from pyspark.sql import DataFrame
    from pyspark.sql.udf import UserDefinedFunction
    from pyspark.util import PythonEvalType

    made = UserDefinedFunction(run, schema, name="modak", evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    call: Any = made(numbers["id"])
    java: Any = numbers._jdf
    return DataFrame(java.mapInArrow(call._jc, False, None), numbers.sparkSession)


def surface_errors() -> None:
    """Let an error that a task of ours reports arrive in the driver as itself instead of as a Java stack trace."""
    from pyspark.errors.exceptions import captured

    module: Any = captured
    before = module.convert_exception
    if getattr(before, "surfaces_modak_errors", False):
        return

    def form(thrown: Any) -> Any:
        told = _told(str(thrown.toString())) if _from_tasks(thrown) else None
        return told if told is not None else before(thrown)

    form.surfaces_modak_errors = True  # type: ignore[attr-defined]
    # The session compares the module of the hook that it finds, to set its own only once.
    form.__module__ = before.__module__
    module.convert_exception = form


def _from_tasks(thrown: Any) -> bool:
    return str(thrown.getClass().getName()).startswith("org.apache.spark.")


def _marked(error: ModakError) -> str:
    told = {"code": error.code, "message": error.message, "hint": error.hint, "retryable": error.retryable}
    return f"modak-error {json.dumps(told)} end"


def _told(text: str) -> ModakError | None:
    found = _MARK.search(text)
    if found is None:
        return None
    told = json.loads(found[1])
    return ModakError(told["code"], told["message"], hint=told["hint"], retryable=told["retryable"])
