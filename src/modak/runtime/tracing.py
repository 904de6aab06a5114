"""Traces by configuration: with `MODAK_OTLP_ENDPOINT` every piece of work and every HTTP request becomes a span.

Without it, or before `begin`, a span costs a function call. The exporter sends in a thread of its own and drops what it
cannot send, so a collector that is away holds up nothing; its queue bounds the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from modak import __version__
from modak.core.errors import Refused

_tracer: Any = None
_provider: Any = None


def begin(endpoint: str | None, holder: str) -> None:
    """Send spans to a collector from now on; no endpoint: none."""
    global _tracer, _provider
    if endpoint is None or _provider is not None:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise Refused(
            "tracing.not_installed",
            "MODAK_OTLP_ENDPOINT is set, and OpenTelemetry is not installed.",
            hint="Install modak with the extra: pip install 'modak[tracing]'.",
        ) from None
    address = endpoint if "://" in endpoint else f"http://{endpoint}"
    if not address.rstrip("/").endswith("/v1/traces"):
        address = address.rstrip("/") + "/v1/traces"
    resource = Resource.create(
        {"service.name": "modak-worker", "service.version": __version__, "service.instance.id": holder}
    )
    _provider = TracerProvider(resource=resource)
    _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=address, timeout=5)))
    _tracer = _provider.get_tracer("modak", __version__)


def end() -> None:
    """Send what waits, and stop."""
    global _tracer, _provider
    if _provider is not None:
        _provider.shutdown()
    _tracer = _provider = None


@contextmanager
def span(name: str, attributes: Mapping[str, str | int | float] | None = None) -> Iterator[Any]:
    """One piece of work; an exception that leaves the block marks it as failed."""
    if _tracer is None:
        yield None
        return
    with _tracer.start_as_current_span(name, attributes=dict(attributes or {})) as current:
        yield current
