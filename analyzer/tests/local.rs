//! Tests which job the live views show on a node. These tests are a program of their own because the newest job is
//! shown, and ranks that another test starts would be newer.
#![forbid(unsafe_code)]

use rcomm_analyzer::source::{
    JobChoice, Liveness, LocalSource, Poll, ProcessStacks, Seen, Source, SourceError, StackRequests,
};
use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// The ring of the only rank of this job.
fn ring_of(job: &str, directory: &Path) -> FlightRecorder {
    let mut config = RecorderConfig::new(job.to_owned(), 0, 1);
    config.placement = Placement::Dir(directory.to_owned());
    FlightRecorder::create(&config).expect("a ring can be made in a fresh directory")
}

/// Starts a process that looks like this rank of a job of two ranks without rings.
fn process_of(job: &str, rank: u32) -> Child {
    let child = Command::new("sleep")
        .arg("600")
        .env("RANK", rank.to_string())
        .envs([("WORLD_SIZE", "2"), ("TORCHELASTIC_RUN_ID", job)])
        .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")])
        .spawn();
    child.expect("the program `sleep` starts")
}

/// Polls until `find` returns a value.
fn poll_until<T>(source: &mut LocalSource, mut find: impl FnMut(&Poll) -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let polled = source.poll(Instant::now() + Duration::from_secs(5));
        if let Some(found) = polled.as_ref().ok().and_then(&mut find) {
            return found;
        }
        assert!(Instant::now() < deadline, "not within a minute: {polled:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_job_without_rings_is_shown_until_it_ends_and_a_job_with_rings_after_it() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let choice = JobChoice::of(None);
    let mut source = LocalSource::new(directory.path().to_owned(), choice.clone());
    let mut rank = process_of("without-rings", 1);
    let pid = format!("process {} ", rank.id());
    poll_until(&mut source, |poll| {
        let [observation] = poll.observations.as_slice() else {
            return None;
        };
        let Seen::Failed(reason) = &observation.seen else {
            return None;
        };
        let is_living_rank = observation.rank == 1 && observation.liveness == Liveness::Alive;
        let is_shown = is_living_rank && reason.starts_with(&pid);
        (is_shown && poll.world_size == Some(2)).then_some(())
    });

    // The job is shown while its rank is alive, even if a job with rings starts, or a newer one without rings. Requests
    // go to the shown job.
    let _ring = ring_of("with-rings", directory.path());
    let mut newer = process_of("newer", 0);
    let stacks = ProcessStacks::new(choice.clone());
    for _ in 0..3 {
        let poll = source
            .poll(Instant::now() + Duration::from_secs(5))
            .expect("the job's rank is alive");
        assert!(!poll.restart);
        assert!(matches!(poll.observations[0].seen, Seen::Failed(_)));
        let taken = stacks.take(Instant::now() + Duration::from_secs(60));
        let taken = taken.expect("the state of the rank's thread can be read");
        assert_eq!(taken.taken, [1], "{taken:?}");
    }
    newer.kill().expect("a child can be killed");
    newer.wait().expect("a killed child can be waited for");
    rank.kill().expect("a child can be killed");
    rank.wait().expect("a killed child can be waited for");
    poll_until(&mut source, |poll| {
        let is_ring =
            matches!(&poll.observations[..], [ring] if matches!(ring.seen, Seen::Changed(_)));
        is_ring.then(|| assert!(poll.restart))
    });
    let refused = stacks.take(Instant::now() + Duration::from_secs(5));
    assert!(
        matches!(refused, Err(SourceError::Nothing { .. })),
        "rings are shown: {refused:?}"
    );
}

#[test]
fn the_processes_of_a_chosen_job_without_rings_are_shown() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let _ring = ring_of("with-rings", directory.path());
    let choice = JobChoice::of(Some("chosen".to_owned()));
    let mut source = LocalSource::new(directory.path().to_owned(), choice);
    let nothing = source.poll(Instant::now() + Duration::from_secs(5));
    assert!(
        matches!(nothing, Err(SourceError::Nothing { .. })),
        "{nothing:?}"
    );
    let mut rank = process_of("chosen", 1);
    let pid = format!("process {} ", rank.id());
    poll_until(&mut source, |poll| {
        let is_shown = poll.observations.iter().any(|observation| {
            matches!(&observation.seen, Seen::Failed(reason) if reason.starts_with(&pid))
        });
        is_shown.then_some(())
    });
    rank.kill().expect("a child can be killed");
    rank.wait().expect("a killed child can be waited for");
}

#[test]
fn the_ring_of_a_chosen_job_that_has_ended_is_shown() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    ring_of("ended", directory.path()).mark_closed();
    let choice = JobChoice::of(Some("ended".to_owned()));
    let mut source = LocalSource::new(directory.path().to_owned(), choice);
    poll_until(&mut source, |poll| {
        let observation = poll.observations.first()?;
        matches!(observation.seen, Seen::Changed(_)).then_some(())
    });
}
