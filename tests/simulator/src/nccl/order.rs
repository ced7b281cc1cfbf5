//! Orders the kernels of several communicators on one device: how many the device holds at once (`kernels_at_once` of
//! `RCOMM_SIM`), and in which order they start.
//!
//! A kernel that has started waits for its peers and does not make room for another one. Without an order, the kernel
//! that its stream reaches first starts next. With `NCCL_LAUNCH_ORDER_IMPLICIT=1` a kernel starts after the one
//! that was launched before it on the device has started, whatever their communicators (`ncclLaunchPrepare` and
//! `ncclLaunchFinish`, enqueue.cc:1683 and 1924, with launch completion events). Kernels of graphs are not ordered
//! here.

use super::comm::Comm;
use crate::stream::lock;
use crate::trouble;
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// The number of kernels, without those of graphs, that have started in this process.
static STARTED: AtomicU64 = AtomicU64::new(0);
/// Number of kernels that run on each device.
static RUNNING: Mutex<Option<HashMap<c_int, u64>>> = Mutex::new(None);
/// Notified when a kernel starts or ends.
static CHANGED: Condvar = Condvar::new();
/// The kernel that was launched last on each device.
static LAST: Mutex<Option<HashMap<c_int, Arc<AtomicBool>>>> = Mutex::new(None);

/// Returns the number of kernels, without those of graphs, that have started in this process, for tests.
#[unsafe(no_mangle)]
pub extern "C" fn rcomm_simulator_kernels() -> u64 {
    STARTED.load(Ordering::Acquire)
}

fn is_ordered() -> bool {
    static ORDERED: OnceLock<bool> = OnceLock::new();
    *ORDERED.get_or_init(|| {
        let value = std::env::var("NCCL_LAUNCH_ORDER_IMPLICIT").unwrap_or_default();
        value.trim().parse().is_ok_and(|value: i64| value != 0)
    })
}

/// A kernel's place in the order of launches.
pub(super) struct Place {
    device: c_int,
    has_started: Arc<AtomicBool>,
    /// Whether the kernel before this one has started; `None` without an order, and for the first kernel.
    former: Option<Arc<AtomicBool>>,
}

/// The room of a kernel that has started, until it ends.
pub(super) struct Room(c_int);

impl Place {
    /// Takes the next place on the communicator's device.
    pub(super) fn next(comm: &Comm) -> Self {
        let has_started = Arc::new(AtomicBool::new(false));
        let former = match is_ordered() {
            true => lock(&LAST)
                .get_or_insert_default()
                .insert(comm.device, has_started.clone()),
            false => None,
        };
        Self {
            device: comm.device,
            has_started,
            former,
        }
    }

    /// Waits until the kernel before has started and the device has room, or the communicator is stopped. The kernel
    /// counts as started then.
    pub(super) fn start(&self, comm: &Comm) -> Room {
        let limit = trouble::setting("kernels_at_once").unwrap_or(u64::MAX);
        let former_started = || {
            let former = self.former.as_ref();
            former.is_none_or(|former| former.load(Ordering::Acquire))
        };
        let mut running = lock(&RUNNING);
        loop {
            let number = running
                .get_or_insert_default()
                .entry(self.device)
                .or_default();
            let may_start = former_started() && *number < limit;
            if may_start || comm.stopped.load(Ordering::Acquire) {
                *number += 1;
                break;
            }
            // A stop does not notify `CHANGED`.
            let waited = CHANGED.wait_timeout(running, Duration::from_millis(2));
            running = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(running);
        self.has_started.store(true, Ordering::Release);
        STARTED.fetch_add(1, Ordering::AcqRel);
        CHANGED.notify_all();
        Room(self.device)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Some(number) = lock(&RUNNING).get_or_insert_default().get_mut(&self.0) {
            *number -= 1;
        }
        CHANGED.notify_all();
    }
}
