//! Counters of the server's own connections and requests.

use crate::metrics::{Form, Writer};
use crate::otel::Counts;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts of one server.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    connections: AtomicU64,
    streams: AtomicU64,
    refused: AtomicU64,
    slow: AtomicU64,
    requests: AtomicU64,
    denied: AtomicU64,
}

impl Traffic {
    /// Counts a connection that was refused over the limit.
    pub(crate) fn refused(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    /// Counts a client that was dropped because it did not read its answer in time.
    pub(crate) fn slow(&self) {
        self.slow.fetch_add(1, Relaxed);
    }

    /// Counts a request; `denied` if access was refused.
    pub(crate) fn request(&self, denied: bool) {
        self.requests.fetch_add(1, Relaxed);
        self.denied.fetch_add(u64::from(denied), Relaxed);
    }

    /// Appends these counters to a metrics text.
    pub(crate) fn write(&self, form: Form, exported: Option<&Counts>, text: &mut String) {
        let mut w = Writer::after(form, std::mem::take(text));
        let get = |count: &AtomicU64| count.load(Relaxed);
        w.gauge(
            "rcomm_web_connections",
            "Open client connections.",
            get(&self.connections) as f64,
        );
        w.gauge(
            "rcomm_web_event_streams",
            "Open event streams.",
            get(&self.streams) as f64,
        );
        for (name, help, count) in [
            ("rcomm_web_requests", "Requests answered.", &self.requests),
            (
                "rcomm_web_requests_denied",
                "Requests denied: no token, unknown host name, or foreign origin.",
                &self.denied,
            ),
            (
                "rcomm_web_connections_refused",
                "Connections refused over --max-connections.",
                &self.refused,
            ),
            (
                "rcomm_web_slow_clients_dropped",
                "Clients dropped because they did not read their answer in time.",
                &self.slow,
            ),
        ] {
            w.counter(name, help, get(count));
        }
        if let Some(counts) = exported {
            for (name, help, count) in [
                (
                    "rcomm_otel_spans_sent",
                    "Spans accepted by the collector.",
                    &counts.spans_sent,
                ),
                (
                    "rcomm_otel_spans_dropped",
                    "Spans dropped because the export failed.",
                    &counts.spans_dropped,
                ),
                (
                    "rcomm_otel_logs_sent",
                    "Log records accepted by the collector.",
                    &counts.logs_sent,
                ),
                (
                    "rcomm_otel_logs_dropped",
                    "Log records dropped because the export failed.",
                    &counts.logs_dropped,
                ),
                (
                    "rcomm_otel_metrics_sent",
                    "Metrics accepted by the collector.",
                    &counts.metrics_sent,
                ),
                (
                    "rcomm_otel_metrics_dropped",
                    "Metrics dropped because the export failed.",
                    &counts.metrics_dropped,
                ),
            ] {
                w.counter(name, help, get(count));
            }
        }
        *text = w.finish();
    }
}

/// Increments a gauge until it is dropped.
pub(crate) struct GaugeGuard {
    traffic: Arc<Traffic>,
    of: fn(&Traffic) -> &AtomicU64,
}

impl GaugeGuard {
    fn new(traffic: &Arc<Traffic>, of: fn(&Traffic) -> &AtomicU64) -> Self {
        of(traffic).fetch_add(1, Relaxed);
        Self {
            traffic: traffic.clone(),
            of,
        }
    }

    pub(crate) fn connection(traffic: &Arc<Traffic>) -> Self {
        Self::new(traffic, |traffic| &traffic.connections)
    }

    pub(crate) fn stream(traffic: &Arc<Traffic>) -> Self {
        Self::new(traffic, |traffic| &traffic.streams)
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        (self.of)(&self.traffic).fetch_sub(1, Relaxed);
    }
}
