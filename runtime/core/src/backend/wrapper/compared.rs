//! What becomes of an issued collective: first in the comparison, then in the wrapped backend.

use super::crossing::Crossings;
use super::statement::compare;
use crate::backend::{Backend, Call, Observer, Pending, Progress, Stream};
use crate::op::Op;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::Rank;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The members of the group, where they issued their newest operations, and the collectives that are compared.
pub(super) struct Comparison {
    ranks: Arc<[Rank]>,
    crossings: Mutex<Crossings>,
    line: Mutex<Line>,
}

/// The collectives that the wrapped backend does not have yet.
#[derive(Default)]
struct Line {
    /// In the order of their turns ([`Call::turn`]).
    ops: VecDeque<Arc<ComparedOp>>,
    /// Whether a thread passes collectives on.
    is_passing: bool,
    /// Whether a comparison may have ended since that thread last looked.
    looks_again: bool,
}

impl Comparison {
    /// For a group of these ranks.
    pub(super) fn new(ranks: &[Rank]) -> Self {
        Self {
            ranks: ranks.into(),
            crossings: Mutex::default(),
            line: Mutex::default(),
        }
    }

    /// Number of ranks.
    pub(super) fn size(&self) -> usize {
        self.ranks.len()
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a collective at the end of the line; its comparison is not issued yet. Call it in order of turns, one at a
    /// time.
    pub(super) fn begin(
        self: &Arc<Self>,
        op: Op<'static>,
        call: Call,
        observer: Arc<dyn Observer>,
        inner: &Arc<dyn Backend>,
    ) -> Arc<ComparedOp> {
        let compared_op = Arc::new(ComparedOp {
            stage: Mutex::new(CheckStage::Comparing { op, side: None }),
            stage_changed: Condvar::new(),
            inner: inner.clone(),
            comparison: self.clone(),
            call,
            observer: Mutex::new(Some(observer)),
        });
        self.line().ops.push_back(compared_op.clone());
        compared_op
    }

    /// Takes a collective out of the line whose comparison could not be issued.
    pub(super) fn withdraw(&self, compared_op: &Arc<ComparedOp>) {
        self.line().ops.retain(|op| !Arc::ptr_eq(op, compared_op));
    }

    /// Passes the collectives whose comparison has ended to the wrapped backend. The side group ends comparisons in
    /// the order of their turns, but several threads may see that. One of them passes all on, so that the wrapped
    /// backend gets the collectives in this order, too; the others return at once.
    fn pass_on(&self) {
        let mut line = self.line();
        line.looks_again = true;
        if line.is_passing {
            return;
        }
        line.is_passing = true;
        while std::mem::take(&mut line.looks_again) {
            while let Some(first) = line.ops.front().cloned() {
                drop(line);
                let has_passed = first.pass();
                line = self.line();
                if !has_passed {
                    break;
                }
                line.ops.pop_front();
            }
        }
        line.is_passing = false;
    }

    /// The result of the comparison of collective `seq`.
    pub(super) fn compare_gathered(&self, seq: u64, gathered: Option<Op<'_>>) -> Result<()> {
        let Some(Op::AllGatherSingle { output, .. }) = gathered else {
            return Err(Error::new(
                ErrorKind::Backend,
                "the backend over which the ranks compare operations did not return the buffers of a comparison",
            ));
        };
        let sites = compare(output.as_bytes()?, &self.ranks)?;
        let mut crossings = self
            .crossings
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(warning) = crossings.observe(seq, sites, &self.ranks) {
            tracing::warn!("{warning}");
        }
        Ok(())
    }
}

/// An error of the side group, with the fact that it comes from a comparison.
pub(super) fn while_comparing(error: Error) -> Error {
    error.with_more("found while the ranks compared what they were about to do")
}

/// An issued collective.
pub(super) struct ComparedOp {
    stage: Mutex<CheckStage>,
    stage_changed: Condvar,
    inner: Arc<dyn Backend>,
    comparison: Arc<Comparison>,
    call: Call,
    /// Taken when the operation is passed on or refused, since the observer holds this `ComparedOp` and the cycle
    /// would leak both.
    observer: Mutex<Option<Arc<dyn Observer>>>,
}

/// How far a [`ComparedOp`] is.
enum CheckStage {
    /// The comparison runs; `side` is `Some` once it was issued.
    Comparing {
        op: Op<'static>,
        side: Option<Arc<dyn Pending>>,
    },
    /// The operation is being passed to the wrapped backend.
    Passing,
    /// The wrapped backend has the operation.
    Passed(Arc<dyn Pending>),
    /// Refused; holds the operation until it is reclaimed.
    Refused(Error, Option<Op<'static>>),
}

impl ComparedOp {
    fn lock(&self) -> MutexGuard<'_, CheckStage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the operation of the side group that compares this one.
    pub(super) fn compared_by(&self, side_op: Arc<dyn Pending>) {
        if let CheckStage::Comparing { side, .. } = &mut *self.lock() {
            *side = Some(side_op);
        }
        // The comparison may have ended before.
        self.comparison.pass_on();
    }

    /// Passes the operation on if its comparison has ended; returns whether it has. Only the thread that passes
    /// operations on calls this.
    fn pass(&self) -> bool {
        let mut stage = self.lock();
        let CheckStage::Comparing {
            side: Some(side), ..
        } = &*stage
        else {
            return false;
        };
        let outcome = match side.progress() {
            Progress::Queued | Progress::Started => return false,
            Progress::Completed(_) => self
                .comparison
                .compare_gathered(self.call.seq, side.reclaim()),
            Progress::Failed(error) => Err(while_comparing(error)),
        };
        let CheckStage::Comparing { op, .. } = std::mem::replace(&mut *stage, CheckStage::Passing)
        else {
            return true;
        };
        // The backend may call the observer at once, and the observer takes this lock to read the progress.
        drop(stage);
        let observer = self.observer.lock();
        let Some(observer) = observer.unwrap_or_else(PoisonError::into_inner).take() else {
            return true;
        };
        let next = match outcome {
            Err(error) => CheckStage::Refused(error, Some(op)),
            Ok(()) => match self.inner.issue(op, self.call.clone(), observer.clone()) {
                Ok(pending) => CheckStage::Passed(pending),
                Err(error) => CheckStage::Refused(error, None),
            },
        };
        *self.lock() = next;
        self.stage_changed.notify_all();
        // While the operation was being passed on, the observer could not see an end that the backend reported.
        if self.state().has_ended() {
            observer.ended();
        }
        true
    }

    /// How far the operation is, without a look at its comparison.
    fn state(&self) -> Progress {
        match &*self.lock() {
            CheckStage::Comparing { .. } | CheckStage::Passing => Progress::Queued,
            CheckStage::Passed(pending) => pending.progress(),
            CheckStage::Refused(error, _) => Progress::Failed(error.clone()),
        }
    }
}

impl Observer for ComparedOp {
    fn started(&self) {}

    fn ended(&self) {
        self.comparison.pass_on();
    }
}

impl Pending for ComparedOp {
    fn progress(&self) -> Progress {
        self.comparison.pass_on();
        self.state()
    }

    fn wait(&self, deadline: Deadline) -> Progress {
        let deadline = deadline.started();
        let side = match &*self.lock() {
            CheckStage::Comparing { side, .. } => side.clone(),
            CheckStage::Passing | CheckStage::Passed(_) | CheckStage::Refused(..) => None,
        };
        if let Some(side) = side {
            // A backend need not call its observer: only this wait is sure to end with the comparison.
            side.wait(deadline);
            self.comparison.pass_on();
        }
        // Another thread may be passing operations on.
        let stage = self.lock();
        let waited = self
            .stage_changed
            .wait_timeout_while(stage, deadline.remaining(), |stage| {
                matches!(stage, CheckStage::Comparing { .. } | CheckStage::Passing)
            });
        let (stage, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let pending = match &*stage {
            CheckStage::Comparing { .. } | CheckStage::Passing => return Progress::Queued,
            CheckStage::Refused(error, _) => return Progress::Failed(error.clone()),
            CheckStage::Passed(pending) => pending.clone(),
        };
        drop(stage);
        pending.wait(deadline)
    }

    /// Blocks the host until the comparison has ended, or the operation's deadline has passed (`Timeout`). A stream can
    /// wait only for an operation that the wrapped backend has, and the backend gets it after the comparison.
    fn wait_stream(&self, stream: &dyn Stream) -> Result<()> {
        loop {
            self.comparison.pass_on();
            match &*self.lock() {
                CheckStage::Passed(pending) => return pending.wait_stream(stream),
                CheckStage::Refused(error, _) => return Err(error.clone()),
                CheckStage::Comparing { .. } | CheckStage::Passing => {}
            }
            if self.call.deadline.has_passed() {
                let message =
                    "the ranks did not finish comparing the operation before its deadline";
                return Err(Error::new(ErrorKind::Timeout, message));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn reclaim(&self) -> Option<Op<'static>> {
        match &mut *self.lock() {
            CheckStage::Passed(pending) => pending.reclaim(),
            CheckStage::Refused(_, op) => op.take(),
            CheckStage::Comparing { .. } | CheckStage::Passing => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Wrapper;
    use super::*;
    use crate::backend::{AbortReason, Done};
    use crate::config::NanCheck;
    use crate::op::hints::Hints;
    use std::sync::mpsc;

    /// No test waits longer than this.
    const LONG: Duration = Duration::from_secs(60);

    /// An operation that the test ends.
    struct ByHand {
        progress: Mutex<Progress>,
        op: Mutex<Option<Op<'static>>>,
        observer: Arc<dyn Observer>,
    }

    impl ByHand {
        /// The comparison of the only rank of a group ends.
        fn complete_comparison(&self) {
            let mut op = self.op.lock().unwrap();
            let Some(Op::AllGatherSingle { input, output }) = &mut *op else {
                panic!("a comparison is an all_gather");
            };
            output.copy_from(input).unwrap();
            *self.progress.lock().unwrap() = Progress::Completed(Done::default());
        }
    }

    impl Pending for ByHand {
        fn progress(&self) -> Progress {
            self.progress.lock().unwrap().clone()
        }

        fn wait(&self, _: Deadline) -> Progress {
            self.progress()
        }

        fn reclaim(&self) -> Option<Op<'static>> {
            self.op.lock().unwrap().take()
        }
    }

    /// Keeps what is issued.
    struct Keeper {
        issued: Mutex<Vec<Arc<ByHand>>>,
        turns: Mutex<Vec<u64>>,
        /// If set, `issue` says that it was called, and waits, in turn 1.
        hold: Option<(mpsc::Sender<()>, Mutex<mpsc::Receiver<()>>)>,
    }

    impl Keeper {
        fn new(hold: Option<(mpsc::Sender<()>, Mutex<mpsc::Receiver<()>>)>) -> Arc<Self> {
            Arc::new(Self {
                issued: Mutex::default(),
                turns: Mutex::default(),
                hold,
            })
        }

        fn turns(&self) -> Vec<u64> {
            self.turns.lock().unwrap().clone()
        }
    }

    impl Backend for Keeper {
        fn name(&self) -> &'static str {
            "keeper"
        }

        fn issue(
            &self,
            op: Op<'static>,
            call: Call,
            observer: Arc<dyn Observer>,
        ) -> Result<Arc<dyn Pending>> {
            if let (1, Some((entered, go_on))) = (call.turn, &self.hold) {
                entered.send(()).unwrap();
                go_on.lock().unwrap().recv_timeout(LONG).unwrap();
            }
            self.turns.lock().unwrap().push(call.turn);
            let issued = Arc::new(ByHand {
                progress: Mutex::new(Progress::Queued),
                op: Mutex::new(Some(op)),
                observer,
            });
            self.issued.lock().unwrap().push(issued.clone());
            Ok(issued)
        }

        fn abort(&self, _: &AbortReason) {}

        fn shutdown(&self, _: Deadline) -> Result<()> {
            Ok(())
        }
    }

    struct NoObserver;

    impl Observer for NoObserver {
        fn started(&self) {}

        fn ended(&self) {}
    }

    #[test]
    fn collectives_are_passed_on_in_order_although_two_threads_see_that_comparisons_ended() {
        let (entered, is_entered) = mpsc::channel();
        let (goes_on, go_on) = mpsc::channel();
        let inner = Keeper::new(Some((entered, Mutex::new(go_on))));
        let side = Keeper::new(None);
        let wrapper = Wrapper::new(inner.clone(), side.clone(), &[0], NanCheck::Off);
        let issue = |turn: u64| {
            let call = Call {
                seq: turn,
                turn,
                deadline: Deadline::In(LONG),
                hints: Hints::default(),
            };
            let issued = wrapper.issue(Op::Barrier, call, Arc::new(NoObserver));
            issued.unwrap()
        };
        let (first, second) = (issue(1), issue(2));
        let comparisons = side.issued.lock().unwrap().clone();
        comparisons[0].complete_comparison();
        std::thread::scope(|scope| {
            // A thread of the program looks at the first operation before the side group calls its observer.
            let looks = scope.spawn(|| first.progress());
            is_entered.recv_timeout(LONG).unwrap();
            comparisons[0].observer.ended();
            comparisons[1].complete_comparison();
            comparisons[1].observer.ended();
            assert_eq!(
                inner.turns(),
                [0; 0],
                "the first operation is being passed on"
            );
            let waits = scope.spawn(|| second.wait(Deadline::In(LONG)));
            goes_on.send(()).unwrap();
            for thread in [looks, waits] {
                assert!(matches!(thread.join().unwrap(), Progress::Queued));
            }
        });
        assert_eq!(inner.turns(), [1, 2]);
    }
}
