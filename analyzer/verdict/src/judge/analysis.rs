//! Makes a report from dumps, given all at once or one after another.

use crate::align::corrections::{comm_counter, devices, same_process};
use crate::align::p2p::Messages;
use crate::align::record::{Extent, Record};
use crate::align::shared::{Shared, Unusable};
use crate::align::{Aligned, Workers, clocks};
use crate::judge::context::{Context, name_groups};
use crate::judge::lateness::Lateness;
use crate::judge::life::Life;
use crate::judge::outdated::still_inside;
use crate::judge::policy::{Policy, RecordFile, each_taken, newest_taken_ns, of_young_files};
use crate::judge::records::provenance::LeftAside;
use crate::judge::records::{
    aborted, misnamed, only_active, provenance, refused, timeouts, unkept,
};
use crate::judge::waits::busy;
use crate::judge::waits::wait_graph::WaitGraph;
use crate::judge::waits::wait_root;
use crate::judge::young::of_young_dumps;
use crate::judge::{assemble, check, disagreement};
use crate::report::{Code, Input, Problem, Report};
use rcomm_recorder::publish::{Dump, LaunchRecord};
use std::borrow::Borrow;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Judges dumps that are all in memory.
///
/// The same dumps and policy give the same report, in whatever order the dumps are given.
pub fn analyze<D: Borrow<Dump>>(dumps: &[D], policy: &Policy) -> Report {
    let mut analysis = Analysis::new(policy.clone());
    analysis.add_all(dumps);
    analysis.finish()
}

/// Judges dumps that are given one after another.
///
/// A dump is copied into a compact form, 56 bytes an operation; shapes, stacks and groups that ranks share are stored
/// once. The dump itself can be dropped once it has been added.
#[derive(Debug)]
pub struct Analysis {
    policy: Policy,
    shared: Shared,
    records: Vec<Record>,
    problems: Vec<Problem>,
    files: usize,
    /// When the file of the next dump was written, ns since the epoch.
    next_written_ns: Option<i64>,
}

impl Analysis {
    /// An analysis without any dump.
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            shared: Shared::default(),
            records: Vec::new(),
            problems: Vec::new(),
            files: 0,
            next_written_ns: None,
        }
    }

    /// Lends threads for the judgment of a large job; the report is the same without them.
    pub fn with_workers(mut self, workers: Arc<dyn Workers>) -> Self {
        self.shared.workers = Some(workers);
        self
    }

    /// Adds dumps without paths, each with what [`Policy::files`] has at its place.
    pub fn add_all<D: Borrow<Dump>>(&mut self, dumps: &[D]) {
        let files = std::mem::take(&mut self.policy.files);
        let file = |index: usize| -> RecordFile { files.get(index).copied().unwrap_or_default() };
        let dumps: Vec<&Dump> = dumps.iter().map(Borrow::borrow).collect();
        let taken = self.shared.take_in_all(&dumps, |index| file(index).extent);
        for (index, taken) in taken.into_iter().enumerate() {
            self.note_written(file(index).written_ns);
            self.keep("", taken);
        }
    }

    /// Adds a dump that was read to its end, without a path.
    pub fn add(&mut self, dump: &Dump) {
        self.add_from("", dump, Extent::Whole);
    }

    /// Adds a dump with the file or source that it came from, and whether all of it was read. A dump that cannot be
    /// used becomes a problem (N301) of the report.
    pub fn add_from(&mut self, path: &str, dump: &Dump, extent: Extent) {
        let taken = self.shared.take_in(path.to_owned(), dump, extent);
        self.keep(path, taken);
    }

    /// Keeps what became of the next dump.
    fn keep(&mut self, path: &str, taken: Result<Record, Unusable>) {
        self.files += 1;
        let written_ns = self.next_written_ns.take();
        match taken {
            Ok(mut record) => {
                record.written_ns = written_ns;
                self.records.push(record);
            }
            Err(unusable) => {
                let sentence = format!("left aside: {}", unusable.0);
                self.problems.push(Problem::unreadable_dump(path, sentence));
            }
        }
    }

    /// Notes when the file of the dump that is added next was written, ns since the epoch. `None` if that is unknown,
    /// or if the dump states when it was taken. Where no record states that, ages are those at the newest of these
    /// times. A record is also compared with the time of its own file, since hosts' clocks may differ.
    pub fn note_written(&mut self, written_ns: Option<i64>) {
        self.next_written_ns = written_ns;
        self.policy.written_ns = self.policy.written_ns.max(written_ns);
    }

    /// Adds the records of launchers on the processes of the job.
    pub fn add_launches(&mut self, launches: Vec<LaunchRecord>) {
        self.policy.launches.extend(launches);
    }

    /// Sets the number of ranks expected, unless the policy or an earlier call states one.
    pub fn expect(&mut self, world_size: u32) {
        self.policy.world_size = self.policy.world_size.or(Some(world_size));
    }

    /// Adds a problem of an input. With [`Unread::Part`], the input's dump must be added as well: adding it counts the
    /// file.
    pub fn add_problem(&mut self, problem: Problem, unread: Unread) {
        self.files += usize::from(unread == Unread::Whole);
        self.problems.push(problem);
    }

    /// Removes the records and problems of a file or source; for an archive, also those of its members. The number of
    /// files read stays the same.
    pub fn forget(&mut self, path: &str) {
        let belongs = |other: &str| {
            let rest = other.strip_prefix(path);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
        };
        self.records.retain(|record| !belongs(&record.path));
        self.problems.retain(|problem| !belongs(&problem.path));
    }

    /// Judges the dumps added so far; more can be added afterward.
    pub fn report(&self) -> Report {
        let (records, problems) = (self.records.clone(), self.problems.clone());
        judge(&self.policy, &self.shared, records, problems, self.files)
    }

    /// Judges the dumps that were added.
    pub fn finish(self) -> Report {
        judge(
            &self.policy,
            &self.shared,
            self.records,
            self.problems,
            self.files,
        )
    }
}

/// The number of operations that all these records hold.
fn count_ops(records: &[Record]) -> u64 {
    records.iter().map(|record| record.ops.len() as u64).sum()
}

/// The report on these records. `problems` are those of the inputs so far, `files` is the number of files read.
// Invariant 7 of docs/ARCHITECTURE.md: the report depends on these arguments alone.
fn judge(
    policy: &Policy,
    shared: &Shared,
    mut records: Vec<Record>,
    mut problems: Vec<Problem>,
    files: usize,
) -> Report {
    misnamed::settle(shared, &mut records, &mut problems);
    let ops_read = count_ops(&records);
    let mut aside = LeftAside::default();
    let newest_worlds =
        provenance::leave_earlier_runs_aside(&mut records, &policy.launches, &mut aside);
    only_active::settle(&mut records);
    comm_counter::number_by_communicator(shared, &mut records);
    refused::leave_out(shared, &mut records);
    aborted::reopen(shared, &mut records);
    let (mut records, alignment) = provenance::select(shared, records, policy, &mut aside);
    let policy = &Policy {
        // Another source may have counted the ranks of the earlier run.
        world_size: newest_worlds.size_for(&records).or(policy.world_size),
        ..policy.clone()
    };
    let left_aside = aside.ranks();
    // The corrections below change no record that aligns once, so the alignment that `select` has made stays valid.
    let alignment = alignment.filter(|_| records.iter().all(Record::aligns_once));
    problems.extend(aside.into_problems());
    let devices = devices::split(shared, &mut records, &mut problems);
    // If a process has several ranks, launchers and sources number the processes, not the ranks.
    let policy = &match devices {
        Some(size) => Policy {
            world_size: Some(size),
            silent: Vec::new(),
            launches: Vec::new(),
            ..policy.clone()
        },
        None => policy.clone(),
    };
    let ops_selected = count_ops(&records);
    let shows_running_job = policy.snapshot_of_rings
        && records.iter().all(Record::is_ring)
        && records.iter().any(Record::lives);
    let snapshot = policy.snapshot || shows_running_job;
    let policy = &Policy {
        snapshot,
        ..policy.clone()
    };
    same_process::join(shared, &mut records);
    // An operation that two recorders of one process hold counts once.
    let entries = ops_read - (ops_selected - count_ops(&records));
    timeouts::note(shared, &mut records);
    note_versions(&records, &mut problems);
    let (mut aligned, mut clocks) = match alignment {
        Some((alignment, clocks)) => {
            let aligned = Aligned::again(shared, &records, alignment, policy.world_size);
            (aligned, clocks)
        }
        None => {
            let aligned = Aligned::new(shared, &records, policy.world_size);
            let clocks = clocks::offsets(&aligned);
            (aligned, clocks)
        }
    };
    clocks::take_from_host(&records, &mut clocks);
    aligned.set_clocks(&clocks);
    let messages = Messages::new(&aligned);
    let taken = each_taken(&aligned, policy);
    aligned.note_taken(&taken, newest_taken_ns(&aligned, policy), &messages);
    aligned.note_went_on(&taken);
    let life = Life::new(&aligned, policy);
    let policy = life.policy(policy);
    let of_young_files = match life.end {
        None => of_young_files(&aligned, &messages, &policy),
        Some(_) => None,
    };
    let young_files = of_young_files.is_some();
    let of_young_dumps = match life.end {
        None => of_young_dumps(&aligned, &messages, &policy, &life),
        Some(_) => None,
    };
    let young_dumps = of_young_dumps.is_some();
    let policy = &of_young_files.or(of_young_dumps).unwrap_or(policy);
    let mut graph = WaitGraph::new(&aligned, &messages, policy, young_files, &life);
    let wait_roots = wait_root::find(&aligned, &mut graph);
    let disagreements = disagreement::find(&aligned);
    let lateness = Lateness::new(&aligned, &clocks, policy);
    let open_by_status = unkept::open_by_status(&aligned, policy);
    let unkept = unkept::find(&aligned, policy);
    let mut ctx = Context {
        policy,
        young_files,
        young_dumps,
        left_aside,
        unkept,
        open_by_status,
        newest_taken_ns: newest_taken_ns(&aligned, policy),
        still_inside: still_inside(&aligned),
        lacks_input: problems.iter().any(|problem| problem.code == Code::N301),
        life: &life,
        aligned: &aligned,
        names: name_groups(&aligned),
        messages: &messages,
        reversed: graph.reversed(),
        graph: &graph,
        wait_roots,
        disagreements,
        lateness: &lateness,
        clocks,
    };
    ctx.wait_roots = busy::find(&ctx);
    let ctx = ctx;
    let mut drafts = Vec::new();
    for check in check::ALL {
        let found = check.run(&ctx, &drafts);
        debug_assert!(
            found
                .iter()
                .all(|draft| check.codes().contains(&draft.code))
        );
        drafts.extend(found);
    }
    let input = Input {
        files,
        ranks_expected: aligned.expected.len(),
        ranks_read: aligned.ranks_read(),
        may_have_more: aligned.may_have_more,
        entries,
        logs: None,
    };
    assemble::report(&ctx, drafts, problems, input)
}

/// How much of an input could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unread {
    /// The whole input: it gives no dump.
    Whole,
    /// A part of the input: the dump of the rest is added as well.
    Part,
}

/// Adds N303 if the records have different format versions.
fn note_versions(records: &[Record], problems: &mut Vec<Problem>) {
    let versions: BTreeSet<_> = records.iter().map(|record| record.version).collect();
    if versions.len() > 1 {
        let versions: Vec<String> = versions.iter().map(ToString::to_string).collect();
        problems.push(Problem::new(
            Code::N303,
            "",
            format!(
                "files of format versions {} were read together",
                versions.join(", ")
            ),
        ));
    }
}
