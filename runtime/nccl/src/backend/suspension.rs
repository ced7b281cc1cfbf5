//! Releases the device memory of a group's communicators while the program needs it for something else, and reports how
//! much memory they have. Source: `ncclCommSuspend`, `ncclCommResume` and `ncclCommMemStats` in mem_manager.cc of NCCL
//! 2.30.7.

use super::NcclBackend;
use crate::library::NcclLibrary;
use crate::library::sys::{NcclComm, NcclResult, SUSPEND_MEM, mem_stat};
use rcomm_core::Deadline;
use rcomm_core::backend::CommMemory;
use rcomm_core::{Error, ErrorKind, Result};
use std::sync::atomic::Ordering;

impl NcclBackend {
    /// [`Backend::suspend`](rcomm_core::backend::Backend::suspend).
    pub(super) fn suspend_all(&self, deadline: Deadline) -> Result<()> {
        let Some(suspend) = self.shared.library.table().comm_suspend else {
            return Err(self
                .shared
                .library
                .lacks("the release of memory", "ncclCommSuspend"));
        };
        if self.shared.suspended.swap(true, Ordering::AcqRel) {
            let message = "the group is suspended already";
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        // SAFETY: the function takes a communicator that is live and locked, as `on_all` lends it.
        let suspended = self.on_all("ncclCommSuspend", deadline, move |comm| unsafe {
            suspend(comm, SUSPEND_MEM)
        });
        // A communicator that refuses, for example because a split shares its memory, stays as it was. After a
        // time-out, the group is unusable.
        if suspended.is_err() {
            self.shared.suspended.store(false, Ordering::Release);
        }
        suspended
    }

    /// [`Backend::resume`](rcomm_core::backend::Backend::resume).
    pub(super) fn resume_all(&self, deadline: Deadline) -> Result<()> {
        let Some(resume) = self.shared.library.table().comm_resume else {
            return Err(self
                .shared
                .library
                .lacks("the release of memory", "ncclCommResume"));
        };
        if !self.shared.suspended.load(Ordering::Acquire) {
            let message = "the group is not suspended";
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        // SAFETY: the function takes a communicator that is live and locked, as `on_all` lends it.
        self.on_all("ncclCommResume", deadline, move |comm| unsafe {
            resume(comm)
        })?;
        self.shared.suspended.store(false, Ordering::Release);
        Ok(())
    }

    /// Makes a call that all ranks make, on all communicators of the group at once, because another rank may have the
    /// communicators in another order.
    fn on_all(
        &self,
        name: &'static str,
        deadline: Deadline,
        call: impl FnOnce(NcclComm) -> NcclResult + Clone + Send + 'static,
    ) -> Result<()> {
        let deadline = deadline.started();
        let queues = self.queues();
        queues.iter().try_for_each(|queue| queue.drain(deadline))?;
        let calls: Vec<_> = queues
            .iter()
            .map(|queue| queue.begin_alone(name, call.clone(), deadline))
            .collect();
        // Waits for all calls until the deadline, also if one could not begin or has failed. Returns the first error.
        let results: Vec<Result<()>> = calls
            .into_iter()
            .map(|call| call?.map_or(Ok(()), |call| call.wait(deadline)))
            .collect();
        results.into_iter().collect()
    }

    /// [`Backend::comm_memory`](rcomm_core::backend::Backend::comm_memory).
    pub(super) fn memory_of_all(&self) -> Result<CommMemory> {
        let library = &self.shared.library;
        let Some(mem_stats) = library.table().comm_mem_stats else {
            return Err(library.lacks("the memory of communicators", "ncclCommMemStats"));
        };
        let read = |library: &NcclLibrary, comm, statistic| {
            let mut value = 0;
            // SAFETY: `with` lends a live communicator, locked; the call writes one word through a reference.
            let status = unsafe { mem_stats(comm, statistic, &mut value) };
            // SAFETY: as above.
            unsafe { library.check_on(comm, "ncclCommMemStats", status) }.map(|()| value)
        };
        let mut memory = CommMemory::default();
        for queue in self.queues() {
            let Some(comm) = queue.comm() else { continue };
            let _alone = queue.lock_idle(comm)?;
            let _entered = self.shared.device.enter()?;
            comm.with(|library, raw| -> Result<()> {
                memory.total += read(library, raw, mem_stat::TOTAL)?;
                memory.persistent += read(library, raw, mem_stat::PERSISTENT)?;
                memory.releasable += read(library, raw, mem_stat::SUSPENDABLE)?;
                memory.is_released |= read(library, raw, mem_stat::IS_SUSPENDED)? != 0;
                Ok(())
            })??;
        }
        Ok(memory)
    }
}
