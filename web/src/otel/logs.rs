//! Verdict changes and new findings as log records.

use super::settings::Settings;
use super::value::{attribute, number, resource, scope, text, unix};
use crate::metrics::trace_id::SharedOp;
use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, ArrayValue};
use opentelemetry_proto::tonic::logs::v1::{LogRecord, ResourceLogs, ScopeLogs, SeverityNumber};
use rcomm_analyzer::{Code, Finding, SeqKind, Severity, Snapshot, Verdict};
use rcomm_recorder::model::Rank;
use std::collections::HashSet;

/// Maximum number of culprits that a log record lists.
const MAX_RANKS: usize = 64;

/// Identity of a finding: code, culprits, name of the group, and sequence number. The sentence is left out, since the
/// ages in it change all the time.
type LoggedFinding = (Code, Vec<Rank>, Option<String>, Option<u64>);

/// The verdict and the findings that were logged last.
#[derive(Default)]
pub(super) struct Logs {
    verdict: Option<Verdict>,
    logged: HashSet<LoggedFinding>,
}

impl Logs {
    /// Returns a request and the number of its records; `None` if there is nothing new.
    pub(super) fn take(
        &mut self,
        snapshot: &Snapshot,
        settings: &Settings,
    ) -> Option<(ExportLogsServiceRequest, u64)> {
        let report = &snapshot.report;
        let mut records = Vec::new();
        if self.verdict != Some(report.verdict) {
            records.push(verdict(snapshot, self.verdict));
            self.verdict = Some(report.verdict);
        }
        let mut logged = HashSet::new();
        for finding in &report.findings {
            let group = finding.group.as_ref().map(|group| group.name.clone());
            let key = (
                finding.code,
                finding.culprit_ranks.clone(),
                group,
                finding.seq,
            );
            if !self.logged.contains(&key) && !logged.contains(&key) {
                records.push(record(snapshot, finding));
            }
            logged.insert(key);
        }
        // A finding that disappears and returns is logged again.
        self.logged = logged;
        if records.is_empty() {
            return None;
        }
        let count = records.len() as u64;
        let logs = ResourceLogs {
            resource: resource(&snapshot.job, settings, vec![]),
            scope_logs: vec![ScopeLogs {
                scope: scope(),
                log_records: records,
                ..ScopeLogs::default()
            }],
            ..ResourceLogs::default()
        };
        let resource_logs = vec![logs];
        Some((ExportLogsServiceRequest { resource_logs }, count))
    }
}

fn body(sentence: String) -> Option<AnyValue> {
    Some(AnyValue {
        value: Some(text(sentence)),
    })
}

/// The log record of a verdict that differs from the one `before`.
fn verdict(snapshot: &Snapshot, before: Option<Verdict>) -> LogRecord {
    let now = snapshot.report.verdict;
    let (severity, name) = match now {
        Verdict::Stuck | Verdict::Mismatch | Verdict::Crashed => (SeverityNumber::Error, "ERROR"),
        Verdict::Slow => (SeverityNumber::Warn, "WARN"),
        Verdict::Healthy
        | Verdict::Running
        | Verdict::Ended
        | Verdict::Cancelled
        | Verdict::Inconclusive => (SeverityNumber::Info, "INFO"),
    };
    let sentence = match before {
        Some(before) => format!("the job is {}; it was {}", now.word(), before.word()),
        None => format!("the job is {}", now.word()),
    };
    LogRecord {
        time_unix_nano: unix(snapshot.at.wall_ns),
        observed_time_unix_nano: unix(snapshot.at.wall_ns),
        severity_number: severity.into(),
        severity_text: name.to_owned(),
        body: body(sentence),
        attributes: vec![attribute("rcomm.verdict", text(now.word()))],
        event_name: "rcomm.verdict".to_owned(),
        ..LogRecord::default()
    }
}

/// The log record of a new finding, with the collective's trace id if the finding names a collective.
fn record(snapshot: &Snapshot, finding: &Finding) -> LogRecord {
    let (severity, name) = match finding.severity {
        Severity::Error => (SeverityNumber::Error, "ERROR"),
        Severity::Warning => (SeverityNumber::Warn, "WARN"),
        Severity::Note => (SeverityNumber::Info, "INFO"),
    };
    let culprits = finding.culprit_ranks.iter().take(MAX_RANKS);
    let culprits = culprits.map(|&rank| AnyValue {
        value: Some(number(rank)),
    });
    let mut attributes = vec![
        attribute("rcomm.verdict", text(snapshot.report.verdict.word())),
        attribute("rcomm.finding.code", text(finding.code.id())),
        attribute("rcomm.finding.name", text(finding.code.name())),
        attribute(
            "rcomm.finding.culprit_ranks",
            Value::ArrayValue(ArrayValue {
                values: culprits.collect(),
            }),
        ),
        attribute("rcomm.finding.next", text(finding.next.as_str())),
    ];
    if let Some(group) = &finding.group {
        attributes.push(attribute("rcomm.group.id", text(group.name.as_str())));
        attributes.push(attribute("rcomm.group.desc", text(group.desc.as_str())));
    }
    if let Some(seq) = finding.seq {
        attributes.push(attribute("rcomm.seq", number(seq)));
    }
    let is_collective = finding.seq_kind == Some(SeqKind::CollectiveSeqId);
    let trace = finding
        .group
        .as_ref()
        .zip(finding.seq)
        .filter(|_| is_collective);
    let trace = trace.map(|(group, seq)| SharedOp {
        job: &snapshot.job,
        group: &group.name,
        ranks: &group.ranks,
        kind: "collective",
        seq,
    });
    LogRecord {
        time_unix_nano: unix(snapshot.at.wall_ns),
        observed_time_unix_nano: unix(snapshot.at.wall_ns),
        severity_number: severity.into(),
        severity_text: name.to_owned(),
        body: body(finding.sentence.clone()),
        attributes,
        event_name: "rcomm.finding".to_owned(),
        trace_id: trace.map_or(vec![], |shared| shared.trace_id().to_vec()),
        ..LogRecord::default()
    }
}
