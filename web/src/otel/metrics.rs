//! The counters and histograms of the counters, and where the job stands, as OTLP metrics. Cumulative since
//! the watching began.

use super::settings::Settings;
use super::{attribute, resource, scope, text, unix};
use crate::counters::{BOUNDS, Counters, Example, Histogram, Series};
use crate::trace_id::SharedOp;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Exemplar, Gauge, Histogram as OtlpHistogram, HistogramDataPoint,
    Metric, NumberDataPoint, ResourceMetrics, ScopeMetrics, Sum, exemplar, number_data_point,
};
use rcomm_analyzer::Snapshot;

/// Name, description, unit.
type Named = (&'static str, &'static str, &'static str);

/// A request, and how many metrics it holds.
pub(super) fn request(
    snapshot: &Snapshot,
    counters: &Counters,
    settings: &Settings,
) -> (ExportMetricsServiceRequest, u64) {
    let context = Context {
        job: &snapshot.job,
        began: unix(snapshot.at.wall_ns)
            .saturating_sub(u64::try_from(snapshot.at.elapsed.as_nanos()).unwrap_or(0)),
        now: unix(snapshot.at.wall_ns),
        counters,
        traces: settings.traces.is_some(),
    };
    let report = &snapshot.report;
    let ages = report.in_flight.iter().filter_map(|it| it.age_ms);
    let lag = report.ranks.iter().filter_map(|rank| rank.lag_share);
    let silent = snapshot.ranks.iter().filter(|view| view.silent).count();
    let metrics = vec![
        context.sum(
            (
                "rcomm.collectives",
                "Operations completed, counted on each rank.",
                "{collective}",
            ),
            |series| series.completed,
        ),
        context.sum(
            (
                "rcomm.collectives.failed",
                "Operations that failed, counted on each rank.",
                "{collective}",
            ),
            |series| series.failed,
        ),
        context.sum(
            (
                "rcomm.collective.io",
                "Input bytes of completed operations, over all ranks.",
                "By",
            ),
            |series| series.bytes,
        ),
        context.histogram(
            (
                "rcomm.collective.duration",
                "From the arrival of the last member to completion.",
                "s",
            ),
            |series| &series.duration,
        ),
        context.histogram(
            (
                "rcomm.collective.arrival_lag",
                "Arrival of the last member after the first.",
                "s",
            ),
            |series| &series.lag,
        ),
        context.gauge(
            (
                "rcomm.inflight",
                "Operations issued by at least one rank and not completed by all.",
                "{collective}",
            ),
            report.in_flight.len() as f64,
        ),
        context.gauge(
            (
                "rcomm.inflight.oldest",
                "Age of the oldest pending operation.",
                "s",
            ),
            ages.fold(0.0, f64::max) / 1e3,
        ),
        context.gauge(
            ("rcomm.ranks.expected", "World size of the job.", "{rank}"),
            report.input.ranks_expected as f64,
        ),
        context.gauge(
            ("rcomm.ranks.read", "Ranks whose record was read.", "{rank}"),
            report.input.ranks_read as f64,
        ),
        context.gauge(
            (
                "rcomm.ranks.silent",
                "Ranks whose record stopped answering.",
                "{rank}",
            ),
            silent as f64,
        ),
        context.gauge(
            (
                "rcomm.straggler.time_ratio",
                "Share of the job's time that the other ranks waited for the slowest one, 0 to 1.",
                "1",
            ),
            lag.fold(0.0, f64::max),
        ),
    ];
    let count = metrics.len() as u64;
    let resource_metrics = vec![ResourceMetrics {
        resource: resource(&snapshot.job, settings, vec![]),
        scope_metrics: vec![ScopeMetrics {
            scope: scope(),
            metrics,
            ..ScopeMetrics::default()
        }],
        ..ResourceMetrics::default()
    }];
    (ExportMetricsServiceRequest { resource_metrics }, count)
}

struct Context<'a> {
    job: &'a str,
    began: u64,
    now: u64,
    counters: &'a Counters,
    traces: bool,
}

impl Context<'_> {
    fn labels(desc: &str, op: &str) -> Vec<KeyValue> {
        vec![
            attribute("rcomm.group.desc", text(desc)),
            attribute("rcomm.op", text(op)),
        ]
    }

    fn sum(&self, named: Named, value: impl Fn(&Series) -> u64) -> Metric {
        let points = self.counters.series().iter().map(|((desc, op), series)| {
            let value = i64::try_from(value(series)).unwrap_or(i64::MAX);
            NumberDataPoint {
                attributes: Self::labels(desc, op),
                start_time_unix_nano: self.began,
                time_unix_nano: self.now,
                value: Some(number_data_point::Value::AsInt(value)),
                ..NumberDataPoint::default()
            }
        });
        let sum = Sum {
            data_points: points.collect(),
            aggregation_temporality: AggregationTemporality::Cumulative.into(),
            is_monotonic: true,
        };
        metric(named, Data::Sum(sum))
    }

    fn gauge(&self, named: Named, value: f64) -> Metric {
        let point = NumberDataPoint {
            time_unix_nano: self.now,
            value: Some(number_data_point::Value::AsDouble(value)),
            ..NumberDataPoint::default()
        };
        let data_points = vec![point];
        metric(named, Data::Gauge(Gauge { data_points }))
    }

    fn histogram(&self, named: Named, of: impl Fn(&Series) -> &Histogram) -> Metric {
        let points = self
            .counters
            .series()
            .iter()
            .filter_map(|((desc, op), series)| {
                let histogram = of(series);
                let count = histogram.counts.iter().sum();
                (count > 0).then(|| HistogramDataPoint {
                    attributes: Self::labels(desc, op),
                    start_time_unix_nano: self.began,
                    time_unix_nano: self.now,
                    count,
                    sum: Some(histogram.sum),
                    bucket_counts: histogram.counts.to_vec(),
                    explicit_bounds: BOUNDS.to_vec(),
                    exemplars: self.exemplars(histogram),
                    ..HistogramDataPoint::default()
                })
            });
        let histogram = OtlpHistogram {
            data_points: points.collect(),
            aggregation_temporality: AggregationTemporality::Cumulative.into(),
        };
        metric(named, Data::Histogram(histogram))
    }

    fn exemplars(&self, histogram: &Histogram) -> Vec<Exemplar> {
        let examples = histogram.examples.iter().flatten().filter(|_| self.traces);
        let exemplar = |example: &Example| Exemplar {
            time_unix_nano: unix(example.at_ns),
            trace_id: SharedOp {
                job: self.job,
                group: &example.group.name,
                ranks: &example.group.ranks,
                kind: "collective",
                seq: example.seq,
            }
            .trace_id()
            .to_vec(),
            value: Some(exemplar::Value::AsDouble(example.value)),
            ..Exemplar::default()
        };
        examples.map(exemplar).collect()
    }
}

fn metric((name, description, unit): Named, data: Data) -> Metric {
    Metric {
        name: name.to_owned(),
        description: description.to_owned(),
        unit: unit.to_owned(),
        data: Some(data),
        ..Metric::default()
    }
}
