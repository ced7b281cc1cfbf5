//! Starts threads for the judgment of large jobs.

use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Analysis, Policy, Report, Workers};
use std::borrow::Borrow;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Starts threads for each call of [`Workers::each`], and ends them with it. If none can be started, the caller does
/// all the work.
#[derive(Clone, Copy, Debug)]
pub struct Threads(NonZeroUsize);

impl Threads {
    /// Uses at most `most` threads, the caller's included; `None` = one for each processor that this process may use.
    pub fn new(most: Option<NonZeroUsize>) -> Self {
        let processors = || thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        Self(most.unwrap_or_else(processors))
    }
}

impl Workers for Threads {
    fn threads(&self) -> usize {
        self.0.get()
    }

    fn each(&self, parts: usize, part: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        let work = || {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= parts {
                    return;
                }
                part(index);
            }
        };
        thread::scope(|scope| {
            for _ in 1..self.0.get().min(parts) {
                let thread = thread::Builder::new().name("rcomm-fr/judge".to_owned());
                if thread.spawn_scoped(scope, work).is_err() {
                    break;
                }
            }
            work();
        });
    }
}

/// Judges dumps that are all in memory, as [`analyze`](rcomm_verdict::analyze) does, with one thread for each processor
/// if the job is large. Blocks until the report is made.
pub fn analyze_on_threads<D: Borrow<Dump>>(dumps: &[D], policy: &Policy) -> Report {
    let mut analysis = Analysis::new(policy.clone()).with_workers(Arc::new(Threads::new(None)));
    analysis.add_all(dumps);
    analysis.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::{Simulation, Situation};
    use rcomm_verdict::analyze;

    #[test]
    fn the_report_is_the_same_with_threads() {
        for &(situation, name) in Situation::ALL {
            let simulation = Simulation::new(situation, 192, 0).with_window(64);
            let dumps = simulation.dumps_at(simulation.fault_ns() + 60_000_000_000);
            assert_same(&dumps, name);
        }
    }

    /// Checks that five threads judge these dumps as one does, also on a machine with fewer processors.
    fn assert_same(dumps: &[Dump], name: &str) {
        let policy = Policy::default();
        let threads = Threads::new(NonZeroUsize::new(5));
        let mut analysis = Analysis::new(policy.clone()).with_workers(Arc::new(threads));
        analysis.add_all(dumps);
        assert_eq!(analysis.finish(), analyze(dumps, &policy), "{name}");
    }

    #[test]
    fn ranks_whose_tables_differ_have_the_same_report_with_threads() {
        let simulation = Simulation::new(Situation::Mismatch, 192, 0).with_window(64);
        let mut dumps = simulation.dumps_at(simulation.fault_ns() + 60_000_000_000);
        // The first rank's calls and call sites come before all others in its tables only.
        let first = &mut dumps[0];
        first.stacks.insert(0, vec![4]);
        for entry in &mut first.entries {
            entry.stack = entry.stack.map(|stack| stack + 1);
        }
        first.entries[0].stack = Some(0);
        first.entries[0].timeout_ms += 1;
        assert_same(&dumps, "ranks whose tables differ");
    }
}
