//! Metrics of the job for Prometheus.
//!
//! Sequence numbers and sizes are values, never labels, and no series has both a rank and a group. With D
//! descriptions of groups (at most 65) and O operations (a fixed set), there are at most D × O × (4 + 2 × 16) series
//! of counters and histograms, 512 × 9 of single groups, one for each code of a finding, [`MAX_RANKS`] × 3 of single
//! ranks, [`MAX_SOURCES`] × 3 of sources, D × 7 of reducers, and some forty of the job. The metric
//! `rcomm_groups_omitted` counts the groups beyond the limit; further descriptions share one series.

mod collectives;
pub(crate) mod counters;
mod groups;
pub(crate) mod list;
pub(crate) mod new_entries;
pub(crate) mod reducers;
pub(crate) mod trace_id;
mod writer;

pub use writer::Form;
pub(crate) use writer::Writer;

use crate::metrics::counters::Counters;
use collectives::collectives;
use groups::groups;
use rcomm_analyzer::source::Liveness;
use rcomm_analyzer::{Code, InstanceState, RankView, Severity, Snapshot, Verdict};
use rcomm_recorder::model::Rank;
use std::collections::BTreeSet;

/// Maximum number of pairs of a culprit and a code that have series, and of ranks with the largest shares of lost time.
const MAX_RANKS: usize = 16;
/// Maximum number of sources that have series.
const MAX_SOURCES: usize = 256;

/// The states of operations in flight, as values of the label `state`.
const STATES: [(InstanceState, &str); 6] = [
    (InstanceState::Running, "running"),
    (InstanceState::Queued, "queued"),
    (InstanceState::Waiting, "waiting"),
    (InstanceState::HalfOpen, "half_open"),
    (InstanceState::Mismatch, "mismatch"),
    (InstanceState::Failed, "failed"),
];

/// Whether histogram buckets carry trace ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Exemplars {
    /// No: traces are not exported.
    #[default]
    Without,
    /// Yes: the ids of the exported traces.
    OfTraces,
}

/// Writes the metrics of the snapshot and the counters; without a snapshot only the build info, so that a scrape still
/// succeeds.
pub(crate) fn write(
    snapshot: Option<&Snapshot>,
    counters: &Counters,
    form: Form,
    exemplars: Exemplars,
) -> String {
    let mut w = Writer::new(form);
    w.family(&list::BUILD_INFO);
    let version = [("version", env!("CARGO_PKG_VERSION"))];
    w.sample(list::BUILD_INFO.name, &version, 1.0);
    if let Some(snapshot) = snapshot {
        job(&mut w, snapshot);
        recorders(&mut w, snapshot, counters);
        sources(&mut w, snapshot);
        ranks(&mut w, snapshot);
        groups(&mut w, snapshot);
        let job = matches!(exemplars, Exemplars::OfTraces).then_some(snapshot.job.as_str());
        collectives(&mut w, counters, job);
        reducers::reducers(&mut w, counters.reducers());
        findings(&mut w, snapshot);
    }
    w.finish()
}

fn job(w: &mut Writer, snapshot: &Snapshot) {
    let report = &snapshot.report;
    w.family(&list::JOB_INFO);
    w.sample(list::JOB_INFO.name, &[("name", &snapshot.job)], 1.0);
    w.family(&list::VERDICT_INFO);
    for verdict in Verdict::ALL {
        let holds = f64::from(u8::from(report.verdict == verdict));
        let labels = [("verdict", verdict.word())];
        w.sample(list::VERDICT_INFO.name, &labels, holds);
    }
    w.gauge(&list::RANKS_EXPECTED, report.input.ranks_expected as f64);
    w.gauge(&list::RANKS_READ, report.input.ranks_read as f64);
    let silent = snapshot.ranks.iter().filter(|view| view.silent).count();
    w.gauge(&list::RANKS_SILENT, silent as f64);
    let steps = || report.ranks.iter().filter_map(|rank| rank.step);
    if let (Some(least), Some(most)) = (steps().min(), steps().max()) {
        w.family(&list::STEP);
        w.sample(list::STEP.name, &[("of", "last")], least as f64);
        w.sample(list::STEP.name, &[("of", "first")], most as f64);
    }
    w.family(&list::INFLIGHT_COLLECTIVES);
    for (state, name) in STATES {
        let instances = report.in_flight.iter();
        let count = instances.filter(|instance| instance.state == state);
        let labels = [("state", name)];
        w.sample(
            list::INFLIGHT_COLLECTIVES.name,
            &labels,
            count.count() as f64,
        );
    }
    let oldest = report.pending().filter_map(|instance| instance.age_ms);
    w.gauge(
        &list::OLDEST_INFLIGHT_SECONDS,
        oldest.fold(0.0, f64::max) / 1e3,
    );
    w.gauge(&list::STRAGGLER_TIME_RATIO, report.straggler_share());
    w.counter(&list::JUDGEMENTS, snapshot.number);
    w.gauge(&list::JUDGEMENT_SECONDS, snapshot.cost.as_secs_f64());
    w.gauge(
        &list::JUDGED_TIMESTAMP_SECONDS,
        snapshot.at.wall_ns as f64 / 1e9,
    );
}

fn recorders(w: &mut Writer, snapshot: &Snapshot, counters: &Counters) {
    w.counter(&list::RECORDER_DROPPED, counters.lost());
    w.counter(&list::RECORDER_UNREAD, counters.unread());
    w.gauge(&list::RECORDER_ENTRIES, snapshot.entries() as f64);
    let timed_out = counters
        .series()
        .values()
        .map(|series| series.timed_out)
        .sum();
    w.counter(&list::WATCHDOG_FIRES, timed_out);
    let heartbeat_age_ns = |view: &RankView| {
        let status = view.first_dump()?.status.as_ref()?;
        let alive = view.liveness == Liveness::Alive && status.heartbeat_ns > 0;
        alive.then_some(snapshot.at.wall_ns.saturating_sub(status.heartbeat_ns))
    };
    if let Some(oldest) = snapshot.ranks.iter().filter_map(heartbeat_age_ns).max() {
        w.gauge(
            &list::WATCHDOG_HEARTBEAT_AGE_SECONDS,
            oldest.max(0) as f64 / 1e9,
        );
    }
    for (metric, counted) in [
        (&list::PROCESSES_ALIVE, Liveness::Alive),
        (&list::PROCESSES_DEAD, Liveness::Dead),
    ] {
        let views = snapshot.ranks.iter();
        let count = views.filter(|view| view.liveness == counted).count();
        w.gauge(metric, count as f64);
    }
}

fn sources(w: &mut Writer, snapshot: &Snapshot) {
    let sources = || snapshot.sources.iter().take(MAX_SOURCES);
    w.family(&list::SOURCE_ANSWERED_RANKS);
    for source in sources() {
        let labels = [("source", source.name.as_str())];
        w.sample(
            list::SOURCE_ANSWERED_RANKS.name,
            &labels,
            source.answered as f64,
        );
    }
    w.family(&list::SOURCE_KNOWN_RANKS);
    for source in sources() {
        let labels = [("source", source.name.as_str())];
        w.sample(list::SOURCE_KNOWN_RANKS.name, &labels, source.known as f64);
    }
    w.family(&list::SOURCE_FAILING);
    for source in sources() {
        let labels = [("source", source.name.as_str())];
        let failing = f64::from(u8::from(source.error.is_some()));
        w.sample(list::SOURCE_FAILING.name, &labels, failing);
    }
}

/// Series of the few ranks that matter: culprits and stragglers.
fn ranks(w: &mut Writer, snapshot: &Snapshot) {
    let report = &snapshot.report;
    let host = |rank: Rank| snapshot.rank(rank).map_or("", |view| view.host.as_ref());
    w.family(&list::CULPRIT_RANK);
    let mut culprits: Vec<(Rank, Code)> = Vec::new();
    for finding in &report.findings {
        if finding.caused_by.is_none() && finding.severity != Severity::Note {
            let ranks = finding.culprit_ranks.iter();
            culprits.extend(ranks.map(|&rank| (rank, finding.code)));
        }
    }
    let mut seen = BTreeSet::new();
    culprits.retain(|pair| seen.insert(*pair));
    culprits.truncate(MAX_RANKS);
    culprits.sort_unstable();
    for (rank, code) in culprits {
        let rank_text = rank.to_string();
        let labels = [
            ("rank", rank_text.as_str()),
            ("host", host(rank)),
            ("code", code.id()),
            ("name", code.name()),
        ];
        w.sample(list::CULPRIT_RANK.name, &labels, 1.0);
    }
    let mut late: Vec<_> = report
        .ranks
        .iter()
        .filter_map(|rank| Some((rank.lag_share?, rank)))
        .collect();
    late.sort_by(|(share, _), (other, _)| other.total_cmp(share));
    late.truncate(MAX_RANKS);
    w.family(&list::RANK_STRAGGLER_TIME_RATIO);
    for (share, rank) in &late {
        let labels = [("rank", &*rank.rank.to_string()), ("host", &*rank.host)];
        w.sample(list::RANK_STRAGGLER_TIME_RATIO.name, &labels, *share);
    }
    w.family(&list::RANK_ARRIVAL_LAG_P50_SECONDS);
    for (_, rank) in &late {
        if let Some(lag) = rank.lag_p50_ms {
            let labels = [("rank", &*rank.rank.to_string()), ("host", &*rank.host)];
            w.sample(list::RANK_ARRIVAL_LAG_P50_SECONDS.name, &labels, lag / 1e3);
        }
    }
}

fn findings(w: &mut Writer, snapshot: &Snapshot) {
    w.family(&list::FINDINGS);
    for &code in Code::ALL {
        let severity = match code.severity() {
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Note => "note",
        };
        let findings = snapshot.report.findings.iter();
        let count = findings.filter(|finding| finding.code == code).count();
        let labels = [
            ("code", code.id()),
            ("name", code.name()),
            ("severity", severity),
        ];
        w.sample(list::FINDINGS.name, &labels, count as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::list::Kind;
    use super::*;
    use rcomm_analyzer::simulate::{Simulation, Situation};
    use rcomm_analyzer::source::{SimulatedSource, Source};
    use rcomm_analyzer::{Live, LiveOptions, Moment, analyze};
    use std::time::{Duration, Instant};

    fn metrics_text(ranks: u32, form: Form, exemplars: Exemplars) -> String {
        let simulation = Simulation::new(Situation::StuckRank, ranks, 0);
        let ns = simulation.fault_ns() + 8_000_000_000;
        let at = Moment {
            elapsed: Duration::from_nanos(ns as u64),
            wall_ns: ns,
        };
        let mut source = SimulatedSource::new(simulation, move || ns);
        let mut live = Live::new(LiveOptions::default(), analyze, vec!["test".into()]);
        live.observe(0, source.poll(Instant::now()), at);
        let snapshot = live
            .refresh(at)
            .expect("the first look finds something new");
        let mut counters = Counters::default();
        counters.take(&snapshot);
        write(Some(&snapshot), &counters, form, exemplars)
    }

    #[test]
    fn the_number_of_series_hardly_grows_with_the_number_of_ranks() {
        let series = |ranks| {
            let text = metrics_text(ranks, Form::Text, Exemplars::Without);
            let lines = text.lines().filter(|line| !line.starts_with('#'));
            // Single groups have gauges, and there are more of them in a larger job.
            lines.filter(|line| !line.contains("group=\"")).count()
        };
        let (small, large) = (series(64), series(1024));
        assert!(large <= small + 2 * MAX_RANKS, "{small} {large}");
        assert!(large < 400, "{large}");
    }

    #[test]
    fn the_rank_at_fault_and_the_stuck_group_have_gauges() {
        let text = metrics_text(16, Form::Text, Exemplars::Without);
        for line in [
            "rcomm_verdict_info{verdict=\"stuck\"} 1",
            "rcomm_culprit_rank{rank=\"13\",host=\"n001\",code=\"E101\",name=\"not_joined\"} 1",
            "rcomm_group_inflight_collectives{group=\"dp_5\",desc=\"dp\"} 1",
            "rcomm_collectives_total{desc=\"dp\",op=\"all_reduce\"} ",
            "rcomm_collective_arrival_lag_seconds_bucket{desc=\"dp\",op=\"all_reduce\",le=\"+Inf\"} ",
        ] {
            assert!(text.contains(line), "{line} in\n{text}");
        }
    }

    #[test]
    fn exemplars_name_traces_only_in_open_metrics_and_only_if_traces_are_exported() {
        let with = metrics_text(16, Form::OpenMetrics, Exemplars::OfTraces);
        let line = with.lines().find(|line| line.contains("# {trace_id=\""));
        assert!(
            line.is_some_and(|line| line.contains("_bucket{")),
            "{line:?}"
        );
        for (form, exemplars) in [
            (Form::OpenMetrics, Exemplars::Without),
            (Form::Text, Exemplars::OfTraces),
        ] {
            assert!(!metrics_text(16, form, exemplars).contains("trace_id"));
        }
    }

    /// The metric names in a text; a name may contain a `*`.
    fn metric_names(text: &str) -> impl Iterator<Item = &str> {
        text.match_indices("rcomm_").filter_map(|(at, _)| {
            let rest = &text[at..];
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '*');
            let end = end.unwrap_or(rest.len());
            // Not a metric: a path such as `rcomm_web::serve`.
            (!rest[end..].starts_with("::")).then(|| &rest[..end])
        })
    }

    /// The names of a metric's samples.
    fn sample_names(metric: &list::Metric) -> Vec<String> {
        let suffixes: &[&str] = match metric.kind {
            Kind::Gauge => &[""],
            Kind::Counter => &["_total"],
            Kind::Histogram => &["", "_bucket", "_sum", "_count"],
        };
        let name = |suffix| format!("{}{suffix}", metric.name);
        suffixes.iter().map(name).collect()
    }

    #[test]
    fn documents_dashboards_and_alerts_name_only_metrics_of_the_list() {
        let web = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut files = vec![web.join("../docs/WEB.md")];
        for folder in ["deploy/grafana/dashboards", "deploy/prometheus"] {
            let folder = std::fs::read_dir(web.join(folder)).expect("the folder is readable");
            files.extend(folder.map(|file| file.expect("the folder is readable").path()));
        }
        let known: Vec<String> = list::ALL.iter().flat_map(sample_names).collect();
        let mut seen = 0;
        for file in files {
            let text = std::fs::read_to_string(&file).expect("the file is a text");
            for name in metric_names(&text) {
                let (before, after) = name.split_once('*').unwrap_or((name, ""));
                let matches = |sample: &String| match name.contains('*') {
                    true => sample.starts_with(before) && sample.ends_with(after),
                    false => sample == name,
                };
                assert!(known.iter().any(matches), "{name} in {}", file.display());
                seen += 1;
            }
        }
        assert!(seen > 100, "{seen}");
    }

    #[test]
    fn every_family_is_written_with_its_listed_name_and_help() {
        let text = metrics_text(16, Form::Text, Exemplars::Without);
        for line in text.lines().filter(|line| line.starts_with("# HELP ")) {
            let listed = list::ALL.iter().any(|metric| {
                let suffix = if metric.kind == Kind::Counter {
                    "_total"
                } else {
                    ""
                };
                line == format!("# HELP {}{suffix} {}", metric.name, metric.help)
            });
            assert!(listed, "{line}");
        }
    }
}
