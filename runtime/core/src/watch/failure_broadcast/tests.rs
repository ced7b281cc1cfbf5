use super::*;
use crate::op::info::OpInfo;
use crate::store::HashStore;
use crate::watch::dump_writer::DumpWriter;
use rcomm_recorder::model::{OpType, ProcessGroupInfo};
use rcomm_recorder::publish::Dump;
use rcomm_recorder::record::{Placement, RecorderConfig};
use std::sync::mpsc;

/// A dump writer that sends each dump's reason, and whether the flag was set by then.
struct ReasonSender(mpsc::Sender<(String, bool)>, Arc<dyn Store>);

impl DumpWriter for ReasonSender {
    fn write(&self, dump: &Dump) -> Result<String> {
        let flag = self.1.check(&[FLAG])?;
        let _ = self.0.send((dump.identity.reason.clone(), flag));
        Ok(String::new())
    }
}

/// The failure broadcast of one rank over this store, without a watchdog. The receiver gets this rank's
/// dumps, as [`ReasonSender`] sends them.
pub(crate) fn broadcast(
    rank: u32,
    store: &Arc<impl Store + 'static>,
    interval: Duration,
) -> (
    Arc<FailureBroadcast>,
    mpsc::Receiver<(String, bool)>,
    ResponderThread,
) {
    let (sender, dumped) = mpsc::channel();
    let writer = Box::new(ReasonSender(sender, store.clone()));
    let (broadcast, thread) = broadcast_to(writer, rank, store, interval);
    (broadcast, dumped, thread)
}

fn broadcast_to(
    writer: Box<dyn DumpWriter>,
    rank: u32,
    store: &Arc<impl Store + 'static>,
    interval: Duration,
) -> (Arc<FailureBroadcast>, ResponderThread) {
    let broadcast = unstarted(writer, rank, store.clone(), interval);
    let thread = ResponderThread::start(broadcast.clone(), Vec::new()).unwrap();
    (broadcast, thread)
}

/// The failure broadcast of one rank over this store, without a thread.
pub(super) fn unstarted(
    writer: Box<dyn DumpWriter>,
    rank: u32,
    root: Arc<dyn Store>,
    interval: Duration,
) -> Arc<FailureBroadcast> {
    let config = RecorderConfig {
        placement: Placement::Memory,
        entries: 16,
        ..RecorderConfig::new("job", rank, 16)
    };
    let recorder = Arc::new(FlightRecorder::create(&config).unwrap());
    let processes = Arc::new(NeighborProcesses::new(recorder.clone(), root.clone(), 0));
    unstarted_with(writer, rank, root, interval, recorder, processes)
}

fn unstarted_with(
    writer: Box<dyn DumpWriter>,
    rank: u32,
    root: Arc<dyn Store>,
    interval: Duration,
    recorder: Arc<FlightRecorder>,
    processes: Arc<dyn Processes>,
) -> Arc<FailureBroadcast> {
    let broadcast = FailureBroadcast::new(FailureBroadcastParts {
        rank,
        attempt: 0,
        store_end: Some(LinkEnd::StoreAtRank(0)),
        root,
        watch: Arc::new(Watch::default()),
        dumps: Arc::new(Dumps::new(recorder.clone(), Arc::default(), writer)),
        recorder,
        processes,
        status_wait: Duration::from_secs(1),
        interval,
        propagation: Propagation::DumpOnly,
    });
    broadcast.unwrap()
}

/// A dump writer that begins when it is allowed to, and then takes 200 ms.
struct SlowDisk {
    go: Mutex<mpsc::Receiver<()>>,
    written: Arc<AtomicBool>,
}

impl DumpWriter for SlowDisk {
    fn write(&self, _: &Dump) -> Result<String> {
        let _ = self.go.lock().unwrap().recv();
        std::thread::sleep(Duration::from_millis(200));
        self.written.store(true, Ordering::Release);
        Ok("a slow disk".to_owned())
    }
}

#[test]
fn a_world_that_ends_waits_for_its_dump() {
    let (go, may_go) = mpsc::channel();
    let written = Arc::new(AtomicBool::new(false));
    let disk = SlowDisk {
        go: Mutex::new(may_go),
        written: written.clone(),
    };
    let store = Arc::new(HashStore::new());
    let (broadcast, mut thread) =
        broadcast_to(Box::new(disk), 0, &store, Duration::from_secs(3_600));
    let place = broadcast.begin_fault_dump("late").text(Instant::now());
    assert_eq!(place, "dump: not written yet");
    go.send(()).unwrap();
    thread.stop();
    assert!(written.load(Ordering::Acquire));
}

#[test]
fn a_disk_that_does_not_respond_delays_neither_the_status_nor_the_next_dump() {
    let (go, may_go) = mpsc::channel();
    let disk = SlowDisk {
        go: Mutex::new(may_go),
        written: Arc::default(),
    };
    let store = Arc::new(HashStore::new());
    let often = Duration::from_millis(10);
    let (slow, mut slow_thread) = broadcast_to(Box::new(disk), 1, &store, often);
    let (failed, _dumped, _failed_thread) = broadcast(0, &store, often);
    fail(&failed, "late");
    let status = store.get("rcomm/status/0/1/1", Duration::from_secs(60));
    status.expect("no status of the rank whose dump is not written");
    slow.dump("requested", Instant::now());
    for _ in 0..100 {
        slow.begin_fault_dump("late").text(Instant::now());
    }
    let refused = slow.begin_fault_dump("late").text(Instant::now());
    assert_eq!(refused, "no dump: earlier ones are not written yet");
    // Without a sender, no write waits any more.
    drop(go);
    slow_thread.stop();
}

#[test]
fn a_dump_has_half_of_the_time_for_the_status_and_a_quarter_after_a_silent_store() {
    let store = Arc::new(HashStore::new());
    let (broadcast, _dumped, _thread) = broadcast(0, &store, Duration::from_secs(3_600));
    let wait = broadcast.parts.status_wait;
    // The alarm was raised at once: no time has passed since the fault.
    let later = Instant::now() + Duration::from_secs(60);
    assert_eq!(broadcast.dump_until(later), later + wait / 2);
    // The store has used up the time.
    let before = Instant::now();
    let until = broadcast.dump_until(before - wait);
    let after = Instant::now();
    assert!(before + wait / 4 <= until && until <= after + wait / 4);
}

#[test]
fn the_same_finding_of_another_rank_is_not_repeated() {
    let cause = "rank 3: all_reduce #4 on group dp: sizes differ; 3.1 s after its issue";
    let same = "all_reduce #4 on group dp: sizes differ";
    assert_eq!(
        responder::reported_before(cause, same),
        "found before by rank 3"
    );
    let other = "all_reduce #5 on group dp: not done after 3.0 s";
    let expected = format!("reported before by {cause}");
    assert_eq!(responder::reported_before(cause, other), expected);
}

#[test]
fn ranks_that_time_out_at_once_raise_one_alarm() {
    let store = Arc::new(HashStore::new());
    // No responder polls the store within this interval, so each acts as the first to raise the alarm.
    let never = Duration::from_secs(3_600);
    let ranks: Vec<_> = (0..16).map(|rank| broadcast(rank, &store, never)).collect();
    let incidents = ranks.iter().map(|(broadcast, _, _)| {
        let incident = Incident::of_rank("late");
        broadcast.incidents.lock().unwrap().push(incident.clone());
        incident
    });
    let incidents: Vec<_> = incidents.collect();
    for (broadcast, _, _) in &ranks {
        broadcast.wake();
    }
    for incident in incidents {
        let progress = incident.wait(Duration::from_secs(60), |progress| progress.raise_ended);
        assert!(progress.raise_ended);
    }
    assert_eq!(store.add("rcomm/alarm/0", 0).unwrap(), 1);
    let cause = store.get("rcomm/cause/0/1", Duration::from_secs(1));
    assert!(cause.unwrap().ends_with(b": late"));
}

#[test]
fn a_fault_just_after_another_ranks_alarm_belongs_to_it() {
    let store = Arc::new(HashStore::new());
    let often = Duration::from_millis(10);
    let (first, _, _first) = broadcast(0, &store, often);
    let (second, dumped, _second) = broadcast(1, &store, often);
    fail(&first, "late");
    let announced = dumped.recv_timeout(Duration::from_secs(60));
    assert!(announced.unwrap().0.contains("late"));
    fail(&second, "late");
    assert_eq!(store.add("rcomm/alarm/0", 0).unwrap(), 1);
}

/// A store with a function that runs before each operation, and one that runs after each change.
pub(super) struct HookedStore {
    pub(super) store: HashStore,
    pub(super) before: Box<dyn Fn() + Send + Sync>,
    pub(super) after: Box<dyn Fn(&HashStore) + Send + Sync>,
    /// Whether [`Store::compare_set`] is one operation, as it must be.
    pub(super) is_atomic: bool,
}

impl HookedStore {
    fn ask(&self) -> &HashStore {
        (self.before)();
        &self.store
    }

    fn change<T>(&self, change: impl FnOnce(&HashStore) -> T) -> T {
        let result = change(self.ask());
        (self.after)(&self.store);
        result
    }
}

/// Whether the newest alarm in a store has a cause, or there is no alarm.
pub(super) fn has_cause(store: &HashStore) -> bool {
    let alarm = store.add("rcomm/alarm/0", 0).unwrap();
    alarm == 0 || store.check(&[&format!("rcomm/cause/0/{alarm}")]).unwrap()
}

impl Store for HookedStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(|store| store.set(key, value))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.ask().get(key, timeout)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.change(|store| store.add(key, delta))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        if self.is_atomic {
            return self.change(|store| store.compare_set(key, expected, desired));
        }
        let held = match self.ask().check(&[key])? {
            true => self.store.get(key, Duration::ZERO)?,
            false => Vec::new(),
        };
        if held != expected {
            return Ok(held);
        }
        self.change(|store| store.set(key, desired))?;
        Ok(desired.to_vec())
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.ask().wait(keys, timeout)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.ask().check(keys)
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.change(|store| store.delete(key))
    }

    fn num_keys(&self) -> Result<u64> {
        self.ask().num_keys()
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        self.ask().list_keys()
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(|store| store.append(key, value))
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.ask().multi_get(keys, timeout)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        self.change(|store| store.multi_set(pairs))
    }

    fn barrier(&self, key: &str, world_size: u32, timeout: Duration) -> Result<()> {
        self.ask().barrier(key, world_size, timeout)
    }
}

/// Makes this rank fail, and waits until it has raised the alarm.
fn fail(broadcast: &FailureBroadcast, cause: &str) {
    let incident = Incident::of_rank(cause);
    broadcast.incidents.lock().unwrap().push(incident.clone());
    broadcast.wake();
    let progress = incident.wait(Duration::from_secs(60), |progress| progress.raise_ended);
    assert!(progress.raise_ended);
}

#[test]
fn a_rank_that_reads_an_alarm_finds_its_cause() {
    let is_cause_missing = Arc::new(AtomicBool::new(false));
    let found = is_cause_missing.clone();
    let store = Arc::new(HookedStore {
        store: HashStore::new(),
        before: Box::new(|| ()),
        after: Box::new(move |store| {
            found.fetch_or(!has_cause(store), Ordering::Relaxed);
        }),
        is_atomic: true,
    });
    let never = Duration::from_secs(3_600);
    let (broadcast, _, _thread) = broadcast(0, &store, never);
    fail(&broadcast, "late");
    assert_eq!(store.add("rcomm/alarm/0", 0).unwrap(), 1);
    assert!(!is_cause_missing.load(Ordering::Relaxed));
}

#[test]
fn the_first_cause_of_an_alarm_is_kept() {
    let store = Arc::new(HashStore::new());
    let never = Duration::from_secs(3_600);
    // Rank 9 was about to raise the same alarm and has written its cause, but not yet the alarm.
    store.set("rcomm/cause/0/1", b"rank 9: first").unwrap();
    let (broadcast, _, _thread) = broadcast(0, &store, never);
    fail(&broadcast, "late");
    assert_eq!(store.add("rcomm/alarm/0", 0).unwrap(), 1);
    let cause = store.get("rcomm/cause/0/1", Duration::from_secs(1));
    assert_eq!(cause.unwrap(), b"rank 9: first");
}

/// Processes of which that of rank 0 is stopped as long as this is set.
#[derive(Default)]
struct Scripted(AtomicBool);

impl Processes for Scripted {
    fn learn(&self, _: Rank) {}

    fn learn_stopped(&self, _: &[Rank]) {}

    fn is_stopped(&self, rank: Rank) -> bool {
        rank == 0 && self.0.load(Ordering::Relaxed)
    }
}

#[test]
fn a_stop_for_a_moment_of_the_rank_that_serves_the_store_changes_no_blame() {
    let (sender, _dumped) = mpsc::channel();
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let writer = Box::new(ReasonSender(sender, store.clone()));
    let rank_0 = Arc::new(Scripted::default());
    let config = RecorderConfig {
        placement: Placement::Memory,
        ..RecorderConfig::new("job", 1, 16)
    };
    let recorder = Arc::new(FlightRecorder::create(&config).unwrap());
    let never = Duration::from_secs(3_600);
    let broadcast = unstarted_with(writer, 1, store, never, recorder, rank_0.clone());
    // No thread raises the alarm, as if the store did not answer.
    let incident = Incident::of_rank("late");
    let blamed = || {
        let late = Error::new(ErrorKind::Timeout, "waited for rank 3").with_rank(3);
        let error = broadcast.complete(late, &incident, Instant::now());
        (error.ranks().to_vec(), error.to_string())
    };
    let is_stopped = |is_stopped| rank_0.0.store(is_stopped, Ordering::Relaxed);
    is_stopped(true);
    assert_eq!(blamed().0, [3]);
    is_stopped(false);
    std::thread::sleep(STOPPED_TIME);
    assert_eq!(blamed().0, [3]);
    // It is stopped again. The time of the first stop does not count.
    is_stopped(true);
    assert_eq!(blamed().0, [3]);
    broadcast.raise(&incident, Instant::now() + Duration::from_secs(60));
    let deadline = Instant::now() + Duration::from_secs(60);
    while blamed().0 != [0] {
        assert!(Instant::now() < deadline);
        std::thread::sleep(LOOK_TIME);
    }
    let (_, text) = blamed();
    assert!(text.contains("a signal has stopped rank 0"), "{text}");
    is_stopped(false);
    assert_eq!(blamed().0, [3]);
}

#[test]
fn a_time_out_names_the_rank_that_serves_the_store_once_that_has_been_silent() {
    let store = Arc::new(HashStore::new());
    let (broadcast, _dumped, mut thread) = broadcast(1, &store, Duration::from_secs(3600));
    thread.stop();
    let late =
        || Error::new(ErrorKind::Timeout, "waited for rank 3 until the deadline").with_rank(3);
    let info = ProcessGroupInfo {
        id: 0,
        name: String::new(),
        desc: String::new(),
        ranks: [1, 3].into(),
    };
    let op_info = OpInfo {
        record_id: 1,
        op: OpType::AllReduce,
        seq: 1,
        is_p2p: false,
        turn_lane: Some(0),
        ends_itself: false,
        is_timed: false,
        timeout: Duration::from_secs(3),
    };
    let incident = Incident::new(&info, 0, &op_info, "late", &late());
    let complete = || broadcast.complete(late(), &incident, Instant::now());
    broadcast.store_asked();
    assert_eq!(complete().ranks(), [3]);
    let since = broadcast.recorder().now().as_ns() - 4_000_000_000;
    broadcast.unanswered_since.store(since, Ordering::Relaxed);
    // This process may have been stopped in that time.
    assert_eq!(complete().ranks(), [3]);
    assert!(!broadcast.store_stays_silent(STORE_LAST_WAIT));
    broadcast.ran(STORE_SILENT);
    assert!(broadcast.store_stays_silent(STORE_LAST_WAIT));
    assert!(!broadcast.store_stays_silent(LOOK_TIME));
    let error = complete();
    assert_eq!(error.ranks(), [0]);
    let text = error.to_string();
    assert!(
        text.contains("rank 0, which serves the store, has not answered for 4."),
        "{text}"
    );
    // The same if the attempt to raise the alarm has ended because the store did not answer, but not if it has ended
    // otherwise.
    let unanswered = |unanswered| {
        incident.update(|progress| {
            (progress.raise_ended, progress.raise_unanswered) = (true, unanswered);
        });
        complete().ranks().to_vec()
    };
    assert_eq!((unanswered(true), unanswered(false)), (vec![0], vec![3]));
    broadcast.store_replied(&Ok(()));
    assert!(!broadcast.store_stays_silent(STORE_LAST_WAIT));
    assert_eq!(complete().ranks(), [3]);
    // A connection that was lost shows no end of a process.
    incident.update(|progress| progress.store_lost = true);
    let error = complete();
    assert_eq!(error.ranks(), [0]);
    let text = error.to_string();
    assert!(
        text.contains("the connection to the store, which rank 0 serves, was lost")
            && !text.contains("gone"),
        "{text}"
    );
    let [row] = <[_; 1]>::try_from(broadcast.recorder().snapshot().peers).unwrap();
    assert!(row.end == LinkEnd::StoreAtRank(0) && row.heard_ns > 0 && row.waited_since_ns == 0);
}
