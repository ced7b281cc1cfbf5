//! Counters and histograms of collectives, by group description and operation.

use super::writer::{Exemplar, Kind, Writer};
use crate::counters::{BOUNDS, Counters, Histogram, Series, SeriesKey};
use crate::trace_id::{SharedOp, hex};

type SeriesMetric = (&'static str, &'static str, fn(&Series) -> u64);

const SERIES_METRICS: [SeriesMetric; 4] = [
    (
        "rcomm_collectives",
        "Operations completed, counted on each rank.",
        |series| series.completed,
    ),
    (
        "rcomm_collectives_failed",
        "Operations that ended with an error or a time-out, counted on each rank.",
        |series| series.failed,
    ),
    (
        "rcomm_collectives_timed_out",
        "Operations that failed after at least their time-out, counted on each rank.",
        |series| series.timed_out,
    ),
    (
        "rcomm_collective_bytes",
        "Input bytes of completed operations, over all ranks.",
        |series| series.bytes,
    ),
];

/// Writes counters and histograms. With a job's name, buckets carry the trace of their newest
/// collective.
pub(super) fn collectives(w: &mut Writer, counters: &Counters, traced_job: Option<&str>) {
    for (name, help, value) in SERIES_METRICS {
        w.family(name, Kind::Counter, help);
        let sample = format!("{name}_total");
        for ((desc, op), series) in counters.series() {
            let labels = [("desc", &**desc), ("op", *op)];
            w.sample(&sample, &labels, value(series) as f64);
        }
    }
    histogram(
        w,
        "rcomm_collective_duration_seconds",
        "From the arrival of the last member to completion, one value per collective.",
        counters,
        |series| &series.duration,
        traced_job,
    );
    histogram(
        w,
        "rcomm_collective_arrival_lag_seconds",
        "Arrival of the last member after the first, one value per collective.",
        counters,
        |series| &series.lag,
        traced_job,
    );
}

fn histogram(
    w: &mut Writer,
    name: &str,
    help: &str,
    counters: &Counters,
    of: fn(&Series) -> &Histogram,
    traced_job: Option<&str>,
) {
    w.family(name, Kind::Histogram, help);
    let measured = |(_, series): &(&SeriesKey, &Series)| of(series).counts.iter().any(|&n| n > 0);
    for ((desc, op), series) in counters.series().iter().filter(measured) {
        let histogram = of(series);
        let mut count = 0;
        for (at, (in_bucket, example)) in
            histogram.counts.iter().zip(&histogram.examples).enumerate()
        {
            count += in_bucket;
            let bound = BOUNDS.get(at).map_or("+Inf".to_owned(), f64::to_string);
            let labels = [("desc", &**desc), ("op", *op), ("le", &bound)];
            let exemplar = example.as_ref().zip(traced_job).map(|(example, job)| {
                let shared = SharedOp {
                    job,
                    group: &example.group.name,
                    ranks: &example.group.ranks,
                    kind: "collective",
                    seq: example.seq,
                };
                Exemplar {
                    trace_id: hex(&shared.trace_id()),
                    value: example.value,
                    at_s: example.at_ns as f64 / 1e9,
                }
            });
            w.bucket(&format!("{name}_bucket"), &labels, count, exemplar);
        }
        let labels = [("desc", &**desc), ("op", *op)];
        w.sample(&format!("{name}_sum"), &labels, histogram.sum);
        w.sample(&format!("{name}_count"), &labels, count as f64);
    }
}
