//! The logs of a job: the lines of PyTorch's watchdogs, uncaught exceptions, and what the launcher says of the ends.

mod launcher;

use crate::generator::Random;
use crate::hunt::job::{Backend, Job, MS, SECOND};
use crate::hunt::record::{START_NS, sizes};
use crate::hunt::run::{Gone, History, Life, Operation};
use crate::hunt::{Case, Truth};
use rcomm_analyzer::log;
use rcomm_recorder::model::{OpType, Rank};

/// A line of a log.
struct Line {
    /// When it is written, ns since the start of the job.
    at: i64,
    /// The host of the process that writes it.
    host: u32,
    /// The rank whose process writes it; `None` for the launcher's.
    rank: Option<Rank>,
    text: String,
}

/// Changes some jobs so that processes do not end by SIGTERM and are killed half a minute later.
fn kill_the_slow(history: &mut History, random: &mut Random) {
    let share = *random.pick(&[0.0, 0.0, 0.2, 0.7]);
    for life in &mut history.lives {
        let is_slow = random.chance(share);
        if let (Some(gone), Some(signalled)) = (&mut life.gone, life.signalled)
            && gone.signal == Some(15)
            && is_slow
        {
            *gone = Gone {
                at: signalled + 30 * SECOND,
                code: None,
                signal: Some(9),
            };
            history.last = history.last.max(gone.at);
        }
    }
}

/// Writes the logs of a case. Keeps the dumps of some of the ranks, or none.
pub(super) fn write(case: &mut Case, random: &mut Random) {
    let share = *random.pick(&[0.0, 0.0, 0.5, 0.9]);
    let keep: Vec<bool> = case.dumps.iter().map(|_| random.chance(share)).collect();
    let mut kept = keep.iter();
    case.dumps.retain(|_| *kept.next().unwrap_or(&false));
    let mut kept = keep.iter();
    case.names.retain(|_| *kept.next().unwrap_or(&false));
    let mut kept = keep.iter();
    (case.policy.files).retain(|_| *kept.next().unwrap_or(&false));
    if case.dumps.is_empty() {
        // Logs alone are read once the job is over.
        kill_the_slow(&mut case.history, random);
        case.moment = case.history.last + SECOND;
        let moments = vec![case.moment; case.job.world() as usize];
        case.truth = Truth::of(case, &moments);
    }
    let job = &case.job;
    let mut lines = Vec::new();
    let states_size = random.chance(0.4);
    for (rank, life) in (0..).zip(&case.history.lives) {
        let mut writer = RankLines {
            job,
            rank,
            life,
            until: case.moment,
            lines: &mut lines,
        };
        if states_size {
            writer.start();
        }
        writer.exceptions();
        if job.backend == Backend::Nccl {
            writer.watchdog();
        }
    }
    if job.is_launched {
        let torchrun = random.chance(0.5);
        match torchrun {
            true => launcher::torchrun(case, &mut lines),
            false => launcher::srun(case, &mut lines),
        }
    }
    lines.retain(|line| line.at <= case.moment);
    lines.sort_by_key(|line| line.at);
    // One file for all lines, one for each host, or one for each rank and one for the launcher.
    let layout = random.between(0, 2);
    let lost = random.chance(0.2);
    let lost = lost.then(|| random.between(0, u64::from(job.world()) - 1) as Rank);
    let file_of = |line: &Line| match (layout, line.rank) {
        (0, _) => "job.log".to_owned(),
        (1, _) => format!("host{}.log", line.host),
        (_, Some(rank)) => format!("rank_{rank}.log"),
        (_, None) => "launcher.log".to_owned(),
    };
    let mut files: std::collections::BTreeMap<String, String> = std::collections::BTreeMap::new();
    for line in &lines {
        if layout == 2 && line.rank.is_some() && line.rank == lost {
            continue;
        }
        let text = files.entry(file_of(line)).or_default();
        text.push_str(&line.text);
        text.push('\n');
    }
    case.logs = files.into_iter().collect();
}

/// What the analyzer reads from a log; `None` if that is nothing.
pub(in crate::hunt) fn read(name: &str, text: &str) -> Option<rcomm_analyzer::logs::Log> {
    let rank = name.strip_prefix("rank_");
    let rank = rank.and_then(|rest| rest.split('.').next()?.parse().ok());
    let log = log::read(name, rank, text.as_bytes()).ok()?;
    let has_facts = log.facts().next().is_some();
    has_facts.then_some(log)
}

/// The time of day, as `14:13:20`, and the microseconds.
fn clock(at: i64) -> (String, i64) {
    let micros = (START_NS + at) / 1000;
    let second_of_day = micros / 1_000_000 % 86_400;
    let (hours, minutes, seconds) = (
        second_of_day / 3600,
        second_of_day / 60 % 60,
        second_of_day % 60,
    );
    (
        format!("{hours:02}:{minutes:02}:{seconds:02}"),
        micros % 1_000_000,
    )
}

/// Writes the lines of one rank.
struct RankLines<'a> {
    job: &'a Job,
    rank: Rank,
    life: &'a Life,
    until: i64,
    lines: &'a mut Vec<Line>,
}

impl RankLines<'_> {
    fn line(&mut self, at: i64, text: String) {
        let rank = self.rank;
        self.lines.push(Line {
            at,
            host: self.job.host(rank),
            rank: Some(rank),
            text: format!("[rank{rank}]:{text}"),
        });
    }

    fn logged(&mut self, at: i64, level: char, place: &str, text: &str) {
        let (time, micros) = clock(at);
        self.line(
            at,
            format!("[{level}921 {time}.{micros:06}000 {place}] {text}"),
        );
    }

    fn start(&mut self) {
        let (rank, size) = (self.rank, self.job.world());
        let text = format!(
            "[PG ID 0 PG GUID 0 Rank {rank}] ProcessGroupNCCL initialization options: size: {size}, global rank: {rank}, \
             TIMEOUT(ms): {}",
            self.job.timeout_ns / MS
        );
        if self.job.backend == Backend::Nccl {
            self.logged(0, 'I', "ProcessGroupNCCL.cpp:950", &text);
        }
    }

    fn exceptions(&mut self) {
        for (at, phase) in &self.life.phases {
            let Some(error) = phase.strip_prefix("raised ") else {
                continue;
            };
            let failed = self.life.operations.iter();
            let failed = failed.rev().find(|operation| operation.failed == Some(*at));
            let awaited = match failed.map(|operation| operation.call.op) {
                Some(OpType::Send) => "send",
                _ => "recv",
            };
            let error = if error.contains("Timed out") {
                format!(
                    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting {}ms for \
                     {awaited} operation to complete",
                    self.job.timeout_ns / MS
                )
            } else if error.contains("Connection closed") {
                "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer \
                 [10.0.0.7]:28511"
                    .to_owned()
            } else {
                error.to_owned()
            };
            let frame = "   File \"/srv/train.py\", line 310, in step";
            for text in [" Traceback (most recent call last):", frame] {
                self.line(*at, text.to_owned());
            }
            self.line(*at, format!(" {error}"));
        }
    }

    /// The lines of the watchdog: those on the first operation of each group that has timed out; and one on the signal
    /// of another rank, if that made the rank write its dump before any of its own operations had timed out.
    fn watchdog(&mut self) {
        let (job, life) = (self.job, self.life);
        let gone = life.gone.map_or(i64::MAX, |gone| gone.at);
        let until = self.until.min(gone);
        let until = life.stopped.map_or(until, |stopped| stopped.min(until));
        let due = |operation: &Operation| {
            let due = operation.issued + job.timeout_ns;
            let is_pending = operation.ended.is_none_or(|ended| ended > due);
            (is_pending && due <= until).then_some(due)
        };
        let mut has_timed_out = false;
        for group in 0..job.groups.len() {
            let operations = life.operations.iter();
            let mut group_operations = operations.filter(|operation| operation.call.group == group);
            let late = group_operations.find_map(|operation| Some((operation, due(operation)?)));
            let Some((operation, due)) = late else {
                continue;
            };
            has_timed_out |= life.dumped.is_none_or(|dumped| due <= dumped);
            self.timed_out(group, operation, due);
        }
        if let Some(dumped) = life
            .dumped
            .filter(|&dumped| dumped <= until && !has_timed_out)
        {
            let (enqueued, completed) = self.progress(0, dumped);
            let text = format!(
                "[PG ID 0 PG GUID 0(default_pg) Rank {}] Received a dump signal due to a collective timeout from  rank \
                 {} and we will try our best to dump the debug info. Last enqueued NCCL work: {enqueued}, last completed \
                 NCCL work: {completed}.This is most likely caused by incorrect usages of collectives",
                self.rank,
                self.rank ^ 1
            );
            self.logged(dumped, 'E', "ProcessGroupNCCL.cpp:1743", &text);
        }
    }

    fn timed_out(&mut self, group: usize, operation: &Operation, due: i64) {
        let job = self.job;
        let info = &job.groups[group];
        let member = info.ranks.iter().position(|&rank| rank == self.rank);
        let member = member.unwrap_or(0);
        let mut groups = (0..=group).filter(|&other| job.groups[other].ranks.contains(&self.rank));
        let id = groups.by_ref().count() - 1;
        let call = &operation.call;
        let (name, [input, output]) =
            name_and_sizes(call.op, call.elements, info.ranks.len() as u64);
        let timeout = job.timeout_ns / MS;
        let number = operation.number;
        let text = format!(
            "[Rank {member}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, OpType={name}, \
             NumelIn={input}, NumelOut={output}, Timeout(ms)={timeout}) ran for {} milliseconds before timing out.",
            timeout + 33
        );
        self.logged(due, 'E', "ProcessGroupNCCL.cpp:632", &text);
        let (enqueued, completed) = self.progress(group, due);
        let text = format!(
            "[PG ID {id} PG GUID {}({}) Rank {member}] failure detected by watchdog at work sequence id: {number} PG \
             status: last enqueued work: {enqueued}, last completed work: {completed}",
            info.name, info.purpose
        );
        self.logged(due + MS, 'E', "ProcessGroupNCCL.cpp:2268", &text);
    }

    /// The numbers of the newest collectives of a group that the rank had issued, and that had completed; -1 for none.
    fn progress(&self, group: usize, at: i64) -> (i64, i64) {
        let collectives = self.life.operations.iter().filter(|operation| {
            operation.call.group == group && operation.call.peer.is_none() && operation.issued <= at
        });
        let newest = |is_done: bool| {
            let numbers = collectives
                .clone()
                .filter(|operation| !is_done || operation.ended.is_some_and(|ended| ended <= at));
            let numbers = numbers.map(|operation| operation.number as i64);
            numbers.max().unwrap_or(-1)
        };
        (newest(false), newest(true))
    }
}

/// The name that `WorkNCCL` has for an operation, and how many elements that takes and returns on each rank.
fn name_and_sizes(op: OpType, elements: u64, members: u64) -> (&'static str, [u64; 2]) {
    let name = match op {
        OpType::AllGatherSingle => "_ALLGATHER_BASE",
        OpType::ReduceScatterSingle => "_REDUCE_SCATTER_BASE",
        OpType::Broadcast => "BROADCAST",
        OpType::Send => "SEND",
        OpType::Recv => "RECV",
        // A barrier is an all_reduce of one element.
        OpType::Barrier => return ("ALLREDUCE", [1, 1]),
        _ => "ALLREDUCE",
    };
    (name, sizes(op, elements, members))
}
