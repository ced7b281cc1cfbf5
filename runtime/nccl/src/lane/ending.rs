//! How a lane ends: closed with the others, or stopped alone; and what becomes of buffers that the device
//! may still hold by then.

use super::{Lane, Stage};
use crate::Shared;
use crate::comm::Comm;
use crate::event::Mark;
use crate::rally::Scope;
use rcomm_core::Deadline;
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::OpType;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

/// How a communicator ends before its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// What is pending is stopped; another can be made of what is left, where the library can do that.
    Stopped,
    /// Nothing is stopped: the library keeps it as it is.
    Forsaken,
}

/// Memory of an operation that nobody waits for any more, until the device is through with it.
pub(super) struct Remains {
    op: OpType,
    memory: Box<dyn Send>,
    end: Arc<Mark>,
}

impl Lane {
    /// How long the device may take to let go of what was stopped.
    const CLEAN_UP: Duration = Duration::from_secs(5);

    /// Keeps the buffers of an operation that nobody waits for until the device is through with them.
    pub(crate) fn keep(&self, op: OpType, memory: Box<dyn Send>, end: impl Into<Arc<Mark>>) {
        let end = end.into();
        self.remains().push(Remains { op, memory, end });
    }

    fn remains(&self) -> MutexGuard<'_, Vec<Remains>> {
        self.remains.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees what the device is through with; says whether anything is left.
    pub(super) fn sweep(&self) -> bool {
        self.shared.device.free_aside();
        let mut remains = self.remains();
        if remains.is_empty() {
            return true;
        }
        match self.shared.device.enter() {
            // What cannot be asked about stays.
            Ok(_entered) => remains.retain(|it| !matches!(it.end.is_done(), Ok(true))),
            Err(error) => tracing::warn!(%error, "buffers of aborted operations stay"),
        }
        remains.is_empty()
    }

    /// Ends the communicator on this rank, and waits a little for the device to let go of buffers.
    ///
    /// # Blocking
    /// Until the library has stopped its kernels, which it may never.
    pub(crate) fn end(&self, ending: Ending) {
        if let Some(comm) = self.comm.get()
            && let Err(error) = self.end_comm(comm, ending)
        {
            tracing::warn!(%error, "a communicator could not be ended");
        }
        if let Some(error) = self.shared.aborted.get() {
            self.break_off(error);
        }
        if ending == Ending::Forsaken {
            return;
        }
        let deadline = Deadline::In(Self::CLEAN_UP).started();
        while !self.sweep() && !deadline.has_passed() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Fails what waits for the ranks to join. Where a call that never returns holds the door, those who
    /// look at their operations find the group aborted.
    fn break_off(&self, error: &Error) {
        let Ok(mut door) = self.enter(Deadline::In(Self::CLEAN_UP)) else {
            return;
        };
        for ticket in door.queue.drain(..) {
            ticket.fail(error.clone());
        }
        // One that has not joined yet is aborted as it is dropped.
        door.stage = Stage::Broken(error.clone());
    }

    fn end_comm(&self, comm: &Comm, ending: Ending) -> Result<()> {
        if ending == Ending::Forsaken {
            return Ok(());
        }
        let _entered = self.shared.device.enter()?;
        let can_shrink = self.shared.library.table().comm_shrink.is_some();
        if self.scope == Scope::Group && can_shrink {
            match self.revoke(comm) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Unsupported => {}
                Err(error) => {
                    tracing::warn!(%error, "a communicator could not be revoked: it is aborted");
                }
            }
        }
        comm.abort()
    }

    fn revoke(&self, comm: &Comm) -> Result<()> {
        comm.revoke()?;
        let deadline = Deadline::In(Self::CLEAN_UP).started();
        while !comm.is_ready()? {
            if deadline.has_passed() {
                let message = "the library did not stop what was pending";
                return Err(Error::new(ErrorKind::Timeout, message));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Waits until everything submitted has ended.
    ///
    /// # Errors
    /// `Timeout` if something is still under way then; what has failed is the error of its operation.
    pub(crate) fn drain(&self, deadline: Deadline) -> Result<()> {
        let deadline = deadline.started();
        let late = || {
            Error::new(
                ErrorKind::Timeout,
                "operations are still under way on the device",
            )
        };
        let mut pause = Duration::from_micros(20);
        let mut wait = || {
            if deadline.has_passed() {
                return Err(late());
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
            Ok(())
        };
        while !self.enter(deadline)?.queue.is_empty() {
            self.pump();
            wait()?;
        }
        let end = {
            let _entered = self.shared.device.enter()?;
            self.shared.joints.mark(&self.stream)?
        };
        loop {
            let _entered = self.shared.device.enter()?;
            if end.is_done()? {
                return Ok(());
            }
            if let Some(error) = self.trouble() {
                return Err(error);
            }
            wait()?;
        }
    }

    /// Begins to close the communicator, after [`drain`](Self::drain).
    pub(crate) fn finalize(&self) {
        if let Some(comm) = self.comm.get() {
            let closing = self
                .shared
                .device
                .enter()
                .and_then(|_entered| comm.finalize());
            self.note_close(closing);
        }
    }

    /// Closes the communicator after [`finalize`](Self::finalize).
    ///
    /// # Errors
    /// `Timeout` if the other ranks do not close theirs.
    pub(crate) fn destroy(&self, deadline: Deadline) -> Result<()> {
        let Some(comm) = self.comm.get() else {
            return Ok(());
        };
        match self.settle(comm, deadline) {
            Err(error) if error.kind() == ErrorKind::Timeout => return Err(error),
            settled => self.note_close(settled),
        }
        let closed = self
            .shared
            .device
            .enter()
            .and_then(|_entered| comm.destroy());
        self.note_close(closed);
        Ok(())
    }

    /// Ends the communicator if that was not done, or leaves it to the library; says whether it has ended.
    fn end_at_last(&self, comm: Arc<Comm>) -> bool {
        if self.shared.is_forsaken() {
            comm.forsake();
            return false;
        }
        Arc::into_inner(comm).is_some_and(|mut comm| comm.end_at_last())
    }

    /// Everything has ended: that another rank has gone first, perhaps without a word, harms nobody.
    fn note_close(&self, closed: Result<()>) {
        if let Err(error) = closed {
            tracing::debug!(%error, "a communicator was not closed by all ranks together");
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Before what it uses. Where it stays, in the library or with whoever else holds it, that does too.
        if let Some(comm) = self.comm.take()
            && !self.end_at_last(comm)
        {
            self.registry.leak();
            let staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget((self.stream.clone(), self.barrier.clone(), staging.clone()));
        }
        if self.sweep() {
            return;
        }
        for remains in self.remains().drain(..) {
            self.shared.leak(remains.op, remains.memory);
        }
    }
}

impl Shared {
    /// Gives up memory that a device may still write to: better lost than corrupted.
    pub(crate) fn leak(&self, op: OpType, memory: Box<dyn Send>) {
        std::mem::forget(memory);
        let leaked = self.leaked.fetch_add(1, Ordering::Relaxed) + 1;
        tracing::warn!(
            %op,
            leaked,
            "the device did not let go of the buffers of an aborted operation: they are never freed"
        );
    }
}
