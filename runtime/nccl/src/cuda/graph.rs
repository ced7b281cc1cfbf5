//! CUDA graphs into which streams are captured, and how memory stays alive for as long as a graph may use it.
//!
//! The driver counts the references that a graph, and everything made from it, has to objects of the
//! program, and calls a destructor when the last reference is gone ("CUDA User Objects" in the CUDA
//! programming guide). The destructor may not call the driver, so it only defers the freeing of the memory to
//! the next use of a queue of the device.

use super::device::{CudaDevice, DeferredFree};
use crate::cuda::{self, CuGraph, CuUserObject};
use rcomm_core::Result;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::fmt;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A graph into which a stream is being captured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Graph {
    /// The number of the capture, unique in this process.
    pub(crate) id: u64,
    /// The graph, valid until the capture ends.
    pub(crate) raw: CuGraph,
}

// SAFETY: graphs are handles of the driver that any thread may use, one at a time: a capture belongs to the
// streams in it, and operations are issued one after the other.
unsafe impl Send for Graph {}

/// The graphs that hold operations of one communicator, each with the number of these operations. NCCL
/// waits for all of them when it closes or frees the communicator (`localPersistentRefs` in
/// `commDestroySync`, init.cc).
#[derive(Default)]
pub(crate) struct LiveGraphs(Mutex<BTreeMap<u64, u64>>);

impl LiveGraphs {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of graphs.
    pub(crate) fn count(&self) -> usize {
        self.lock().len()
    }

    /// Adds the numbers of the graphs to `numbers`.
    pub(crate) fn collect(&self, numbers: &mut GraphNumbers) {
        numbers.0.extend(self.lock().keys());
    }

    fn add(&self, graph: u64) {
        *self.lock().entry(graph).or_default() += 1;
    }

    fn remove(&self, graph: u64) {
        let mut graphs = self.lock();
        if let Some(operations) = graphs.get_mut(&graph) {
            *operations -= 1;
            if *operations == 0 {
                graphs.remove(&graph);
            }
        }
    }
}

/// The numbers of graphs, which are the numbers of their captures. As text: the count, and the first numbers, such as
/// `2: 5, 7`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GraphNumbers(BTreeSet<u64>);

impl GraphNumbers {
    /// The largest number of graphs in the text.
    const SHOWN: usize = 16;

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for GraphNumbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: Vec<String> = self
            .0
            .iter()
            .take(Self::SHOWN)
            .map(u64::to_string)
            .collect();
        let more = if self.0.len() > Self::SHOWN {
            ", …"
        } else {
            ""
        };
        write!(f, "{}: {}{more}", self.0.len(), shown.join(", "))
    }
}

/// The memory that one operation keeps alive in its graph.
struct GraphMemory {
    memory: DeferredFree,
    graph: u64,
    live: Arc<LiveGraphs>,
}

impl Graph {
    /// Keeps `memory`, and counts the graph among the `live` ones, until the graph and everything made from
    /// it are gone.
    ///
    /// # Errors
    /// `Backend` with the driver's message.
    pub(crate) fn keep(
        self,
        device: &Arc<CudaDevice>,
        memory: Box<dyn Send>,
        live: &Arc<LiveGraphs>,
    ) -> Result<()> {
        let (driver, table) = (device.driver(), device.driver().table());
        live.add(self.id);
        let memory = Box::into_raw(Box::new(GraphMemory {
            memory: DeferredFree::new(device, memory),
            graph: self.id,
            live: live.clone(),
        }));
        let mut object: CuUserObject = null_mut();
        // SAFETY: the call writes one handle. The driver calls `release_memory` once with the pointer, when the last
        // reference is gone.
        let status = unsafe {
            (table.user_object_create)(
                &mut object,
                memory.cast(),
                release_memory,
                1,
                cuda::USER_OBJECT_NO_DESTRUCTOR_SYNC,
            )
        };
        if let Err(error) = driver.check("cuUserObjectCreate", status) {
            live.remove(self.id);
            // SAFETY: `memory` came from `Box::into_raw` above, and the driver has not taken it.
            drop(unsafe { Box::from_raw(memory) });
            return Err(error);
        }
        // SAFETY: the graph is valid, since the capture is in progress, and the object was just made. Its one
        // reference passes to the graph.
        let status = unsafe {
            (table.graph_retain_user_object)(self.raw, object, 1, cuda::GRAPH_USER_OBJECT_MOVE)
        };
        driver
            .check("cuGraphRetainUserObject", status)
            .inspect_err(|_| {
                // SAFETY: the call failed, so this function still owns the object's one reference. Releasing it makes
                // the driver call `release_memory`.
                let _ = unsafe { (table.user_object_release)(object, 1) };
            })
    }
}

/// The destructor of an object: the driver calls it when no reference to the object is left.
///
/// # Safety
/// `memory` is a [`GraphMemory`] from `Box::into_raw` that no other code has.
unsafe extern "C" fn release_memory(memory: *mut c_void) {
    // SAFETY: `Graph::keep` made the pointer with `Box::into_raw`, and the driver passes it here once.
    let memory = unsafe { Box::from_raw(memory.cast::<GraphMemory>()) };
    memory.live.remove(memory.graph);
    memory.memory.defer_free();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graphs_are_counted_and_named_by_their_numbers() {
        let numbers = |range: std::ops::Range<u64>| GraphNumbers(range.collect()).to_string();
        assert_eq!(numbers(5..7), "2: 5, 6");
        let many = numbers(0..100);
        assert!(
            many.starts_with("100: 0, 1, ") && many.ends_with("15, …"),
            "{many}"
        );
    }
}
