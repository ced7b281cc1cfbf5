//! Counters, histograms and gauges as OTLP metrics. Counters and histograms are cumulative since this program's start.

use super::settings::Settings;
use super::value::{attribute, resource, scope, text, unix};
use crate::metrics::counters::{BOUNDS, Counters, Example, Histogram, Series};
use crate::metrics::list;
use crate::metrics::reducers::{PARTS, ReducerSeries};
use crate::metrics::trace_id::SharedOp;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Exemplar, Gauge, Histogram as OtlpHistogram, HistogramDataPoint,
    Metric, NumberDataPoint, ResourceMetrics, ScopeMetrics, Sum, exemplar, number_data_point,
};
use rcomm_analyzer::Snapshot;

/// Returns a request and the number of metrics in it.
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
    let ages = report.pending().filter_map(|instance| instance.age_ms);
    let silent = snapshot.ranks.iter().filter(|view| view.silent).count();
    let metrics = [
        context.sum(&list::COLLECTIVES, |series| series.completed),
        context.sum(&list::COLLECTIVES_FAILED, |series| series.failed),
        context.sum(&list::COLLECTIVE_BYTES, |series| series.bytes),
        context.histogram(&list::COLLECTIVE_DURATION_SECONDS, |series| {
            &series.duration
        }),
        context.histogram(&list::COLLECTIVE_ARRIVAL_LAG_SECONDS, |series| &series.lag),
        context.gauge(&list::INFLIGHT_COLLECTIVES, report.pending().count() as f64),
        context.gauge(
            &list::OLDEST_INFLIGHT_SECONDS,
            ages.fold(0.0, f64::max) / 1e3,
        ),
        context.gauge(&list::RANKS_EXPECTED, report.input.ranks_expected as f64),
        context.gauge(&list::RANKS_READ, report.input.ranks_read as f64),
        context.gauge(&list::RANKS_SILENT, silent as f64),
        context.gauge(&list::STRAGGLER_TIME_RATIO, report.straggler_share()),
        context.reducer_gauge(&list::REDUCER_STEP_SECONDS, |series| series.newest_step),
        context.reducer_gauge(&list::REDUCER_EXPOSED_SECONDS, |series| {
            series.newest_exposed
        }),
        context.reducer_steps(),
        context.reducer_seconds(),
    ];
    let metrics: Vec<Metric> = metrics.into_iter().flatten().collect();
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

/// What the metrics of one request share.
struct Context<'a> {
    job: &'a str,
    /// When the counters began, ns since the epoch.
    began: u64,
    /// Time of the snapshot, ns since the epoch.
    now: u64,
    counters: &'a Counters,
    /// Whether traces are exported, so that exemplars can name them.
    traces: bool,
}

impl Context<'_> {
    fn labels(desc: &str, op: &str) -> Vec<KeyValue> {
        vec![
            attribute("rcomm.group.desc", text(desc)),
            attribute("rcomm.op", text(op)),
        ]
    }

    fn sum(&self, listed: &list::Metric, value: impl Fn(&Series) -> u64) -> Option<Metric> {
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
        metric(listed, Data::Sum(sum))
    }

    fn gauge(&self, listed: &list::Metric, value: f64) -> Option<Metric> {
        let point = NumberDataPoint {
            time_unix_nano: self.now,
            value: Some(number_data_point::Value::AsDouble(value)),
            ..NumberDataPoint::default()
        };
        let data_points = vec![point];
        metric(listed, Data::Gauge(Gauge { data_points }))
    }

    /// Returns a gauge with one point for each description of groups with reducers; `None` if there is no reducer.
    fn reducer_gauge(
        &self,
        listed: &list::Metric,
        value: impl Fn(&ReducerSeries) -> f64,
    ) -> Option<Metric> {
        let series = self.counters.reducers().series().iter();
        let points = series.map(|(desc, series)| NumberDataPoint {
            attributes: vec![attribute("rcomm.group.desc", text(&**desc))],
            time_unix_nano: self.now,
            value: Some(number_data_point::Value::AsDouble(value(series))),
            ..NumberDataPoint::default()
        });
        let data_points: Vec<_> = points.collect();
        if data_points.is_empty() {
            return None;
        }
        metric(listed, Data::Gauge(Gauge { data_points }))
    }

    /// Returns the number of steps, by description of the group; `None` if there is no reducer.
    fn reducer_steps(&self) -> Option<Metric> {
        let series = self.counters.reducers().series().iter();
        let points = series.map(|(desc, series)| {
            let steps = i64::try_from(series.sums.steps).unwrap_or(i64::MAX);
            let attributes = vec![attribute("rcomm.group.desc", text(&**desc))];
            (attributes, number_data_point::Value::AsInt(steps))
        });
        self.reducer_sum(&list::REDUCER_STEPS, points)
    }

    /// Returns the time of the parts of steps in seconds, by description of the group; `None` if there is no reducer.
    fn reducer_seconds(&self) -> Option<Metric> {
        let series = self.counters.reducers().series().iter();
        let points = series.flat_map(|(desc, series)| {
            PARTS.map(|(part, value)| {
                let seconds = value(&series.sums) as f64 / 1e9;
                let attributes = vec![
                    attribute("rcomm.group.desc", text(&**desc)),
                    attribute("rcomm.reducer.part", text(part)),
                ];
                (attributes, number_data_point::Value::AsDouble(seconds))
            })
        });
        self.reducer_sum(&list::REDUCER_SECONDS, points)
    }

    fn reducer_sum(
        &self,
        listed: &list::Metric,
        points: impl Iterator<Item = (Vec<KeyValue>, number_data_point::Value)>,
    ) -> Option<Metric> {
        let points = points.map(|(attributes, value)| NumberDataPoint {
            attributes,
            start_time_unix_nano: self.began,
            time_unix_nano: self.now,
            value: Some(value),
            ..NumberDataPoint::default()
        });
        let data_points: Vec<_> = points.collect();
        if data_points.is_empty() {
            return None;
        }
        let sum = Sum {
            data_points,
            aggregation_temporality: AggregationTemporality::Cumulative.into(),
            is_monotonic: true,
        };
        metric(listed, Data::Sum(sum))
    }

    fn histogram(
        &self,
        listed: &list::Metric,
        select: impl Fn(&Series) -> &Histogram,
    ) -> Option<Metric> {
        let points = self
            .counters
            .series()
            .iter()
            .filter_map(|((desc, op), series)| {
                let histogram = select(series);
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
        metric(listed, Data::Histogram(histogram))
    }

    /// The newest collective of each bucket as an exemplar that names its trace; none if traces are not exported.
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

/// Returns a metric of the list with its data; `None` if it has no name in OTLP.
fn metric(listed: &list::Metric, data: Data) -> Option<Metric> {
    let (name, unit) = listed.otlp?;
    Some(Metric {
        name: name.to_owned(),
        description: listed.help.to_owned(),
        unit: unit.to_owned(),
        data: Some(data),
        ..Metric::default()
    })
}
