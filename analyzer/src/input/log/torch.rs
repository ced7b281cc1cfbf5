//! Reads lines of PyTorch: of the watchdog of its NCCL backend, its desync report, the process group wrapper that
//! compares collectives (`TORCH_DISTRIBUTED_DEBUG=DETAIL`), its monitored barrier, and uncaught exceptions. Also reads
//! the list `not arrived` in the errors of rcomm's runtime.

use super::Line;
use super::scan::{between, leading_number, number_after, ranks, truncated};
use rcomm_recorder::model::{OpType, Rank};
use rcomm_verdict::logs::{Absent, Event, Issued, LoggedOp, Progress, TimedOut};

/// The events of a line, each with its rank if known.
pub(super) type Events = Vec<(Option<Rank>, Event)>;

/// At most this many characters of an error, a shape or a type are kept.
const MOST_TEXT: usize = 200;

/// The state of reading a desync report.
#[derive(Debug, Default)]
pub(super) struct Desync {
    /// The sequence number of the listed ranks' newest operation, and whether they have finished it; `None` outside of
    /// a list.
    listing: Option<(u64, bool)>,
}

/// How the traceback of an uncaught exception begins.
const TRACEBACK: &str = "Traceback (most recent call last):";

/// The type of the exception by which torchrun reports that a rank failed.
const LAUNCHER_EXCEPTION: &str = "ChildFailedError";

/// Adds the events of a line. `desync` and `in_traceback` hold what the lines before it have shown.
pub(super) fn read_line(
    line: &Line<'_>,
    desync: &mut Desync,
    in_traceback: &mut bool,
    found: &mut Events,
) {
    let text = line.text;
    if text.contains("WorkNCCL(") {
        work(line, found);
    }
    // The `l` of `last enqueued` may be a capital.
    if text.contains(" work") && text.contains("ast enqueued") {
        progress(line, found);
    } else if text.contains("watchdog got stuck for")
        || text.contains("Heartbeat monitor timed out")
    {
        let seconds = number_after(text, "got stuck for ").unwrap_or(0);
        found.push((rank_of(line), Event::WatchdogStuck(seconds)));
    }
    if text.contains("monitoredBarrier") {
        barrier(line, found);
    }
    if text.contains("Detected mismatch between collectives") {
        mismatch(line, found);
    } else {
        exception(line, *in_traceback, found);
    }
    let is_labeled = line.label.rank.is_some() || line.label.local_rank.is_some();
    if !is_labeled {
        let is_inside = *in_traceback && line.text.starts_with(' ');
        *in_traceback = is_inside || line.text.trim_end() == TRACEBACK;
    }
    desync_line(text, desync, found);
    if text.contains("not arrived: rank") {
        not_arrived(line, found);
    }
}

/// The number of ranks of the job or of one of its groups, if a line states it.
pub(super) fn world_size(text: &str) -> Option<u32> {
    let size = if text.contains("ProcessGroupNCCL initialization options") {
        number_after(text, "size: ")
    } else if text.contains("world_size") {
        number_after(text, "world_size ")
            .or_else(|| number_after(text, "world_size="))
            .or_else(|| number_after(text, "world_size: "))
    } else {
        None
    };
    size.filter(|&size| size > 0 && size <= MOST_RANKS)
}

/// The largest number that counts as a number of ranks.
pub(super) const MOST_RANKS: u32 = 1 << 22;

/// The global rank of a line: the one in its label, also if that follows other text, as that of a progress bar; or else
/// the one in the prefix of the default group, whose group ranks are the global ranks. `None` if there is neither: a
/// bare `[Rank 3]` is the rank within some group of the process.
fn rank_of(line: &Line<'_>) -> Option<Rank> {
    let label_within = || {
        let (_, rest) = line.text.split_once("[rank")?;
        let (rank, rest) = leading_number(rest)?;
        rest.starts_with("]:[").then_some(rank)
    };
    let of_world = || {
        let (group, rank) = prefix_of(line.text)?;
        (group == "0" || group.contains("default_pg")).then_some(rank)
    };
    line.label.rank.or_else(label_within).or_else(of_world)
}

/// The group in `[PG ID 1 PG GUID 1(dp) Rank 0]`, `[PG 3 Rank 4]`, `[PG GUID 2 Rank 0]` or
/// `[PG 0 (default_pg) Rank 0]`.
fn group_of(text: &str) -> Option<&str> {
    prefix_of(text).map(|(group, _)| group)
}

/// The group in a prefix such as [`group_of`] reads, and the rank within that group.
fn prefix_of(text: &str) -> Option<(&str, Rank)> {
    let inside = between(text, "[PG ", &[']'])?;
    let (name, rank) = inside.rsplit_once(" Rank ")?;
    let name = name.rsplit_once("GUID ").map_or(name, |(_, guid)| guid);
    Some((name.trim(), rank.trim().parse().ok()?))
}

/// Reads a time-out or an abort of `WorkNCCL(SeqNum=52, OpType=ALLREDUCE, NumelIn=11, NumelOut=11,
/// Timeout(ms)=240000)`.
fn work(line: &Line<'_>, found: &mut Events) {
    let text = line.text;
    let Some((before, rest)) = text.split_once("WorkNCCL(") else {
        return;
    };
    let Some(name) = between(rest, "OpType=", &[',', ')']) else {
        return;
    };
    let seq = number_after(rest, "SeqNum=");
    let op = op(name);
    if before.contains("Watchdog caught collective operation timeout") {
        // PyTorch writes `u64::MAX` for an unknown number.
        let elements = |key| number_after(rest, key).filter(|&n: &u64| n != u64::MAX);
        let timed_out = TimedOut {
            group: group_of(before).map(str::to_owned),
            in_group: number_after(before, "[Rank ").or_else(|| Some(prefix_of(before)?.1)),
            seq,
            op,
            elements: [elements("NumelIn="), elements("NumelOut=")],
            timeout_ms: number_after(rest, "Timeout(ms)=").unwrap_or(0),
        };
        found.push((rank_of(line), Event::TimedOut(timed_out)));
    } else if let Some((_, error)) = rest.split_once("async exception: ") {
        let event = Event::Aborted {
            op: seq.map(|seq| (op, seq)),
            error: truncated(error, MOST_TEXT),
        };
        found.push((rank_of(line), event));
    }
}

/// Reads `last enqueued NCCL work: 1582, last completed NCCL work: 1579` or, from later versions, `last enqueued work:
/// 1582, last completed work: 1579`.
fn progress(line: &Line<'_>, found: &mut Events) {
    let text = line.text;
    let Some(group) = group_of(text) else {
        return;
    };
    let newest = |key: &str| -> Option<Option<u64>> {
        let number: i64 = number_after(text, &format!("{key} NCCL work:"))
            .or_else(|| number_after(text, &format!("{key} work:")))?;
        Some(u64::try_from(number).ok())
    };
    let (Some(enqueued), Some(completed)) = (newest("ast enqueued"), newest("ast completed"))
    else {
        return;
    };
    let failed = number_after(text, "work sequence id: ")
        .or_else(|| number_after(text, "at work: "))
        .or_else(|| number_after(text, "Timeout at NCCL work: "));
    let progress = Progress {
        group: group.to_owned(),
        failed,
        enqueued,
        completed,
    };
    // A larger completed number shows that PyTorch mixed the counters of messages and of collectives: the numbers then
    // prove nothing.
    if completed <= enqueued {
        found.push((rank_of(line), Event::Progress(progress)));
    }
}

/// Reads a rank's report that it reached a monitored barrier, or rank 0's list of the ranks that did not.
fn barrier(line: &Line<'_>, found: &mut Events) {
    let text = line.text;
    if text.contains("successfully reached monitoredBarrier") {
        let in_group = number_after(text, "Rank ");
        found.push((line.label.rank, Event::BarrierReached { in_group }));
    } else if text.contains("failed to pass monitoredBarrier") {
        // The list ends before the `f` of `failed to pass`.
        let list = between(text, ": Ranks ", &['f'])
            .or_else(|| between(text, ": Rank ", &['f']))
            .or_else(|| between(text, "Rank ", &['f']));
        let missed = list.map(ranks).unwrap_or_default();
        // Rank 0 of the group reports, and names ranks within the group. If it is another rank of the job, the group is
        // not the world.
        if !missed.is_empty() && line.label.rank.is_none_or(|rank| rank == 0) {
            found.push((line.label.rank, Event::BarrierMissed(missed)));
        }
    }
}

/// Reads the two fingerprints after `Rank 1 is running collective: ` and `but Rank 0 is running collective: `.
fn mismatch(line: &Line<'_>, found: &mut Events) {
    let Some((first, second)) = line.text.split_once(", but Rank ") else {
        return;
    };
    let second = second.split("Collectives differ").next().unwrap_or(second);
    let first = first
        .rsplit_once("ranks. Rank ")
        .and_then(|(_, text)| issued(text));
    if let (Some(first), Some(second)) = (first, issued(second)) {
        // The first fingerprint is that of the rank that wrote the line. If the line's label has another rank, both
        // fingerprints name ranks within a group, and the global ranks are not logged.
        if line.label.rank.is_some_and(|rank| rank != first.rank) {
            return;
        }
        let differ = Event::Differ(Box::new([first, second]));
        found.push((line.label.rank, differ));
    }
}

/// The operation in `1 is running collective: CollectiveFingerPrint(SequenceNumber=3, OpType=ALLREDUCE, …)`.
fn issued(text: &str) -> Option<Issued> {
    const MARK: &str = " is running collective: ";
    let (rank, rest) = leading_number(text)?;
    let fingerprint = rest.strip_prefix(MARK).unwrap_or(rest);
    let name = match between(fingerprint, "OpType=", &[',', ')']) {
        Some(name) => name,
        None => fingerprint.trim_end_matches(['.', ' ']),
    };
    let list = |key| between(fingerprint, key, &[']']).unwrap_or("").to_owned();
    let dtype = between(fingerprint, "TensorDtypes=", &[',', ')']).unwrap_or("");
    Some(Issued {
        rank,
        seq: number_after(fingerprint, "SequenceNumber="),
        op: op(&truncated(name, 40)),
        shape: truncated(&list("TensorShape=["), MOST_TEXT),
        dtype: truncated(dtype, MOST_TEXT),
    })
}

/// Reads a line of `TORCH_NCCL_DESYNC_DEBUG`'s report.
fn desync_line(text: &str, desync: &mut Desync, found: &mut Events) {
    let text = text.trim_start_matches(['-', ' ', '\t']);
    if let Some(list) = between(text, "To our best knowledge, ranks [", &[']']) {
        found.push((None, lagging(list, None)));
        return;
    }
    if let Some(rest) = text.strip_prefix('#') {
        desync.listing = leading_number(rest).and_then(|(seq, rest)| match rest.trim() {
            "started ranks:" => Some((seq, false)),
            "finished ranks:" => Some((seq, true)),
            _ => None,
        });
        return;
    }
    let Some((list, rest)) = text.strip_prefix('[').and_then(|text| text.split_once(']')) else {
        desync.listing = None;
        return;
    };
    let rest = rest.trim_start();
    if rest.starts_with("finished collective #") && rest.contains("but didn't join collective") {
        if let Some(after) = number_after(rest, "finished collective #") {
            found.push((None, lagging(list, Some(after))));
        }
        return;
    }
    let Some((seq, finished)) = desync.listing else {
        return;
    };
    let word = if finished { "finished " } else { "started " };
    if let Some(name) = rest.strip_prefix(word) {
        let newest = Event::Newest {
            ranks: ranks(list),
            seq,
            op: op(&truncated(name.trim(), 40)),
            finished,
        };
        found.push((None, newest));
    }
}

/// The event that these ranks did not join a collective; `after` is the last collective that they finished, if known.
fn lagging(list: &str, after: Option<u64>) -> Event {
    let ranks = ranks(list).into_iter();
    Event::Lagging(ranks.map(|rank| Absent { rank, after }).collect())
}

/// Beginnings of errors that usually follow from another rank's failure, so they do not count as a cause.
const CONSEQUENCES: &[&str] = &[
    "NCCL",
    "[PG",
    "[Rank",
    "Connection",
    "[Errno 104]",
    "[../",
    "[/",
    "Broken pipe",
    "Gloo",
    "Socket",
    "Timed out",
    "Rank ",
    "wait timeout",
    "The client socket",
];

/// Types of exceptions that usually follow from another rank's failure, or that torchrun raises.
const CONSEQUENCE_TYPES: &[&str] = &[
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "BrokenPipeError",
    "ConnectionResetError",
    "ConnectionRefusedError",
    "EOFError",
    "SignalException",
];

/// Reads an exception like `OSError: [Errno 39] Directory not empty`, at the start of a message with a label, or after
/// the lines of a traceback without labels. PyTorch does not label exceptions of a rank that has not made its first
/// group.
fn exception(line: &Line<'_>, in_traceback: bool, found: &mut Events) {
    // Without a label, the text of any program could be mistaken for the end of a rank.
    let is_labeled = line.label.rank.is_some() || line.label.local_rank.is_some();
    if !is_labeled && !in_traceback {
        return;
    }
    let (kind, text) = line.text.split_once(':').unwrap_or((line.text, ""));
    let is_name = kind
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"._".contains(&b));
    let is_error = kind.ends_with("Error") || kind.ends_with("Exception");
    let class = kind.rsplit('.').next().unwrap_or(kind);
    let text = text.trim();
    if !is_name || !is_error || class == LAUNCHER_EXCEPTION {
        return;
    }
    let is_consequence = CONSEQUENCE_TYPES.contains(&class)
        || CONSEQUENCES.iter().any(|start| text.starts_with(start))
        || text.contains("NCCL communicator");
    let error = match text {
        "" => class.to_owned(),
        text => format!("{class}: {}", truncated(text, MOST_TEXT)),
    };
    let event = match is_labeled && !is_consequence {
        true => Event::Raised(error),
        false => Event::Exception(error),
    };
    found.push((line.label.rank, event));
}

/// Reads `all_reduce #41 on group dp: …; not arrived: rank 2 (last collective here is #40), rank 5 (…)` of rcomm's
/// runtime.
fn not_arrived(line: &Line<'_>, found: &mut Events) {
    const MOST: usize = 1 << 16;
    let Some((_, mut rest)) = line.text.split_once("not arrived: ") else {
        return;
    };
    let mut absent = Vec::new();
    while let Some((rank, progress)) = rest.strip_prefix("rank ").and_then(leading_number::<Rank>) {
        let Some((progress, after)) = progress.strip_prefix(" (").and_then(parenthesized) else {
            break;
        };
        let known = match progress.strip_prefix("last collective here is #") {
            Some(number) => leading_number(number).map(|(last, _)| Some(last)),
            None => Some(None),
        };
        absent.extend(known.map(|after| Absent { rank, after }));
        let next = after.strip_prefix(", ").filter(|_| absent.len() < MOST);
        rest = next.unwrap_or("");
    }
    absent.sort_unstable();
    if !absent.is_empty() {
        found.push((line.label.rank, Event::NotJoined(absent)));
    }
}

/// Splits `text` at its first closing parenthesis that is not inside quotation marks.
fn parenthesized(text: &str) -> Option<(&str, &str)> {
    let (mut quoted, mut escaped) = (false, false);
    for (index, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = quoted,
            b'"' => quoted = !quoted,
            b')' if !quoted => return Some((&text[..index], &text[index + 1..])),
            _ => {}
        }
    }
    None
}

/// The operation for a name of `c10d::OpType`; [`OpType::Other`] with the name if unknown.
fn op(name: &str) -> LoggedOp {
    let kind = match name {
        "BROADCAST" => OpType::Broadcast,
        "ALLREDUCE" => OpType::AllReduce,
        "ALLREDUCE_COALESCED" => OpType::AllReduceCoalesced,
        "_ALLREDUCE_SPARSE" => OpType::AllReduceSparse,
        "REDUCE" => OpType::Reduce,
        "ALLGATHER" => OpType::AllGather,
        "_ALLGATHER_BASE" => OpType::AllGatherSingle,
        "ALLGATHER_COALESCED" => OpType::AllGatherCoalesced,
        "GATHER" => OpType::Gather,
        "SCATTER" => OpType::Scatter,
        "REDUCE_SCATTER" => OpType::ReduceScatter,
        "_REDUCE_SCATTER_BASE" => OpType::ReduceScatterSingle,
        "ALLTOALL" => OpType::AllToAll,
        "ALLTOALL_BASE" => OpType::AllToAllVSingle,
        "SEND" => OpType::Send,
        "RECV" | "RECVANYSOURCE" => OpType::Recv,
        "BARRIER" => OpType::Barrier,
        "COALESCED" => OpType::Coalesced,
        _ => OpType::Other,
    };
    LoggedOp {
        kind,
        name: name.to_owned(),
    }
}
