//! Writes a timeline for ui.perfetto.dev and chrome://tracing, in the JSON Trace Event Format.
//!
//! A rank is shown as a process, a group as a thread (as several if its operations overlap), and an operation as a
//! slice from its issue to its completion, which includes the wait for other ranks. Arrows lead from the member that
//! arrived last to those that waited for it, and from a send to its receive. A pending operation extends to the end of
//! the trace and is marked as pending; so does one that failed at an unknown time, which is marked as failed. If it is
//! unknown when an operation completed, its slice is as long as the measured duration, or has no length.
//!
//! Times are the hosts' own wall clocks minus a common origin. If clocks disagree, arrows can point backwards in time.

use rcomm_recorder::model::{Entry, EntryState, OpType, Rank, Signature};
use rcomm_recorder::publish::{Dump, Recorder};
use rcomm_verdict::format::GroupNames;
use rcomm_verdict::{
    GroupRef, Message, MessageNumbers, Report, Severity, format, retiring_is_all, seq_of,
    status_entry,
};
use serde::{Serialize, Serializer};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::Arc;

/// Writes the timeline of `dumps`. The errors and warnings of `report` that no other finding caused are marked on their
/// culprits.
///
/// A dump that names no rank gets a process number above all ranks.
///
/// # Errors
/// If `out` cannot be written to.
pub fn write(dumps: &[Dump], report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let timeline = Timeline::of(dumps);
    let mut events = TraceEvents { out, first: true };
    write!(events.out, "{{\"displayTimeUnit\":\"ms\",\"otherData\":")?;
    let about = json!({
        "title": format::printable(&crate::render::print::human::one_line(report)),
        "clock": "wall clocks of the hosts, not aligned",
        "origin_ns": timeline.origin.to_string(),
    });
    serde_json::to_writer(&mut *events.out, &about)?;
    write!(events.out, ",\"traceEvents\":[")?;

    let mut joins = Joins::default();
    for (dump, pid) in dumps.iter().zip(&timeline.pids) {
        timeline.write_rank(dump, *pid, &mut joins, &mut events)?;
    }
    joins.write_arrows(&mut events)?;
    timeline.write_findings(report, &mut events)?;
    writeln!(events.out, "\n]}}")
}

/// One collective over its members: group, `collective_seq_id`, index in a coalesced block.
type InstanceKey = (u32, u64, u32);

/// The slices of all ranks that arrows connect.
#[derive(Default)]
struct Joins {
    /// The slices of the members of each collective.
    collectives: BTreeMap<InstanceKey, Vec<Slice>>,
    /// By group: the receive and the send of each message.
    messages: BTreeMap<(u32, Message), [Option<Slice>; 2]>,
}

/// One operation on one rank in the trace. Times are ns from the origin.
#[derive(Clone, Copy, Debug)]
struct Slice {
    pid: u32,
    tid: u32,
    start: i64,
    end: i64,
}

/// What the events of all ranks have in common.
struct Timeline {
    /// When the first operation was issued, ns since the epoch.
    origin: i64,
    /// The end of the trace, ns from the origin, where pending operations end.
    end: i64,
    /// The process number of each dump.
    pids: Vec<u32>,
    /// The number of each group, by name and members.
    groups: BTreeMap<(String, Arc<[Rank]>), u32>,
    names: GroupNames,
}

impl Timeline {
    fn of(dumps: &[Dump]) -> Self {
        let entries = || dumps.iter().flat_map(|dump| dump.entries.iter());
        let origin = entries()
            .map(|entry| entry.time_created_ns)
            .filter(|&ns| ns > 0)
            .min()
            .unwrap_or(0);
        let newest = entries()
            .map(|entry| {
                entry
                    .time_created_ns
                    .max(entry.time_discovered_completed_ns)
            })
            .chain(dumps.iter().map(|dump| dump.identity.dump_time_ns))
            .max()
            .unwrap_or(origin);
        let keys: std::collections::BTreeSet<_> = dumps
            .iter()
            .flat_map(|dump| &dump.groups)
            .map(|group| (group.info.name.clone(), group.info.ranks.clone()))
            .collect();
        let known: Vec<GroupRef> = dumps
            .iter()
            .flat_map(|dump| &dump.groups)
            .map(|group| GroupRef {
                name: group.info.name.clone(),
                desc: group.info.desc.clone(),
                ranks: group.info.ranks.clone(),
            })
            .collect();
        let named = dumps.iter().filter_map(|dump| dump.identity.rank);
        let mut next = named.max().map_or(0, |rank| rank.saturating_add(1));
        let pids = dumps
            .iter()
            .map(|dump| {
                dump.identity.rank.unwrap_or_else(|| {
                    next = next.saturating_add(1);
                    next - 1
                })
            })
            .collect();
        Self {
            origin,
            end: newest.saturating_sub(origin),
            pids,
            groups: keys.into_iter().zip(0..).collect(),
            names: GroupNames::new(&known),
        }
    }

    /// The time from issue to completion, ns from the origin; `status` is the entry that holds the operation's end. If
    /// the completion is before the issue (a clock was set back), the length is 0.
    fn span(&self, entry: &Entry, status: &Entry, completed: bool) -> (i64, i64) {
        let start = entry.time_created_ns.saturating_sub(self.origin).max(0);
        let end = match status.time_discovered_completed_ns {
            0 if completed => {
                // The operation completed at an unknown time: use the duration, if the backend measured one.
                let ns = status.duration_ms.map_or(0.0, |ms| f64::from(ms) * 1e6);
                start.saturating_add(ns as i64)
            }
            0 => self.end,
            ns => ns.saturating_sub(self.origin),
        };
        (start, end.max(start))
    }

    fn write_rank(
        &self,
        dump: &Dump,
        pid: u32,
        joins: &mut Joins,
        events: &mut TraceEvents<'_>,
    ) -> io::Result<()> {
        let name = match (dump.identity.rank, dump.identity.host.as_str()) {
            (Some(rank), "") => format!("rank {rank}"),
            (Some(rank), host) => format!("rank {rank} ({host})"),
            (None, _) => "unknown rank".to_owned(),
        };
        events.metadata("process_name", pid, None, &json!({ "name": name }))?;
        events.metadata(
            "process_sort_index",
            pid,
            None,
            &json!({ "sort_index": pid }),
        )?;

        let mut messages = MessageNumbers::default();
        if let Some(rank) = dump.identity.rank {
            messages.take(rank, dump);
        }
        let mut tid = 0;
        for (index, group) in (0u32..).zip(&dump.groups) {
            let key = (group.info.name.clone(), group.info.ranks.clone());
            let Some(&group_number) = self.groups.get(&key) else {
                continue;
            };
            let mut entries: Vec<&Entry> = dump
                .entries
                .iter()
                .filter(|entry| entry.group == index && entry.time_created_ns > 0)
                .collect();
            entries.sort_by_key(|entry| (entry.time_created_ns, entry.record_id));
            let label = self.names.name(&GroupRef {
                name: group.info.name.clone(),
                desc: group.info.desc.clone(),
                ranks: group.info.ranks.clone(),
            });
            let mut lanes = Lanes::from(tid + 1);
            let mut next_index: BTreeMap<u64, u32> = BTreeMap::new();
            for entry in entries {
                let status = status_entry(dump, entry);
                let completed = has_completed(status, dump.recorder);
                let (start, end) = self.span(entry, status, completed);
                let tid = lanes.lane_for(start, end);
                let slice = Slice {
                    pid,
                    tid,
                    start,
                    end,
                };
                let signature = dump.signatures.get(entry.signature as usize);
                let outcome = match completed {
                    true => "",
                    false if status.retired || status.state == EntryState::Failed => " (failed)",
                    false => " (pending)",
                };
                events.slice(&slice, entry, outcome, signature)?;
                if !entry.is_p2p && !entry.op.is_p2p() {
                    let index = next_index.entry(entry.collective_seq_id).or_default();
                    let instance = (group_number, entry.collective_seq_id, *index);
                    *index += 1;
                    joins.collectives.entry(instance).or_default().push(slice);
                } else if let Some(message) = messages.of(entry.record_id) {
                    let ends = joins.messages.entry((group_number, message)).or_default();
                    ends[usize::from(entry.op == OpType::Send)] = Some(slice);
                }
            }
            for (lane, number) in (1..).zip(lanes.numbers()) {
                let name = match lane {
                    1 => label.clone(),
                    lane => format!("{label} ({lane})"),
                };
                events.metadata("thread_name", pid, Some(number), &json!({ "name": name }))?;
                let sort = json!({ "sort_index": number });
                events.metadata("thread_sort_index", pid, Some(number), &sort)?;
            }
            tid += lanes.ends.len() as u32;
        }
        Ok(())
    }

    fn write_findings(&self, report: &Report, events: &mut TraceEvents<'_>) -> io::Result<()> {
        let roots = report
            .findings
            .iter()
            .filter(|finding| finding.caused_by.is_none() && finding.severity != Severity::Note);
        for finding in roots {
            for &rank in &finding.culprit_ranks {
                events.emit(&TraceEvent {
                    name: &format!("{} {}", finding.code, finding.sentence),
                    ph: "i",
                    s: Some("p"),
                    cat: Some("finding"),
                    pid: rank,
                    tid: Some(1),
                    ts: Some(Micros(self.end)),
                    ..TraceEvent::default()
                })?;
            }
        }
        Ok(())
    }
}

/// Whether an operation has completed, as far as this recorder's records show.
fn has_completed(entry: &Entry, recorder: Recorder) -> bool {
    match entry.state {
        EntryState::Scheduled | EntryState::Started => entry.retired && retiring_is_all(recorder),
        EntryState::Completed => true,
        EntryState::Failed => false,
    }
}

/// The lanes of one group on one rank; each is a thread of the trace. Slices of one lane must not overlap, so
/// operations that do are on several lanes.
struct Lanes {
    /// The number of the first lane's thread.
    first: u32,
    /// When each lane becomes free, ns from the origin.
    ends: Vec<i64>,
}

impl Lanes {
    fn from(first: u32) -> Self {
        Self {
            first,
            ends: Vec::new(),
        }
    }

    /// Puts a slice on the first lane that is free at `start`, or on a new one, and returns the number of its thread.
    fn lane_for(&mut self, start: i64, end: i64) -> u32 {
        let lane = self.ends.iter().position(|&free| free <= start);
        let lane = lane.unwrap_or_else(|| {
            self.ends.push(0);
            self.ends.len() - 1
        });
        self.ends[lane] = end;
        self.first + lane as u32
    }

    fn numbers(&self) -> impl Iterator<Item = u32> {
        self.first..self.first + self.ends.len() as u32
    }
}

impl Joins {
    /// Writes arrows from the last member to arrive to those that arrived earlier, and from sends to receives.
    fn write_arrows(&self, events: &mut TraceEvents<'_>) -> io::Result<()> {
        let mut arrows = Arrows { events, id: 0 };
        for members in self.collectives.values() {
            let Some(last) = members
                .iter()
                .max_by_key(|slice| (slice.start, std::cmp::Reverse(slice.pid)))
            else {
                continue;
            };
            for waiter in members.iter().filter(|slice| slice.start < last.start) {
                arrows.write(("last to arrive", "arrival"), last, waiter)?;
            }
        }
        for ends in self.messages.values() {
            if let [Some(receive), Some(send)] = ends {
                arrows.write(("message", "message"), send, receive)?;
            }
        }
        Ok(())
    }
}

/// Writes arrows, each with its own id: viewers close an id at its first end.
struct Arrows<'a, 'b> {
    events: &'a mut TraceEvents<'b>,
    id: u64,
}

impl Arrows<'_, '_> {
    /// Writes an arrow from the beginning of one slice into another.
    fn write(&mut self, (name, cat): (&str, &str), from: &Slice, to: &Slice) -> io::Result<()> {
        self.id += 1;
        let id = self.id;
        let end = |slice: &Slice, ts: i64, ph, bp| TraceEvent {
            name,
            ph,
            bp,
            cat: Some(cat),
            id: Some(id),
            pid: slice.pid,
            tid: Some(slice.tid),
            ts: Some(Micros(ts)),
            ..TraceEvent::default()
        };
        self.events.emit(&end(from, from.start, "s", None))?;
        // The arrow must end inside the slice, or viewers do not bind it.
        let arrival = from.start.clamp(to.start, to.end);
        self.events.emit(&end(to, arrival, "f", Some("e")))
    }
}

/// A time in ns, written in µs, the unit of the format.
#[derive(Clone, Copy, Debug)]
struct Micros(i64);

impl Serialize for Micros {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.0 as f64 / 1e3)
    }
}

/// An event of the trace; the fields are the keys of the format.
#[derive(Default, Serialize)]
struct TraceEvent<'a> {
    name: &'a str,
    ph: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<&'a str>,
    pid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    tid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<Micros>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<Micros>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bp: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    s: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<&'a serde_json::Value>,
}

/// Writes the events, separated by commas.
struct TraceEvents<'a> {
    out: &'a mut dyn Write,
    /// Whether no event was written yet.
    first: bool,
}

impl TraceEvents<'_> {
    fn emit(&mut self, event: &TraceEvent<'_>) -> io::Result<()> {
        let comma = if std::mem::take(&mut self.first) {
            "\n"
        } else {
            ",\n"
        };
        self.out.write_all(comma.as_bytes())?;
        Ok(serde_json::to_writer(&mut *self.out, event)?)
    }

    /// Writes a metadata event, such as `process_name`.
    fn metadata(
        &mut self,
        name: &str,
        pid: u32,
        tid: Option<u32>,
        args: &serde_json::Value,
    ) -> io::Result<()> {
        self.emit(&TraceEvent {
            name,
            ph: "M",
            pid,
            tid,
            args: Some(args),
            ..TraceEvent::default()
        })
    }

    /// Writes the slice of an operation, whose name ends with `outcome`.
    fn slice(
        &mut self,
        slice: &Slice,
        entry: &Entry,
        outcome: &str,
        signature: Option<&Signature>,
    ) -> io::Result<()> {
        let op = signature.map_or(entry.op.name(), |signature| signature.op_name.as_str());
        let seq = seq_of(entry);
        let kind = match entry.is_p2p || entry.op.is_p2p() {
            true => "p2p_seq_id",
            false => "collective_seq_id",
        };
        let name = format!("{op} #{seq}{outcome}");
        let mut args = json!({
            "record_id": entry.record_id,
            kind: seq,
            "state": entry.state,
            "bytes_in": signature.map_or(0, Signature::input_bytes),
            "bytes_out": signature.map_or(0, Signature::output_bytes),
        });
        if let Some(ms) = entry.duration_ms {
            args["duration_ms"] = ms.into();
        }
        if let Some(graph) = entry.graph_id {
            args["graph_id"] = graph.into();
        }
        if entry.time_discovered_started_ns > entry.time_created_ns {
            let wait = entry.time_discovered_started_ns - entry.time_created_ns;
            args["started_after_us"] = (wait / 1000).into();
        }
        self.emit(&TraceEvent {
            name: &name,
            ph: "X",
            cat: Some("operation"),
            pid: slice.pid,
            tid: Some(slice.tid),
            ts: Some(Micros(slice.start)),
            dur: Some(Micros(slice.end - slice.start)),
            args: Some(&args),
            ..TraceEvent::default()
        })
    }
}
