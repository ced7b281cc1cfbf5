//! Tests that rings of an earlier attempt or an earlier run of a job are dropped.

use rcomm_analyzer::source::{RingSource, Source as _};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::LaunchRecord;
use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};
use std::os::unix::fs::DirBuilderExt as _;
use std::time::{Duration, Instant};

#[test]
fn rings_of_an_earlier_attempt_are_dropped_once_a_rank_has_begun_a_later_one() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let ring_of = |rank: Rank, attempt: u32| {
        let mut config = RecorderConfig::new("job", rank, 2);
        config.placement = Placement::Dir(directory.path().to_owned());
        config.attempt = attempt;
        FlightRecorder::create(&config).expect("a ring can be made in a fresh directory")
    };
    let mut source = RingSource::new(directory.path().to_owned(), None);
    let mut poll = || restart_and_ranks(&mut source);
    let _first = [ring_of(0, 0), ring_of(1, 0)];
    assert_eq!(poll(), (false, vec![0, 1]));
    let _second = ring_of(0, 1);
    poll_until_a_restart_leaves_rank_0(&mut poll);
    let deadline = Instant::now() + Duration::from_secs(60);
    // The other rank begins the later attempt, too.
    let _third = ring_of(1, 1);
    while poll().1 != [0, 1] {
        assert!(Instant::now() < deadline, "the second rank is not noticed");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn rings_of_an_earlier_run_are_dropped_once_a_rank_of_the_newest_has_made_its_own() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let elsewhere = tempfile::tempdir().expect("a temporary directory can be made");
    let ring_in = |directory: &std::path::Path, rank: Rank, attempt: u32| {
        let mut config = RecorderConfig::new("job", rank, 2);
        config.placement = Placement::Dir(directory.to_owned());
        config.host = "n001".into();
        config.attempt = attempt;
        FlightRecorder::create(&config).expect("a ring can be made in a fresh directory")
    };
    let job = directory.path().join("job");
    let mut builder = std::fs::DirBuilder::new();
    let created = builder.mode(0o700).create(&job);
    created.expect("a folder can be made");
    // No process has locked the copy of a ring, so it reads as the ring of a dead process. The earlier run was
    // restarted once.
    for rank in [0, 1] {
        let _ring = ring_in(elsewhere.path(), rank, 1);
        let name = format!("{rank}.1.ring");
        std::fs::copy(elsewhere.path().join("job").join(&name), job.join(&name))
            .expect("a ring can be copied");
    }
    let mut source = RingSource::new(directory.path().to_owned(), None);
    let mut poll = || restart_and_ranks(&mut source);
    assert_eq!(poll(), (false, vec![0, 1]));
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed();
    let now_ns = now.expect("it is later than 1970").as_nanos();
    let launch = LaunchRecord {
        schema: LaunchRecord::SCHEMA.into(),
        job: "job".into(),
        host: "n001".into(),
        world_size: 2,
        started_ns: i64::try_from(now_ns).expect("the time fits"),
        ..LaunchRecord::default()
    };
    launch.write(directory.path()).expect("it can be written");
    let _newest = ring_in(directory.path(), 0, 0);
    poll_until_a_restart_leaves_rank_0(&mut poll);
}

/// Polls a source once. Returns whether the poll is a restart, and the ranks that it shows.
fn restart_and_ranks(source: &mut RingSource) -> (bool, Vec<Rank>) {
    let poll = source.poll(Instant::now() + Duration::from_secs(20));
    let poll = poll.expect("there are rings");
    let observations = poll.observations.iter();
    let ranks = observations.map(|observation| observation.rank);
    (poll.restart, ranks.collect())
}

/// Polls a source that shows ranks 0 and 1 until a poll is a restart, which shows rank 0 alone.
fn poll_until_a_restart_leaves_rank_0(poll: &mut impl FnMut() -> (bool, Vec<Rank>)) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match poll() {
            (true, ranks) => break assert_eq!(ranks, [0]),
            (false, ranks) => assert_eq!(ranks, [0, 1]),
        }
        assert!(Instant::now() < deadline, "the restart is not noticed");
        std::thread::sleep(Duration::from_millis(10));
    }
}
