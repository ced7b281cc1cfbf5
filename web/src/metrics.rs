//! The picture as Prometheus metrics, in OpenMetrics 1.0 and in the text format 0.0.4.
//!
//! Series = a few per job + eight per group (by name and description) + one per finding code: never
//! ranks × groups × sizes. Sequence numbers are values, not labels. The two forms differ in the name on
//! a counter's HELP and TYPE lines (OpenMetrics leaves out `_total`) and in the closing `# EOF`.
//! Source: the OpenMetrics 1.0 specification; "Exposition formats" in Prometheus' documentation.

use rcomm_analyzer::{Code, Severity, Snapshot, Verdict};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// How metrics are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus' text format 0.0.4.
    Text,
}

impl Form {
    /// What an `Accept` header asks for; text where it does not name OpenMetrics.
    pub fn wanted_by(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") {
            Self::OpenMetrics
        } else {
            Self::Text
        }
    }

    /// The `Content-Type` to answer with.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Gauge,
    Counter,
}

struct Writer {
    form: Form,
    out: String,
}

impl Writer {
    fn family(&mut self, name: &str, kind: Kind, help: &str) {
        let (suffix, kind) = match (kind, self.form) {
            (Kind::Gauge, _) => ("", "gauge"),
            (Kind::Counter, Form::OpenMetrics) => ("", "counter"),
            (Kind::Counter, Form::Text) => ("_total", "counter"),
        };
        // Writing to a string cannot fail.
        let _ = writeln!(
            self.out,
            "# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {kind}"
        );
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        self.out.push_str(name);
        for (i, (label, text)) in labels.iter().enumerate() {
            self.out.push(if i == 0 { '{' } else { ',' });
            let _ = write!(self.out, "{label}=\"");
            for c in text.chars() {
                match c {
                    '\\' => self.out.push_str("\\\\"),
                    '"' => self.out.push_str("\\\""),
                    '\n' => self.out.push_str("\\n"),
                    c => self.out.push(c),
                }
            }
            self.out.push('"');
        }
        if !labels.is_empty() {
            self.out.push('}');
        }
        let _ = writeln!(self.out, " {value}");
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.family(name, Kind::Gauge, help);
        self.sample(name, &[], value);
    }
}

const VERDICTS: [(Verdict, &str); 6] = [
    (Verdict::Healthy, "healthy"),
    (Verdict::Running, "running"),
    (Verdict::Stuck, "stuck"),
    (Verdict::Mismatch, "mismatch"),
    (Verdict::Slow, "slow"),
    (Verdict::Inconclusive, "inconclusive"),
];

/// Writes every metric. Without a snapshot only the build is told, so that `up` means what it says.
pub fn write(snapshot: Option<&Snapshot>, form: Form) -> String {
    let mut w = Writer {
        form,
        out: String::with_capacity(4096),
    };
    w.family("rcomm_build_info", Kind::Gauge, "Version of rcomm-web.");
    w.sample(
        "rcomm_build_info",
        &[("version", env!("CARGO_PKG_VERSION"))],
        1.0,
    );
    if let Some(snapshot) = snapshot {
        job(&mut w, snapshot);
        groups(&mut w, snapshot);
        findings(&mut w, snapshot);
    }
    if form == Form::OpenMetrics {
        w.out.push_str("# EOF\n");
    }
    w.out
}

fn job(w: &mut Writer, snapshot: &Snapshot) {
    let report = &snapshot.report;
    w.family(
        "rcomm_verdict_info",
        Kind::Gauge,
        "1 on the verdict that holds, 0 on the others.",
    );
    for (verdict, name) in VERDICTS {
        let holds = f64::from(u8::from(report.verdict == verdict));
        w.sample(
            "rcomm_verdict_info",
            &[("job", &snapshot.job), ("verdict", name)],
            holds,
        );
    }
    w.gauge(
        "rcomm_ranks_expected",
        "Ranks that the job should have.",
        report.input.ranks_expected as f64,
    );
    w.gauge(
        "rcomm_ranks_read",
        "Ranks whose record is read.",
        report.input.ranks_read as f64,
    );
    let silent = snapshot.ranks.iter().filter(|view| view.silent).count();
    w.gauge(
        "rcomm_ranks_silent",
        "Ranks whose record stopped answering.",
        silent as f64,
    );
    w.gauge(
        "rcomm_inflight_collectives",
        "Operations issued by some rank and not completed by all.",
        report.in_flight.len() as f64,
    );
    let oldest = report
        .in_flight
        .iter()
        .filter_map(|instance| instance.age_ms)
        .fold(0.0, f64::max);
    w.gauge(
        "rcomm_oldest_inflight_seconds",
        "Age of the oldest pending operation; 0 if none is pending.",
        oldest / 1e3,
    );
    let lost: u64 = report.ranks.iter().map(|rank| rank.lost).sum();
    w.family(
        "rcomm_recorder_dropped",
        Kind::Counter,
        "Records that rings have dropped or overwritten, over all ranks.",
    );
    w.sample("rcomm_recorder_dropped_total", &[], lost as f64);
    let lag = report
        .ranks
        .iter()
        .filter_map(|rank| rank.lag_share)
        .fold(0.0, f64::max);
    w.gauge(
        "rcomm_straggler_time_ratio",
        "Share of the job's time that others waited for the slowest rank, 0 to 1.",
        lag,
    );
    w.gauge(
        "rcomm_judgement_seconds",
        "How long the newest analysis took.",
        snapshot.cost.as_secs_f64(),
    );
    w.family(
        "rcomm_source_answered_ranks",
        Kind::Gauge,
        "Ranks that a source could read the last time.",
    );
    for source in &snapshot.sources {
        w.sample(
            "rcomm_source_answered_ranks",
            &[("source", &source.name)],
            source.answered as f64,
        );
    }
}

/// Sums and extremes over the groups of one name and description: groups may share both, and a series
/// must not appear twice.
#[derive(Default)]
struct GroupSums {
    ranks: f64,
    in_flight: f64,
    oldest_s: f64,
    last_seq: f64,
    behind: f64,
    lag_p50_s: f64,
    lag_p99_s: f64,
    busbw: f64,
}

type GroupMetric = (&'static str, &'static str, fn(&GroupSums) -> f64);

const GROUP_METRICS: [GroupMetric; 8] = [
    ("rcomm_group_ranks", "Members of the group.", |sums| {
        sums.ranks
    }),
    (
        "rcomm_group_inflight_collectives",
        "Pending operations of the group.",
        |sums| sums.in_flight,
    ),
    (
        "rcomm_group_oldest_inflight_seconds",
        "Age of the group's oldest pending operation.",
        |sums| sums.oldest_s,
    ),
    (
        "rcomm_last_issued_seq",
        "Newest collective sequence number that any member issued.",
        |sums| sums.last_seq,
    ),
    (
        "rcomm_members_behind_seq",
        "How many collectives the last member is behind the first.",
        |sums| sums.behind,
    ),
    (
        "rcomm_collective_arrival_lag_p50_seconds",
        "Median arrival lag of the recorded collectives.",
        |sums| sums.lag_p50_s,
    ),
    (
        "rcomm_collective_arrival_lag_p99_seconds",
        "99th percentile of the arrival lag.",
        |sums| sums.lag_p99_s,
    ),
    (
        "rcomm_bus_bandwidth_bytes_per_second",
        "Median bus bandwidth of collectives of at least 1 MiB.",
        |sums| sums.busbw,
    ),
];

fn groups(w: &mut Writer, snapshot: &Snapshot) {
    let mut sums: BTreeMap<(&str, &str), GroupSums> = BTreeMap::new();
    for group in &snapshot.report.groups {
        let row = sums
            .entry((&group.group.name, &group.group.desc))
            .or_default();
        let last = group.last_seq.unwrap_or(0) as f64;
        row.ranks += group.group.ranks.len() as f64;
        row.in_flight += group.in_flight as f64;
        row.oldest_s = row.oldest_s.max(group.oldest_ms.unwrap_or(0.0) / 1e3);
        row.last_seq = row.last_seq.max(last);
        row.behind = row.behind.max(last - group.min_seq.unwrap_or(0) as f64);
        row.lag_p50_s = row.lag_p50_s.max(group.lag_p50_ms.unwrap_or(0.0) / 1e3);
        row.lag_p99_s = row.lag_p99_s.max(group.lag_p99_ms.unwrap_or(0.0) / 1e3);
        row.busbw = row.busbw.max(group.busbw_gbs.unwrap_or(0.0) * 1e9);
    }
    for (name, help, value) in GROUP_METRICS {
        w.family(name, Kind::Gauge, help);
        for ((group, desc), row) in &sums {
            w.sample(name, &[("group", group), ("desc", desc)], value(row));
        }
    }
}

fn findings(w: &mut Writer, snapshot: &Snapshot) {
    w.family(
        "rcomm_findings",
        Kind::Gauge,
        "Findings of the newest report, by code.",
    );
    for &code in Code::ALL {
        let severity = match code.severity() {
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Note => "note",
        };
        let count = snapshot
            .report
            .findings
            .iter()
            .filter(|finding| finding.code == code)
            .count();
        w.sample(
            "rcomm_findings",
            &[
                ("code", code.id()),
                ("name", code.name()),
                ("severity", severity),
            ],
            count as f64,
        );
    }
}
