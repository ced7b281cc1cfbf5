//! [`Processes`]: which other ranks a signal has stopped, by their rings on this host.

use crate::store::{Store, which_are_set};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::RingReader;
use rcomm_recorder::record::FlightRecorder;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// For how long the store is asked about processes.
const ASK_TIME: Duration = Duration::from_millis(100);

/// What is known of the processes of other ranks.
pub(crate) trait Processes: Send + Sync {
    /// Learns from the store which process this rank is, if that may be a process of this host.
    ///
    /// # Blocking
    /// Until the store has answered, if the rank's ring seems to be on this host and its process is not known yet.
    fn learn(&self, rank: Rank);

    /// Learns from the store which process each of `ranks` is whose ring on this host says that it is stopped.
    ///
    /// # Blocking
    /// Until the store has answered, if there are such ranks whose processes are not known yet.
    fn learn_stopped(&self, ranks: &[Rank]);

    /// Whether a signal has stopped the process of this rank. False if that cannot be seen from here, for example for a
    /// rank on another host, or if it is not known which process the rank is.
    fn is_stopped(&self, rank: Rank) -> bool;
}

/// The ranks whose rings are next to that of this rank.
///
/// Such a ring may be left over from another run: the process that wrote it may still exist, stopped, while the rank is
/// another process, perhaps on another host. So each rank writes to the store which process it is, and a ring counts
/// only if that process made it.
pub(crate) struct NeighborProcesses {
    recorder: Arc<FlightRecorder>,
    store: Arc<dyn Store>,
    attempt: u32,
    /// The marks of the ranks' processes ([`FlightRecorder::process_mark`]), as far as the store has been asked for
    /// them.
    marks: Mutex<BTreeMap<Rank, String>>,
}

impl NeighborProcesses {
    pub(crate) fn new(recorder: Arc<FlightRecorder>, store: Arc<dyn Store>, attempt: u32) -> Self {
        Self {
            recorder,
            store,
            attempt,
            marks: Mutex::default(),
        }
    }

    /// The key and the value by which the other ranks learn that this process is `rank`; `None` if the process's mark
    /// is not known.
    pub(crate) fn note_of(&self, rank: Rank) -> Option<(String, Vec<u8>)> {
        let mark = self.recorder.process_mark()?;
        Some((self.key(rank), mark.into_bytes()))
    }

    fn key(&self, rank: Rank) -> String {
        format!("rcomm/process/{}/{rank}", self.attempt)
    }

    fn ring(&self, rank: Rank) -> Option<RingReader> {
        RingReader::attach(self.recorder.ring_of(rank)?).ok()
    }

    /// The mark of this rank's process, if it is known.
    fn mark(&self, rank: Rank) -> Option<String> {
        let marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        marks.get(&rank).cloned()
    }

    /// Asks the store which processes these ranks are. A rank of which it says nothing stays unknown.
    fn ask(&self, ranks: &[Rank]) {
        let keys: Vec<String> = ranks.iter().map(|&rank| self.key(rank)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let are_set = which_are_set(&*self.store, &keys, Instant::now() + ASK_TIME);
        let (ranks, keys): (Vec<Rank>, Vec<&str>) = ranks
            .iter()
            .zip(keys)
            .zip(are_set)
            .filter_map(|(rank_and_key, is_set)| is_set.then_some(rank_and_key))
            .map(|(&rank, key)| (rank, key))
            .unzip();
        if ranks.is_empty() {
            return;
        }
        // The keys exist, so this does not wait.
        let values = self.store.multi_get(&keys, Duration::from_millis(1));
        let mut marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        for (rank, value) in ranks.into_iter().zip(values.unwrap_or_default()) {
            marks.insert(rank, String::from_utf8_lossy(&value).into_owned());
        }
    }
}

impl Processes for NeighborProcesses {
    fn learn(&self, rank: Rank) {
        if self.mark(rank).is_none() && self.ring(rank).is_some() {
            self.ask(&[rank]);
        }
    }

    fn learn_stopped(&self, ranks: &[Rank]) {
        let seems_stopped = |&rank: &Rank| {
            self.mark(rank).is_none() && self.ring(rank).is_some_and(|ring| ring.is_stopped())
        };
        let ranks: Vec<Rank> = ranks.iter().copied().filter(seems_stopped).collect();
        if !ranks.is_empty() {
            self.ask(&ranks);
        }
    }

    fn is_stopped(&self, rank: Rank) -> bool {
        let Some(mark) = self.mark(rank) else {
            return false;
        };
        let ring = self.ring(rank);
        ring.is_some_and(|ring| ring.process_mark() == Some(mark) && ring.is_stopped())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::HashStore;
    use rcomm_recorder::record::{Placement, RecorderConfig};
    use rustix::process::{Pid, Signal, kill_process};
    use std::path::Path;
    use std::process::{Child, Command, Stdio};

    const DIRECTORY: &str = "RCOMM_TEST_RINGS";

    fn recorder(directory: &Path, rank: Rank) -> FlightRecorder {
        FlightRecorder::create(&RecorderConfig {
            placement: Placement::Dir(directory.to_owned()),
            entries: 16,
            ..RecorderConfig::new("job", rank, 2)
        })
        .unwrap()
    }

    #[test]
    #[ignore = "run by the test below, as a process of its own"]
    fn rank_0_with_a_ring() {
        if let Some(directory) = std::env::var_os(DIRECTORY) {
            let _ring = recorder(directory.as_ref(), 0);
            // Until the other process closes the pipe.
            let _ = std::io::stdin().read_line(&mut String::new());
        }
    }

    /// A process that is killed when this is dropped, also while it is stopped.
    struct Killed(Child);

    impl Drop for Killed {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn wait_until(awaited: &str, mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !holds() {
            assert!(Instant::now() < deadline, "waited for a minute: {awaited}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_ring_counts_only_if_the_rank_of_this_job_made_it() {
        let directory = tempfile::tempdir().unwrap();
        let own = Arc::new(recorder(directory.path(), 1));
        let mut rank_0 = Command::new(std::env::current_exe().unwrap());
        rank_0
            .args(["--ignored", "rank_0_with_a_ring"])
            .env(DIRECTORY, directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null());
        let rank_0 = Killed(rank_0.spawn().unwrap());
        let pid = Pid::from_raw(rank_0.0.id().cast_signed()).unwrap();
        let ring = || RingReader::attach(own.ring_of(0).unwrap()).ok();
        wait_until("the ring of rank 0", || ring().is_some());
        let ring = ring().unwrap();
        kill_process(pid, Signal::STOP).unwrap();
        wait_until("the stop", || ring.is_stopped());
        let store = Arc::new(HashStore::new());
        let processes = || NeighborProcesses::new(own.clone(), store.clone(), 0);
        let sees_stop = || {
            let [early, late] = [processes(), processes()];
            early.learn(0);
            late.learn_stopped(&[0, 1]);
            let [early, late] = [early.is_stopped(0), late.is_stopped(0)];
            assert_eq!(early, late);
            early
        };
        assert!(
            !sees_stop(),
            "the store does not say which process rank 0 is"
        );
        // Rank 0 is another process than the one that left the ring.
        let (key, _) = processes().note_of(0).unwrap();
        let (_, other) = processes().note_of(1).unwrap();
        store.set(&key, &other).unwrap();
        assert!(!sees_stop(), "the ring is that of another run");
        store
            .set(&key, ring.process_mark().unwrap().as_bytes())
            .unwrap();
        assert!(sees_stop());
        let known = processes();
        known.learn(0);
        kill_process(pid, Signal::CONT).unwrap();
        wait_until("the end of the stop", || !known.is_stopped(0));
    }
}
