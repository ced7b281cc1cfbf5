//! The state of a live view at one moment.

use super::Moment;
use crate::live::source::Liveness;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Dump, Recorder};
use rcomm_verdict::{LaterAttempt, Report, Verdict};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

/// One rank in a [`Snapshot`].
#[derive(Clone, Debug)]
pub struct RankView {
    /// Rank in the world.
    pub rank: Rank,
    /// Host; empty if unknown.
    pub host: Arc<str>,
    /// The rank's index among the ranks of its host, from 0.
    pub local_rank: u32,
    /// The rank's records: of each recorder of its process the newest one, in the order of the sources. Empty if none
    /// was ever read.
    pub dumps: Vec<Arc<Dump>>,
    /// Whether the rank's process is alive.
    pub liveness: Liveness,
    /// The age of the rank's last answer; `None` if the rank never answered.
    pub silence: Option<Duration>,
    /// Why the last poll of one of the rank's records failed; `None` if none failed.
    pub failure: Option<Arc<str>>,
    /// Whether the rank has stopped answering: its records are then old.
    pub silent: bool,
    /// The communication library's reports on the rank, one sentence each.
    pub remarks: Vec<String>,
}

impl RankView {
    /// The first of the rank's records; `None` if none was ever read.
    pub fn first_dump(&self) -> Option<&Dump> {
        self.dumps.first().map(Arc::as_ref)
    }

    /// The rank's records. That of the plug-in for NCCL is left out if the program's own records have the group of each
    /// communicator in it: so each operation counts once.
    pub fn counted(&self) -> impl Iterator<Item = &Arc<Dump>> {
        let is_copy = |dump: &Dump| {
            dump.recorder == Recorder::NcclProfiler && have_groups_of(self.dumps.iter(), dump)
        };
        self.dumps.iter().filter(move |dump| !is_copy(dump))
    }
}

/// Whether the program's own records have the group of each communicator in the plug-in's record `plugin`. rcomm's
/// backend for NCCL describes a communicator by the name or the description of its group, and one that it made for the
/// messages of two ranks by `<group>/0-1`.
fn have_groups_of<'a>(records: impl Iterator<Item = &'a Arc<Dump>>, plugin: &Dump) -> bool {
    let of_plugin = &plugin.identity;
    let is_program = |dump: &&Arc<Dump>| {
        let other = &dump.identity;
        dump.recorder != Recorder::NcclProfiler
            && (of_plugin.pid != 0 && of_plugin.pid == other.pid && of_plugin.host == other.host)
    };
    let groups: HashSet<&str> = records
        .filter(is_program)
        .flat_map(|dump| dump.groups.iter())
        .flat_map(|group| [group.info.name.as_str(), group.info.desc.as_str()])
        .filter(|name| !name.is_empty())
        .collect();
    plugin.groups.iter().all(|group| {
        let desc = group.info.desc.as_str();
        let messages_of = desc.rsplit_once('/').map_or("", |(head, _)| head);
        // The program's recorder does not see what graphs replay.
        !group.info.name.ends_with("-graphs")
            && (groups.contains(desc) || groups.contains(messages_of))
    })
}

/// The state of a source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceStatus {
    /// The name of the source: what is read and where.
    pub name: String,
    /// The age of the source's last answer; `None` if the source never answered.
    pub silence: Option<Duration>,
    /// The number of ranks that answered at the last poll; 0 if the poll failed.
    pub answered: usize,
    /// The number of ranks that the source knew at its last answer.
    pub known: usize,
    /// Why the last poll failed, if it did.
    pub error: Option<String>,
    /// What is left of the job's records where the source reads them, as a sentence, once all its processes have ended;
    /// `None` before, and if the source does not know it.
    pub remains: Option<String>,
}

/// All data that a view shows at one moment; immutable and shared.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The number of this snapshot, from 1; 0 for [`Snapshot::empty`].
    pub number: u64,
    /// When it was judged.
    pub at: Moment,
    /// The report.
    pub report: Arc<Report>,
    /// Every rank that is expected or has a record, ascending.
    pub ranks: Arc<[RankView]>,
    /// The state of every source.
    pub sources: Vec<SourceStatus>,
    /// Name of the job; empty if unknown.
    pub job: String,
    /// A later attempt of the job, if its processes were seen and have left no record yet.
    pub later_attempt: Option<LaterAttempt>,
    /// The wall time that it took to judge and make this snapshot.
    pub cost: Duration,
}

impl Snapshot {
    /// A snapshot without records and sources.
    pub fn empty(at: Moment) -> Self {
        let report = Report {
            schema: Report::SCHEMA.into(),
            verdict: Verdict::Inconclusive,
            findings: vec![],
            problems: vec![],
            end: None,
            input: rcomm_verdict::Input::default(),
            groups: vec![],
            ranks: vec![],
            in_flight: vec![],
            waits: vec![],
            stacks: vec![],
            now: vec![],
        };
        Self {
            number: 0,
            at,
            report: Arc::new(report),
            ranks: Arc::from([]),
            sources: vec![],
            job: String::new(),
            later_attempt: None,
            cost: Duration::ZERO,
        }
    }

    /// The view of one rank; `None` if the rank is neither expected nor has a record.
    pub fn rank(&self, rank: Rank) -> Option<&RankView> {
        let index = self.ranks.binary_search_by_key(&rank, |view| view.rank);
        index.ok().map(|index| &self.ranks[index])
    }

    /// All records, by rank.
    pub fn dumps(&self) -> impl Iterator<Item = (Rank, &Dump)> {
        self.ranks
            .iter()
            .flat_map(|view| view.dumps.iter().map(|dump| (view.rank, dump.as_ref())))
    }

    /// The records in which each operation counts once, by rank: see [`RankView::counted`].
    pub fn counted(&self) -> impl Iterator<Item = (Rank, &Dump)> {
        let ranks = self.ranks.iter();
        ranks.flat_map(|view| view.counted().map(|dump| (view.rank, dump.as_ref())))
    }

    /// The number of operations in memory over all ranks.
    pub fn entries(&self) -> usize {
        self.dumps().map(|(_, dump)| dump.entries.len()).sum()
    }
}

impl RankView {
    pub(super) fn missing(rank: Rank) -> Self {
        Self {
            rank,
            host: Arc::from(""),
            local_rank: 0,
            dumps: vec![],
            liveness: Liveness::Unknown,
            silence: None,
            failure: None,
            silent: false,
            remarks: vec![],
        }
    }

    /// Adds a record. If several sources have a record of the same recorder, the newest is kept; records of different
    /// recorders of one process are kept side by side.
    pub(super) fn add(&mut self, dump: &Arc<Dump>) {
        let is_newer = |a: &Dump, b: &Dump| {
            (a.identity.attempt, a.identity.dump_time_ns)
                > (b.identity.attempt, b.identity.dump_time_ns)
        };
        let is_empty = |dump: &Dump| dump.entries.is_empty() && dump.groups.is_empty();
        let known = self.dumps.iter().position(|d| d.recorder == dump.recorder);
        match known {
            Some(index) if is_newer(dump, &self.dumps[index]) => {
                self.dumps[index] = dump.clone();
            }
            Some(_) => {}
            // A record without operations and groups is left out if there is one of another recorder.
            None if is_empty(dump) && !self.dumps.is_empty() => {}
            None => {
                self.dumps.retain(|known| !is_empty(known));
                self.dumps.push(dump.clone());
            }
        }
    }
}
