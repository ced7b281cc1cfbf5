//! One span for each operation on each rank, in the trace that all members share.
//!
//! Sampling depends only on the trace id, so it keeps the spans of all members or none, and all instances of this
//! program with the same ratio decide alike. An operation is remarkable if it failed, is stuck, or took much longer
//! than usual. Its trace is kept regardless of sampling, with the spans of all members that are seen in the same round
//! or later. A stuck operation gets one span that ends at the time of the snapshot; if the operation ends later, a span
//! with the same id and the real end is sent.

use super::messages::Messages;
use super::operation::{AttributeValue, Operation};
use super::settings::Settings;
use super::value::{attribute, number, resource, scope, text, unix};
use crate::metrics::new_entries::{NewEntries, RecorderKey, recorder_key};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::trace::v1::span::{Event, SpanKind};
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, Status};
use rcomm_analyzer::{SeqKind, Snapshot, seq_of};
use rcomm_recorder::model::{Entry, EntryState, Rank};
use rcomm_recorder::publish::Dump;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Maximum number of spans per round; remarkable ones go first.
const MAX_SPANS: usize = 16 * 1024;
/// Maximum number of spans per request.
const MAX_IN_REQUEST: usize = 2048;
/// Maximum number of remarkable traces that are remembered for members that end later.
const MAX_REMEMBERED: usize = 16 * 1024;
/// An operation is slow if it takes more than this multiple of the usual time, and more than [`MIN_SLOW_S`].
const SLOW_FACTOR: f64 = 4.0;
/// The shortest time in seconds that can be slow.
const MIN_SLOW_S: f64 = 0.001;
/// If the report has an overdue operation, every pending operation of at least this age is exported as stuck. So are
/// the overdue ones that are younger because their own time-out is short.
const STUCK_AGE: Duration = Duration::from_secs(5);

type TraceId = [u8; 16];

/// One operation that may become a span.
struct Candidate<'a> {
    operation: Operation<'a>,
    trace: TraceId,
    /// If the operation is still pending, the time of the snapshot, wall clock, ns since the epoch, at which its span
    /// ends; `None` if it has ended.
    until_ns: Option<i64>,
}

/// The export requests of one round.
#[derive(Default)]
pub(super) struct Batch {
    /// Requests, each with the number of its spans.
    pub(super) requests: Vec<(ExportTraceServiceRequest, u64)>,
    /// Number of spans that are not sent: those beyond [`MAX_SPANS`], and those of operations that got stuck while
    /// as many stuck ones had already been sent.
    pub(super) dropped: u64,
}

/// The state from which each round selects spans.
pub(super) struct Spans {
    new_entries: NewEntries,
    messages: Messages,
    /// Share of the traces that are not remarkable which is kept, 0 to 1.
    ratio: f64,
    /// Wall clock, ns since the epoch. Operations that ended earlier are not exported: an earlier instance of this
    /// program may have exported them.
    since_ns: i64,
    /// Usual duration in seconds, by description of the group and operation.
    usual: HashMap<(String, &'static str), f64>,
    /// The traces that are kept regardless of sampling.
    remarkable: HashSet<TraceId>,
    /// The traces in `remarkable`, oldest first.
    order: VecDeque<TraceId>,
    /// Recorder and record id of each stuck operation that was exported and has not ended since. The recorders of
    /// another attempt, and others of the same process, use the same ids.
    exported: HashSet<(RecorderKey, u64)>,
    /// The number of stuck operations in the last round that did not fit in `exported`.
    unexported: u64,
}

impl Spans {
    pub(super) fn beginning_now(ratio: f64) -> Self {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        Self {
            new_entries: NewEntries::default(),
            messages: Messages::default(),
            ratio,
            since_ns: i64::try_from(now.as_nanos()).unwrap_or(i64::MAX),
            usual: HashMap::new(),
            remarkable: HashSet::new(),
            order: VecDeque::new(),
            exported: HashSet::new(),
            unexported: 0,
        }
    }

    /// At most [`MAX_SPANS`] spans of the operations that have ended or got stuck since the last call; of those that
    /// are not remarkable, only the sampled ones.
    pub(super) fn take(&mut self, snapshot: &Snapshot, settings: &Settings) -> Batch {
        let mut candidates = Vec::new();
        let since_ns = self.since_ns;
        self.messages.take(snapshot);
        let messages = &self.messages;
        self.new_entries.take(snapshot, |rank, dump, entry| {
            let message = messages.of(rank, dump, entry.record_id);
            let operation = Operation::new(rank, dump, entry, message);
            if operation.ended_ns() >= since_ns {
                candidates.extend(candidate(&snapshot.job, operation, None));
            }
        });
        for Candidate { operation: it, .. } in &candidates {
            let recorder = recorder_key(it.rank, it.dump);
            self.exported.remove(&(recorder, it.entry.record_id));
        }
        for candidate in &candidates {
            if self.is_remarkable(&candidate.operation) {
                self.remember(candidate.trace);
            }
        }
        let unexported = self.add_stuck(snapshot, &mut candidates);
        // Those of the last round were counted then.
        let newly_dropped = unexported.saturating_sub(self.unexported);
        self.unexported = unexported;
        let ratio = self.ratio;
        candidates.retain(|candidate| {
            self.remarkable.contains(&candidate.trace) || is_sampled(&candidate.trace, ratio)
        });
        let mut batch = Batch {
            dropped: newly_dropped,
            ..Batch::default()
        };
        if candidates.len() > MAX_SPANS {
            candidates.sort_by_key(|candidate| !self.remarkable.contains(&candidate.trace));
            batch.dropped += (candidates.len() - MAX_SPANS) as u64;
            candidates.truncate(MAX_SPANS);
        }
        for chunk in candidates.chunks(MAX_IN_REQUEST) {
            let request = request(snapshot, settings, chunk);
            batch.requests.push((request, chunk.len() as u64));
        }
        batch
    }

    /// Whether an operation failed, or took much longer than usual. Also updates the usual duration.
    fn is_remarkable(&mut self, operation: &Operation<'_>) -> bool {
        if operation.error().is_some() {
            return true;
        }
        let wait = operation.wait_s();
        let desc = operation.dump.groups.get(operation.entry.group as usize);
        let desc = desc.map_or(String::new(), |group| group.info.desc.clone());
        let usual = self
            .usual
            .entry((desc, operation.entry.op.name()))
            .or_insert(wait);
        let slow = wait > MIN_SLOW_S && wait > SLOW_FACTOR * *usual;
        // A moving average, so that a single slow operation changes the usual duration only a little. The 1e-6 lets a
        // usual duration of 0 grow.
        *usual += (wait.min(2.0 * *usual + 1e-6) - *usual) / 32.0;
        slow
    }

    /// Makes a trace remarkable; forgets the oldest one if there are too many.
    fn remember(&mut self, trace: TraceId) {
        if self.remarkable.insert(trace) {
            self.order.push_back(trace);
        }
        if self.order.len() > MAX_REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.remarkable.remove(&oldest);
        }
    }

    /// If the report has an overdue operation, adds the overdue operations and those that have been pending for
    /// [`STUCK_AGE`] or longer, each once. Returns the number of those that are left out because more than
    /// [`MAX_SPANS`] are stuck.
    fn add_stuck<'a>(
        &mut self,
        snapshot: &'a Snapshot,
        candidates: &mut Vec<Candidate<'a>>,
    ) -> u64 {
        let now = snapshot.at.wall_ns;
        let limit = i64::try_from(STUCK_AGE.as_nanos()).unwrap_or(i64::MAX);
        let overdue = snapshot
            .report
            .in_flight
            .iter()
            .filter(|instance| instance.overdue);
        let overdue: HashSet<(&str, bool, u64)> = overdue
            .map(|instance| {
                let is_p2p = instance.seq_kind != SeqKind::CollectiveSeqId;
                (instance.group.name.as_str(), is_p2p, instance.seq)
            })
            .collect();
        if overdue.is_empty() {
            return 0;
        }
        let mut left_out = 0;
        let records = snapshot.counted();
        let present: HashSet<RecorderKey> = records
            .map(|(rank, dump)| recorder_key(rank, dump))
            .collect();
        self.exported
            .retain(|(recorder, _)| present.contains(recorder));
        for (rank, dump) in snapshot.counted() {
            let recorder = recorder_key(rank, dump);
            let open = |e: &&Entry| e.state < EntryState::Completed && !e.retired;
            for entry in dump.entries.iter().filter(open) {
                let is_p2p = entry.is_p2p || entry.op.is_p2p();
                let group = dump.groups.get(entry.group as usize);
                let is_overdue = group.is_some_and(|group| {
                    overdue.contains(&(&*group.info.name, is_p2p, seq_of(entry)))
                });
                let stuck = is_overdue || now.saturating_sub(entry.time_created_ns) >= limit;
                let key = (recorder, entry.record_id);
                if !stuck || self.exported.contains(&key) {
                    continue;
                }
                if self.exported.len() >= MAX_SPANS {
                    left_out += 1;
                    continue;
                }
                self.exported.insert(key);
                let message = self.messages.of(rank, dump, entry.record_id);
                let operation = Operation::new(rank, dump, entry, message);
                if let Some(candidate) = candidate(&snapshot.job, operation, Some(now)) {
                    self.remember(candidate.trace);
                    candidates.push(candidate);
                }
            }
        }
        left_out
    }
}

/// Whether ratio sampling keeps a trace. Uses the last eight bytes of its id, as the SDKs' samplers do.
fn is_sampled(trace: &TraceId, ratio: f64) -> bool {
    let mut low = [0; 8];
    low.copy_from_slice(&trace[8..]);
    let position = (u64::from_be_bytes(low) >> 1) as f64 / (1_u64 << 63) as f64;
    ratio >= 1.0 || position < ratio
}

/// A candidate; `None` if the dump lacks the operation's group.
fn candidate<'a>(
    job: &str,
    operation: Operation<'a>,
    until_ns: Option<i64>,
) -> Option<Candidate<'a>> {
    let trace = operation.shared(job)?.trace_id();
    Some(Candidate {
        operation,
        trace,
        until_ns,
    })
}

/// The request that exports these candidates, with one resource for each rank.
fn request(
    snapshot: &Snapshot,
    settings: &Settings,
    candidates: &[Candidate<'_>],
) -> ExportTraceServiceRequest {
    let mut by_rank: BTreeMap<Rank, (&Dump, Vec<Span>)> = BTreeMap::new();
    for candidate in candidates {
        if let Some(span) = span(snapshot, candidate) {
            by_rank
                .entry(candidate.operation.rank)
                .or_insert((candidate.operation.dump, Vec::new()))
                .1
                .push(span);
        }
    }
    let resource_spans = by_rank.into_iter().map(|(rank, (dump, spans))| {
        let id = &dump.identity;
        let mut more = vec![attribute(
            "service.instance.id",
            text(format!("rank-{rank}")),
        )];
        if !id.host.is_empty() {
            more.push(attribute("host.name", text(id.host.as_str())));
        }
        if id.pid != 0 {
            more.push(attribute("process.pid", number(id.pid)));
        }
        ResourceSpans {
            resource: resource(&snapshot.job, settings, more),
            scope_spans: vec![ScopeSpans {
                scope: scope(),
                spans,
                ..ScopeSpans::default()
            }],
            ..ResourceSpans::default()
        }
    });
    ExportTraceServiceRequest {
        resource_spans: resource_spans.collect(),
    }
}

fn span(snapshot: &Snapshot, candidate: &Candidate<'_>) -> Option<Span> {
    let operation = &candidate.operation;
    let shared = operation.shared(&snapshot.job)?;
    let attributes = operation.attributes().into_iter();
    let attributes = attributes.map(|(key, value)| match value {
        AttributeValue::Text(value) => attribute(key, text(value)),
        AttributeValue::Number(value) => attribute(key, number(value)),
    });
    let started = operation.entry.time_discovered_started_ns;
    let events = (started > 0).then(|| Event {
        time_unix_nano: unix(started),
        name: "start noticed".to_owned(),
        ..Event::default()
    });
    let error = match candidate.until_ns {
        Some(_) => Some("still pending when this was sent"),
        None => operation.error(),
    };
    let status = error.map(|message| Status {
        message: message.to_owned(),
        code: StatusCode::Error.into(),
    });
    let record_id = operation.entry.record_id;
    Some(Span {
        trace_id: shared.trace_id().to_vec(),
        span_id: shared.span_id(operation.rank, record_id).to_vec(),
        name: operation.name(),
        kind: SpanKind::Internal.into(),
        start_time_unix_nano: unix(operation.began_ns()),
        end_time_unix_nano: unix(candidate.until_ns.unwrap_or_else(|| operation.ended_ns())),
        attributes: attributes.collect(),
        events: events.into_iter().collect(),
        status,
        ..Span::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_analyzer::simulate::{Simulation, Situation};
    use rcomm_analyzer::source::{SimulatedSource, Source};
    use rcomm_analyzer::{Live, LiveOptions, Moment, analyze};
    use std::time::Instant;

    /// All spans of a simulated job that is read at `read_times`, ns after its beginning.
    fn spans(situation: Situation, ratio: f64, read_times: &[i64]) -> Vec<Span> {
        let simulation = Simulation::new(situation, 16, 0);
        let mut live = Live::new(LiveOptions::default(), analyze, vec!["test".into()]);
        let mut spans = Spans::beginning_now(ratio);
        spans.since_ns = 0;
        let mut exported = Vec::new();
        for &ns in read_times {
            let mut source = SimulatedSource::new(simulation.clone(), move || ns);
            let at = Moment {
                elapsed: Duration::from_nanos(ns as u64),
                wall_ns: ns,
            };
            live.observe(0, source.poll(Instant::now()), at);
            if let Some(snapshot) = live.refresh(at) {
                let batch = spans.take(&snapshot, &Settings::default());
                assert_eq!(batch.dropped, 0);
                for (request, _) in batch.requests {
                    let scopes = request
                        .resource_spans
                        .into_iter()
                        .flat_map(|resource| resource.scope_spans);
                    exported.extend(scopes.flat_map(|scope| scope.spans));
                }
            }
        }
        exported
    }

    /// When the jobs of these tests are read, ns after their beginning.
    const LOOKS: [i64; 4] = [3_000_000_000, 6_000_000_000, 9_000_000_000, 18_000_000_000];

    #[test]
    fn every_operation_is_one_span_and_a_collective_one_trace() {
        let all = spans(Situation::Healthy, 1.0, &LOOKS[..3]);
        let ids: HashSet<&[u8]> = all.iter().map(|span| span.span_id.as_slice()).collect();
        assert_eq!(ids.len(), all.len());
        let mut members: HashMap<&[u8], usize> = HashMap::new();
        for span in all.iter().filter(|span| span.name == "barrier default_pg") {
            *members.entry(&span.trace_id).or_default() += 1;
        }
        assert!(members.len() >= 5);
        assert!(members.values().all(|&ranks| ranks == 16), "{members:?}");
        assert!(
            all.iter()
                .all(|span| span.end_time_unix_nano > span.start_time_unix_nano)
        );
    }

    #[test]
    fn sampling_keeps_about_its_ratio_of_a_healthy_job() {
        let all = spans(Situation::Healthy, 1.0, &LOOKS[..3]).len();
        let some = spans(Situation::Healthy, 0.1, &LOOKS[..3]).len();
        let none = spans(Situation::Healthy, 0.0, &LOOKS[..3]).len();
        assert!(some > all / 40 && some < all / 4, "{some} of {all}");
        assert_eq!(none, 0);
    }

    #[test]
    fn stuck_operations_are_exported_once() {
        let all = spans(
            Situation::StuckRank,
            0.0,
            &[LOOKS[2], LOOKS[3], LOOKS[3] + 5_000_000_000],
        );
        let pending: Vec<&Span> = all
            .iter()
            .filter(|span| {
                span.status
                    .as_ref()
                    .is_some_and(|status| status.message.contains("pending"))
            })
            .collect();
        // All ranks wait except the one at fault.
        assert_eq!(pending.len(), 15);
        assert!(pending.iter().any(|span| span.name == "all_reduce dp"));
    }

    /// What a view knows of a stuck job after two looks.
    fn stuck_snapshot() -> Snapshot {
        let simulation = Simulation::new(Situation::StuckRank, 16, 0);
        let mut live = Live::new(LiveOptions::default(), analyze, vec!["test".into()]);
        let mut newest = None;
        for ns in [LOOKS[2], LOOKS[3]] {
            let mut source = SimulatedSource::new(simulation.clone(), move || ns);
            let at = Moment {
                elapsed: Duration::from_nanos(ns as u64),
                wall_ns: ns,
            };
            live.observe(0, source.poll(Instant::now()), at);
            newest = live.refresh(at).or(newest);
        }
        newest.expect("the first look gives a snapshot")
    }

    #[test]
    fn stuck_operations_beyond_the_limit_are_counted_once() {
        let snapshot = stuck_snapshot();
        let mut spans = Spans::beginning_now(0.0);
        let (rank, dump) = snapshot.counted().next().expect("a rank is read");
        let recorder = recorder_key(rank, dump);
        // One fewer than the limit have been exported, so one more fits.
        let others = (1 << 40..).take(MAX_SPANS - 1);
        spans.exported.extend(others.map(|id| (recorder, id)));
        let mut take = || {
            let batch = spans.take(&snapshot, &Settings::default());
            let sent: u64 = batch.requests.iter().map(|&(_, spans)| spans).sum();
            (sent, batch.dropped)
        };
        assert_eq!((take(), take()), ((1, 14), (0, 0)));
    }

    #[test]
    fn stuck_operations_of_the_next_attempt_are_exported_although_their_ids_are_the_same() {
        let first = stuck_snapshot();
        let mut second = first.clone();
        let mut ranks = second.ranks.to_vec();
        for dump in ranks.iter_mut().flat_map(|view| &mut view.dumps) {
            std::sync::Arc::make_mut(dump).identity.attempt += 1;
        }
        second.ranks = ranks.into();
        let mut spans = Spans::beginning_now(0.0);
        let mut pending = |snapshot: &Snapshot| {
            let batch = spans.take(snapshot, &Settings::default());
            let requests = batch.requests.into_iter();
            let scopes = requests.flat_map(|(request, _)| request.resource_spans);
            let scopes = scopes.flat_map(|it| it.scope_spans);
            scopes
                .flat_map(|it| it.spans)
                .filter_map(|span| span.status)
                .filter(|status| status.message.contains("pending"))
                .count()
        };
        assert_eq!((pending(&first), pending(&first)), (15, 0));
        assert_eq!((pending(&second), pending(&second)), (15, 0));
    }
}
