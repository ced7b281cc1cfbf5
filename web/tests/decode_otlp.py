"""Decodes OTLP requests with OpenTelemetry's own classes: a folder of bodies in, one JSON object out."""

import gzip
import json
import pathlib
import sys

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

REQUESTS = {
    "traces": ExportTraceServiceRequest,
    "metrics": ExportMetricsServiceRequest,
    "logs": ExportLogsServiceRequest,
}


def read(signal):
    for path in sorted(pathlib.Path(sys.argv[1]).glob(f"{signal}.*")):
        request = REQUESTS[signal]()
        body = path.read_bytes()
        # An OTLP collector in between may have compressed the body.
        request.ParseFromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
        if request.FindInitializationErrors():
            sys.exit(f"{path} lacks a required field")
        yield MessageToDict(request)


json.dump({signal: list(read(signal)) for signal in REQUESTS}, sys.stdout)
