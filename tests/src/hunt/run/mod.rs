//! Runs the programs of a job against a clock: who waits for whom, what a fault does to the others, and how processes
//! end. Nothing of the analysis is used here: what happens is known before anything is judged.

mod ends;
mod state;

use super::job::{Backend, Fault, Job, MS, SECOND, Wrong};
use super::program::{Act, Call};
use crate::generator::Random;
use rcomm_recorder::model::{FailureKind, Rank};
use state::{Event, Host, Key, Meeting, Runner, Task};
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap, VecDeque};

/// An operation of a rank, with its times in ns since the start of the job.
#[derive(Clone, Debug)]
pub(super) struct Operation {
    pub(super) call: Call,
    /// When the host issued it.
    pub(super) issued: i64,
    /// When the rank was ready for it: its device, if there is one.
    pub(super) begun: Option<i64>,
    /// When it ended on this rank.
    pub(super) ended: Option<i64>,
    /// When it failed on this rank.
    pub(super) failed: Option<i64>,
    /// The number among the collectives, or the messages, of its group on this rank, from 1.
    pub(super) number: u64,
    key: Key,
}

/// A failure that rcomm's runtime records.
#[derive(Clone, Debug)]
pub(super) struct Noted {
    pub(super) at: i64,
    pub(super) kind: FailureKind,
    pub(super) ranks: Vec<Rank>,
    /// The index of the operation.
    pub(super) operation: usize,
}

/// How a process ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gone {
    pub(super) at: i64,
    pub(super) code: Option<i32>,
    pub(super) signal: Option<i32>,
}

/// What happened to one rank.
#[derive(Clone, Debug, Default)]
pub(super) struct Life {
    pub(super) operations: Vec<Operation>,
    /// When SIGSTOP stopped its process.
    pub(super) stopped: Option<i64>,
    pub(super) gone: Option<Gone>,
    /// When the launcher sent SIGTERM.
    pub(super) signalled: Option<i64>,
    /// The phases that the recorder for PyTorch notes, with when each began.
    pub(super) phases: Vec<(i64, String)>,
    /// The steps of its program, with when each began.
    pub(super) steps: Vec<(i64, u32)>,
    pub(super) failures: Vec<Noted>,
    /// When it wrote a dump by itself: at a time-out, or with rcomm's runtime at any failure.
    pub(super) dumped: Option<i64>,
}

/// What happened in a job, with times in ns since its start.
#[derive(Clone, Debug)]
pub(super) struct History {
    pub(super) lives: Vec<Life>,
    /// When each fault struck; `None` if it did not.
    pub(super) struck: Vec<Option<i64>>,
    /// When the launcher was asked to end the job.
    pub(super) asked: Option<i64>,
    /// When the last event happened.
    pub(super) last: i64,
}

/// A job that runs.
struct Run<'a> {
    job: &'a Job,
    random: Random,
    runners: Vec<Runner>,
    lives: Vec<Life>,
    faults: &'a [Fault],
    /// When each fault struck; `None` if it has not yet.
    struck: Vec<Option<i64>>,
    meetings: HashMap<Key, Meeting>,
    /// What will happen: the time, the number of the event, and the event.
    events: BinaryHeap<Reverse<(i64, u64, Event)>>,
    /// The number of events so far, by which events of the same time are ordered.
    event_count: u64,
    /// The ranks whose processes have failed, as their peers notice it. Unused with NCCL.
    gone: BTreeSet<Rank>,
    /// Whether the launcher ends the job, or will.
    launcher_acts: bool,
    /// Whether an operation has timed out, so that all ranks write dumps. Used with NCCL only.
    dumps: bool,
    /// When the launcher was asked to end the job.
    asked: Option<i64>,
}

/// Runs the programs, until nothing more happens.
pub(super) fn run(
    job: &Job,
    programs: Vec<Vec<Act>>,
    faults: &[Fault],
    asked: Option<i64>,
    random: &mut Random,
) -> History {
    let runner = |acts| Runner {
        acts,
        next: 0,
        host: Host::Runs,
        tasks: VecDeque::new(),
        is_busy: false,
        open: Vec::new(),
        counts: HashMap::new(),
        numbers: HashMap::new(),
        ends: HashMap::new(),
    };
    let mut run = Run {
        job,
        random: Random::new(random.draw()),
        runners: programs.into_iter().map(runner).collect(),
        lives: vec![Life::default(); job.world() as usize],
        faults,
        struck: vec![None; faults.len()],
        meetings: HashMap::new(),
        events: BinaryHeap::new(),
        event_count: 0,
        gone: BTreeSet::new(),
        launcher_acts: false,
        dumps: false,
        asked: None,
    };
    for rank in 0..job.world() {
        let at = run.random.between(0, 300) as i64 * MS;
        run.at(at, Event::Host(rank));
    }
    if let Some(asked) = asked {
        run.at(asked, Event::Asked);
    }
    let mut last = 0;
    while let Some(Reverse((at, _, event))) = run.events.pop() {
        if run.happens(at, event) {
            last = at;
        }
    }
    History {
        lives: run.lives,
        struck: run.struck,
        asked: run.asked,
        last,
    }
}

impl Run<'_> {
    /// Lets an event happen at this time.
    fn at(&mut self, at: i64, event: Event) {
        self.event_count += 1;
        self.events.push(Reverse((at, self.event_count, event)));
    }

    /// A random time from `low_us` to `high_us` microseconds after `at`.
    fn soon(&mut self, at: i64, low_us: u64, high_us: u64) -> i64 {
        at + self.random.between(low_us, high_us) as i64 * 1000
    }

    fn is_gone(&self, rank: Rank) -> bool {
        self.lives[rank as usize].gone.is_some()
    }

    /// Whether the process of a rank can act.
    fn can_act(&self, rank: Rank) -> bool {
        let life = &self.lives[rank as usize];
        life.gone.is_none() && life.stopped.is_none()
    }

    /// Carries an event out at this time; returns whether it counts as having happened.
    fn happens(&mut self, at: i64, event: Event) -> bool {
        match event {
            Event::Host(rank) => {
                if self.can_act(rank) && self.runners[rank as usize].host == Host::Runs {
                    self.host(rank, at);
                }
            }
            Event::Device(rank) => {
                if !self.is_gone(rank) {
                    self.runners[rank as usize].is_busy = false;
                    self.device(rank, at);
                }
            }
            Event::Done(key) => return self.done(key, at),
            Event::TimeOut(rank, operation) => return self.time_out(rank, operation, at),
            Event::Lost(rank, operation, gone) => return self.lose(rank, operation, gone, at),
            Event::Stop(rank) => {
                if self.can_act(rank) {
                    self.lives[rank as usize].stopped = Some(at);
                }
            }
            Event::Kill(rank) => self.ends(rank, at, None, Some(9)),
            Event::Exit(rank) => self.ends(rank, at, Some(1), None),
            Event::Abort(rank) => {
                if self.can_act(rank) {
                    self.ends(rank, at, None, Some(6));
                }
            }
            Event::Launcher => self.end_all(at),
            Event::Refuse(key) => self.refuse(key, at),
            Event::Asked => {
                let is_over = (0..self.job.world()).all(|rank| self.is_gone(rank));
                if is_over {
                    return false;
                }
                self.asked = Some(at);
                self.end_all(at);
            }
            Event::Terminate(rank) => {
                // A stopped process does not end by SIGTERM.
                if self.can_act(rank) {
                    self.ends(rank, at, None, Some(15));
                } else if !self.is_gone(rank) {
                    self.at(at + 10 * SECOND, Event::Kill(rank));
                }
            }
        }
        true
    }

    /// Carries out a rank's program from this time on, until the host waits or its next act is later.
    fn host(&mut self, rank: Rank, mut at: i64) {
        let index = rank as usize;
        let has_device = self.job.backend == Backend::Nccl;
        loop {
            let runner = &mut self.runners[index];
            let Some(act) = runner.acts.get(runner.next).cloned() else {
                runner.host = Host::Over;
                let at = self.soon(at, 1_000, 400_000);
                self.ends(rank, at, Some(0), None);
                return;
            };
            match act {
                Act::Step(step) => self.lives[index].steps.push((at, step)),
                Act::Load(ns) => {
                    runner.next += 1;
                    let phases = &mut self.lives[index].phases;
                    phases.push((at, "in next() of the data loader".into()));
                    phases.push((at + ns, String::new()));
                    return self.at(at + ns, Event::Host(rank));
                }
                Act::Compute(ns) if has_device => {
                    runner.tasks.push_back(Task::Compute(ns));
                    runner.next += 1;
                    self.device(rank, at);
                    return self.at(at + ns / 20, Event::Host(rank));
                }
                Act::Compute(ns) => {
                    runner.next += 1;
                    return self.at(at + ns, Event::Host(rank));
                }
                Act::Issue(call) => {
                    let operation = self.issue(rank, call, at);
                    let runner = &mut self.runners[index];
                    runner.next += 1;
                    let waits = self.lives[index].operations[operation].call.waits;
                    if !waits {
                        runner.open.push(operation);
                    }
                    if has_device {
                        runner.tasks.push_back(Task::Begin(operation));
                        if waits {
                            runner.tasks.push_back(Task::Await(operation));
                        }
                        self.device(rank, at);
                    } else {
                        self.begin(rank, operation, at);
                        if waits && !self.has_ended(rank, operation, at) {
                            self.runners[index].host = Host::Waits(operation);
                            return;
                        }
                    }
                    at += 20_000;
                    return self.at(at, Event::Host(rank));
                }
                Act::Join => {
                    let open = std::mem::take(&mut runner.open);
                    if has_device {
                        runner.tasks.extend(open.into_iter().map(Task::Await));
                        self.device(rank, at);
                    } else if let Some(&first) = open
                        .iter()
                        .find(|&&operation| !self.has_ended(rank, operation, at))
                    {
                        let runner = &mut self.runners[index];
                        runner.open = open;
                        runner.host = Host::Waits(first);
                        return;
                    }
                }
                Act::Sync if has_device => {
                    if runner.is_busy || !runner.tasks.is_empty() {
                        runner.host = Host::Syncs;
                        return;
                    }
                }
                Act::Sync => {}
                Act::Strike(fault) => {
                    runner.next += 1;
                    self.struck[fault] = Some(at);
                    let wrong = self.faults[fault].wrong;
                    match wrong {
                        Wrong::Hangs => {
                            runner.host = Host::Over;
                            return;
                        }
                        Wrong::DeviceHangs => runner.tasks.push_back(Task::Hang),
                        Wrong::Stopped | Wrong::Killed => {
                            let then = self.soon(at, 0, 20_000);
                            self.struck[fault] = Some(then);
                            self.at(
                                then,
                                match wrong {
                                    Wrong::Stopped => Event::Stop(rank),
                                    _ => Event::Kill(rank),
                                },
                            );
                        }
                        Wrong::Raises => {
                            return self.raise(rank, "raised ValueError: bad batch", at);
                        }
                        _ => {}
                    }
                    continue;
                }
            }
            self.runners[index].next += 1;
        }
    }

    /// Carries out the tasks of a rank's device, until it computes or waits.
    fn device(&mut self, rank: Rank, at: i64) {
        let index = rank as usize;
        while !self.runners[index].is_busy {
            match self.runners[index].tasks.front().copied() {
                None => {
                    if self.runners[index].host == Host::Syncs {
                        self.runners[index].host = Host::Runs;
                        self.at(at + 10_000, Event::Host(rank));
                    }
                    return;
                }
                Some(Task::Compute(ns)) => {
                    self.runners[index].is_busy = true;
                    self.at(at + ns, Event::Device(rank));
                }
                Some(Task::Begin(operation)) => self.begin(rank, operation, at),
                Some(Task::Await(operation)) if self.has_ended(rank, operation, at) => {}
                Some(Task::Await(_) | Task::Hang) => return,
            }
            self.runners[index].tasks.pop_front();
        }
    }

    fn has_ended(&self, rank: Rank, operation: usize, at: i64) -> bool {
        let ended = self.lives[rank as usize].operations[operation].ended;
        ended.is_some_and(|ended| ended <= at)
    }

    fn issue(&mut self, rank: Rank, call: Call, at: i64) -> usize {
        let runner = &mut self.runners[rank as usize];
        let number = runner
            .counts
            .entry((call.group, call.peer.is_some()))
            .or_default();
        *number += 1;
        let nth = *number;
        let number = runner.numbers.entry((call.group, call.peer.is_some()));
        let number = number.or_default();
        *number += u64::from(call.part.is_none_or(|part| part.is_first));
        let number = *number;
        let key = match call.peer {
            None => (call.group, None, nth),
            Some(peer) => {
                let members = &self.job.groups[call.group].ranks;
                let member = members.iter().position(|&member| member == rank);
                let member = member.unwrap_or(0) as u32;
                let sends = call.op == rcomm_recorder::model::OpType::Send;
                let (from, to) = if sends {
                    (member, peer)
                } else {
                    (peer, member)
                };
                let nth = runner
                    .ends
                    .entry((call.group, from, to, sends))
                    .or_default();
                *nth += 1;
                (call.group, Some((from, to)), *nth)
            }
        };
        let life = &mut self.lives[rank as usize];
        let operation = life.operations.len();
        life.operations.push(Operation {
            call,
            issued: at,
            begun: None,
            ended: None,
            failed: None,
            number,
            key,
        });
        self.at(at + self.job.timeout_ns, Event::TimeOut(rank, operation));
        operation
    }

    /// Notes that a rank has come to an operation.
    fn begin(&mut self, rank: Rank, operation: usize, at: i64) {
        let life = &mut self.lives[rank as usize];
        let op = &mut life.operations[operation];
        op.begun = Some(at);
        let key = op.key;
        let sends = op.call.op == rcomm_recorder::model::OpType::Send;
        if sends && self.job.sends_early {
            op.ended = Some(at);
        }
        self.meetings
            .entry(key)
            .or_default()
            .came
            .insert(rank, (operation, at));
        if self.job.backend != Backend::Nccl {
            let members = self.members(key);
            let lost = members.iter().find(|member| self.gone.contains(member));
            if let Some(&gone) = lost {
                let then = self.soon(at, 300, 8_000);
                self.at(then, Event::Lost(rank, operation, gone));
            }
        }
        self.plan(key);
    }

    /// The ranks that an operation needs.
    fn members(&self, key: Key) -> Vec<Rank> {
        let ranks = &self.job.groups[key.0].ranks;
        match key.1 {
            None => ranks.clone(),
            Some((from, to)) => vec![ranks[from as usize], ranks[to as usize]],
        }
    }

    /// Plans the end of an operation, once all have come to it and agree on it. If they do not agree, rcomm's backend
    /// refuses it soon, and it never ends on another backend.
    fn plan(&mut self, key: Key) {
        let before = (key.0, key.1, key.2 - 1);
        let is_next = key.2 == 1
            || self
                .meetings
                .get(&before)
                .is_some_and(|other| other.is_done);
        let needed = self.members(key).len();
        let Some(meeting) = self.meetings.get(&key) else {
            return;
        };
        if !is_next || meeting.is_planned || meeting.came.len() < needed {
            return;
        }
        let mut calls = meeting.came.iter().map(|(&rank, &(operation, _))| {
            let call = &self.lives[rank as usize].operations[operation].call;
            let op = (key.1.is_none()).then_some(call.op);
            (op, call.elements, call.dtype, call.root)
        });
        let first = calls.next();
        if !calls.all(|call| Some(call) == first) {
            // rcomm's backend compares the calls, and refuses them.
            if self.job.backend == Backend::Cpu {
                let came = meeting.came.values().map(|&(_, at)| at).max().unwrap_or(0);
                let then = self.soon(came, 60, 600);
                self.at(then, Event::Refuse(key));
            }
            return;
        }
        let came = meeting.came.values().map(|&(_, at)| at).max().unwrap_or(0);
        let previous = self.meetings.get(&before);
        let previous = previous.and_then(|other| other.came.values().map(|&(_, at)| at).max());
        let end = self.soon(came.max(previous.unwrap_or(0)), 60, 600);
        if let Some(meeting) = self.meetings.get_mut(&key) {
            meeting.is_planned = true;
        }
        self.at(end, Event::Done(key));
    }

    /// Ends an operation that all have come to; false if one of its ranks can no longer take part.
    fn done(&mut self, key: Key, at: i64) -> bool {
        let members = self.members(key);
        let has_device = self.job.backend == Backend::Nccl;
        let can = |rank: &Rank| match has_device {
            true => !self.is_gone(*rank),
            false => self.can_act(*rank),
        };
        // A send that ended early no longer needs its rank.
        let sender = key.1.filter(|_| self.job.sends_early);
        let sender = sender.map(|(from, _)| self.job.groups[key.0].ranks[from as usize]);
        if !members
            .iter()
            .filter(|&&rank| Some(rank) != sender)
            .all(can)
        {
            return false;
        }
        let came: Vec<(Rank, usize)> = {
            let Some(meeting) = self.meetings.get_mut(&key) else {
                return false;
            };
            meeting.is_done = true;
            let came = meeting.came.iter();
            came.map(|(&rank, &(operation, _))| (rank, operation))
                .collect()
        };
        for (rank, operation) in came {
            let op = &mut self.lives[rank as usize].operations[operation];
            if op.failed.is_some() {
                continue;
            }
            let end = *op.ended.get_or_insert(at);
            let runner = &mut self.runners[rank as usize];
            if let Host::Waits(waited) = runner.host
                && waited == operation
            {
                runner.host = Host::Runs;
                self.at(end.max(at), Event::Host(rank));
            }
            if has_device {
                self.wake_device(rank, end.max(at));
            }
        }
        self.plan((key.0, key.1, key.2 + 1));
        true
    }

    /// Wakes a device that may wait for an operation.
    fn wake_device(&mut self, rank: Rank, at: i64) {
        let runner = &self.runners[rank as usize];
        if !runner.is_busy && matches!(runner.tasks.front(), Some(Task::Await(_))) {
            self.at(at, Event::Device(rank));
        }
    }
}
