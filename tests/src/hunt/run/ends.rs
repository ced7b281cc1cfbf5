//! How operations fail, and how processes end because of that.

use super::{Event, Gone, Host, Key, Noted, Run};
use crate::hunt::job::{Backend, Job, Records};
use rcomm_recorder::model::{FailureKind, Rank};

impl Run<'_> {
    /// Whether an operation of a rank has neither ended nor failed at this time.
    fn is_pending(&self, rank: Rank, operation: usize, at: i64) -> bool {
        let op = &self.lives[rank as usize].operations[operation];
        op.failed.is_none() && !self.has_ended(rank, operation, at)
    }

    /// The time-out of an operation passes: with NCCL all ranks write dumps and abort, with other backends the
    /// operation fails on this rank. Returns false if the operation is not pending, or the rank cannot act.
    pub(super) fn time_out(&mut self, rank: Rank, operation: usize, at: i64) -> bool {
        if !self.can_act(rank) || !self.is_pending(rank, operation, at) {
            return false;
        }
        if self.job.backend == Backend::Nccl {
            if !self.dumps {
                self.dumps = true;
                for other in 0..self.job.world() {
                    if self.can_act(other) {
                        let dumped = self.soon(at, 0, 1_500_000);
                        self.lives[other as usize].dumped = Some(dumped);
                        let aborted = self.soon(dumped, 1_000_000, 8_000_000);
                        self.at(aborted, Event::Abort(other));
                    }
                }
            }
            return true;
        }
        if self.runners[rank as usize].host == Host::Over {
            return false;
        }
        let key = self.lives[rank as usize].operations[operation].key;
        let came = self.meetings.get(&key).map(|meeting| meeting.came.clone());
        let came = came.unwrap_or_default();
        let mut missing = self.members(key);
        missing.retain(|member| !came.contains_key(member));
        self.fail(rank, operation, FailureKind::Timeout, missing, at);
        self.raise(
            rank,
            "raised RuntimeError: Timed out waiting for 30000ms",
            at,
        );
        true
    }

    /// An operation of a rank fails, because the process of the rank `gone` has ended. Returns false as for a time-out.
    pub(super) fn lose(&mut self, rank: Rank, operation: usize, gone: Rank, at: i64) -> bool {
        if !self.can_act(rank)
            || !self.is_pending(rank, operation, at)
            || self.runners[rank as usize].host == Host::Over
        {
            return false;
        }
        self.fail(rank, operation, FailureKind::PeerGone, vec![gone], at);
        self.raise(
            rank,
            "raised RuntimeError: Connection closed by peer [127.0.0.1]:4711",
            at,
        );
        true
    }

    /// The members of an operation have compared their calls, which differ: each names the first member whose call is
    /// not its own.
    pub(super) fn refuse(&mut self, key: Key, at: i64) {
        let Some(meeting) = self.meetings.get(&key) else {
            return;
        };
        let came = meeting.came.iter().map(|(&rank, &(operation, _))| {
            let call = &self.lives[rank as usize].operations[operation].call;
            let call = (call.op, call.elements, call.dtype, call.root);
            (rank, operation, call)
        });
        let came: Vec<_> = came.collect();
        for &(rank, operation, call) in &came {
            if !self.can_act(rank) || !self.is_pending(rank, operation, at) {
                continue;
            }
            let other = came.iter().find(|(_, _, other)| *other != call);
            let named = other.map(|&(other, ..)| other).into_iter().collect();
            self.fail(rank, operation, FailureKind::Mismatch, named, at);
            self.raise(
                rank,
                "raised RuntimeError: the calls of the ranks differ",
                at,
            );
        }
    }

    /// Records that an operation has failed on a rank, with an error that names `ranks`.
    fn fail(&mut self, rank: Rank, operation: usize, kind: FailureKind, ranks: Vec<Rank>, at: i64) {
        let life = &mut self.lives[rank as usize];
        life.operations[operation].failed = Some(at);
        life.failures.push(Noted {
            at,
            kind,
            ranks,
            operation,
        });
    }

    /// The program of a rank ends by an exception, which the recorder notes as this phase; its process exits soon
    /// after.
    pub(super) fn raise(&mut self, rank: Rank, text: &str, at: i64) {
        let life = &mut self.lives[rank as usize];
        life.phases.push((at, text.to_owned()));
        self.runners[rank as usize].host = Host::Over;
        let then = self.soon(at, 10_000, 1_200_000);
        self.at(then, Event::Exit(rank));
    }

    /// The process of a rank ends, with this exit code or by this signal. Unless the code is 0, its peers lose their
    /// operations with it, if the backend is not NCCL, and the launcher, if there is one, ends the job.
    pub(super) fn ends(&mut self, rank: Rank, at: i64, code: Option<i32>, signal: Option<i32>) {
        if self.is_gone(rank) {
            return;
        }
        if code == Some(1) && !self.can_act(rank) {
            return;
        }
        self.lives[rank as usize].gone = Some(Gone { at, code, signal });
        let failed = code != Some(0);
        // An end with code 0 is entered before its time has come, so no peer may notice it yet.
        if self.job.backend != Backend::Nccl && failed {
            self.gone.insert(rank);
            for other in 0..self.job.world() {
                if !self.can_act(other) {
                    continue;
                }
                let pending: Vec<usize> = (0..self.lives[other as usize].operations.len())
                    .rev()
                    .take(64)
                    .filter(|&operation| self.is_pending(other, operation, at))
                    .filter(|&operation| {
                        let key = self.lives[other as usize].operations[operation].key;
                        self.members(key).contains(&rank)
                    })
                    .collect();
                if let Some(&first) = pending.last() {
                    let then = self.soon(at, 500, 60_000);
                    self.at(then, Event::Lost(other, first, rank));
                }
            }
        }
        if failed && self.job.is_launched && !self.launcher_acts && self.asked.is_none() {
            self.launcher_acts = true;
            let then = self.soon(at, 20_000, 3_000_000);
            self.at(then, Event::Launcher);
        }
    }

    /// The launcher sends SIGTERM to all processes that are left.
    pub(super) fn end_all(&mut self, at: i64) {
        self.launcher_acts = true;
        for rank in 0..self.job.world() {
            if !self.is_gone(rank) {
                self.lives[rank as usize].signalled = Some(at);
                let then = self.soon(at, 200, 12_000);
                self.at(then, Event::Terminate(rank));
            }
        }
    }
}

impl Job {
    /// Whether the processes note how they end, as the recorder for PyTorch does.
    pub(in crate::hunt) fn notes_exits(&self) -> bool {
        self.backend != Backend::Cpu && self.records == Records::Rings
    }
}
