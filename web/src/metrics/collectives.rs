//! Counters and histograms of collectives, by group description and operation.

use super::list::{self, Metric};
use super::writer::{Exemplar, Writer};
use crate::metrics::counters::{BOUNDS, Counters, Histogram, Series, SeriesKey};
use crate::metrics::trace_id::SharedOp;
use rcomm_recorder::model::text::hex;

type SeriesMetric = (&'static Metric, fn(&Series) -> u64);

const SERIES_METRICS: [SeriesMetric; 4] = [
    (&list::COLLECTIVES, |series| series.completed),
    (&list::COLLECTIVES_FAILED, |series| series.failed),
    (&list::COLLECTIVES_TIMED_OUT, |series| series.timed_out),
    (&list::COLLECTIVE_BYTES, |series| series.bytes),
];

/// Writes counters and histograms. If `traced_job` is the name of a job, each bucket carries the trace id of its
/// newest collective.
pub(super) fn collectives(writer: &mut Writer, counters: &Counters, traced_job: Option<&str>) {
    for (metric, value) in SERIES_METRICS {
        writer.family(metric);
        let sample = format!("{}_total", metric.name);
        for ((desc, op), series) in counters.series() {
            let labels = [("desc", &**desc), ("op", *op)];
            writer.sample(&sample, &labels, value(series) as f64);
        }
    }
    histogram(
        writer,
        &list::COLLECTIVE_DURATION_SECONDS,
        counters,
        |series| &series.duration,
        traced_job,
    );
    histogram(
        writer,
        &list::COLLECTIVE_ARRIVAL_LAG_SECONDS,
        counters,
        |series| &series.lag,
        traced_job,
    );
}

fn histogram(
    writer: &mut Writer,
    metric: &Metric,
    counters: &Counters,
    histogram_of: fn(&Series) -> &Histogram,
    traced_job: Option<&str>,
) {
    writer.family(metric);
    let name = metric.name;
    let measured =
        |(_, series): &(&SeriesKey, &Series)| histogram_of(series).counts.iter().any(|&n| n > 0);
    for ((desc, op), series) in counters.series().iter().filter(measured) {
        let histogram = histogram_of(series);
        let mut count = 0;
        for (index, (in_bucket, example)) in
            histogram.counts.iter().zip(&histogram.examples).enumerate()
        {
            count += in_bucket;
            let bound = BOUNDS.get(index).map_or("+Inf".to_owned(), f64::to_string);
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
            writer.bucket(&format!("{name}_bucket"), &labels, count, exemplar);
        }
        let labels = [("desc", &**desc), ("op", *op)];
        writer.sample(&format!("{name}_sum"), &labels, histogram.sum);
        writer.sample(&format!("{name}_count"), &labels, count as f64);
    }
}
