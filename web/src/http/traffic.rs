//! Counters of the server's own connections and requests.

use crate::metrics::{Form, Writer, list};
use crate::otel::Counts;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts of one server.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    /// Open connections.
    connections: AtomicU64,
    /// Open event streams.
    streams: AtomicU64,
    /// Connections that got no place, or lost it.
    refused: AtomicU64,
    /// Clients that were dropped because they did not read.
    slow: AtomicU64,
    /// All requests.
    requests: AtomicU64,
    /// Requests that were denied access.
    denied: AtomicU64,
}

impl Traffic {
    /// Counts a connection that was refused, or that lost its place to another one, because there were too many.
    pub(crate) fn count_refused_connection(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    /// Counts a client that was dropped because it did not read its answer in time.
    pub(crate) fn count_slow_client(&self) {
        self.slow.fetch_add(1, Relaxed);
    }

    /// Counts a request; `denied` if access was refused.
    pub(crate) fn count_request(&self, denied: bool) {
        self.requests.fetch_add(1, Relaxed);
        self.denied.fetch_add(u64::from(denied), Relaxed);
    }

    /// Appends these counters, and those of the exporter if one runs, to a metrics text.
    pub(crate) fn write(&self, form: Form, exported: Option<&Counts>, text: &mut String) {
        let mut writer = Writer::after(form, std::mem::take(text));
        let get = |count: &AtomicU64| count.load(Relaxed);
        writer.gauge(&list::WEB_CONNECTIONS, get(&self.connections) as f64);
        writer.gauge(&list::WEB_EVENT_STREAMS, get(&self.streams) as f64);
        for (metric, count) in [
            (&list::WEB_REQUESTS, &self.requests),
            (&list::WEB_REQUESTS_DENIED, &self.denied),
            (&list::WEB_CONNECTIONS_REFUSED, &self.refused),
            (&list::WEB_SLOW_CLIENTS_DROPPED, &self.slow),
        ] {
            writer.counter(metric, get(count));
        }
        if let Some(counts) = exported {
            for (metric, count) in [
                (&list::OTEL_SPANS_SENT, &counts.spans_sent),
                (&list::OTEL_SPANS_DROPPED, &counts.spans_dropped),
                (&list::OTEL_LOGS_SENT, &counts.logs_sent),
                (&list::OTEL_LOGS_DROPPED, &counts.logs_dropped),
                (&list::OTEL_METRICS_SENT, &counts.metrics_sent),
                (&list::OTEL_METRICS_DROPPED, &counts.metrics_dropped),
            ] {
                writer.counter(metric, get(count));
            }
        }
        *text = writer.finish();
    }
}

/// Increments a gauge when created, and decrements it when dropped.
pub(crate) struct GaugeGuard {
    traffic: Arc<Traffic>,
    gauge: fn(&Traffic) -> &AtomicU64,
}

impl GaugeGuard {
    fn new(traffic: &Arc<Traffic>, gauge: fn(&Traffic) -> &AtomicU64) -> Self {
        gauge(traffic).fetch_add(1, Relaxed);
        Self {
            traffic: traffic.clone(),
            gauge,
        }
    }

    /// Counts an open connection.
    pub(crate) fn connection(traffic: &Arc<Traffic>) -> Self {
        Self::new(traffic, |traffic| &traffic.connections)
    }

    /// Counts an open event stream.
    pub(crate) fn stream(traffic: &Arc<Traffic>) -> Self {
        Self::new(traffic, |traffic| &traffic.streams)
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        (self.gauge)(&self.traffic).fetch_sub(1, Relaxed);
    }
}
