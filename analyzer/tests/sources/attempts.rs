//! Rings of a job whose ranks begin another attempt.

use rcomm_analyzer::source::{RingSource, Source as _};
use rcomm_recorder::model::Rank;
use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};
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
    let mut poll = || {
        let poll = source.poll(Instant::now() + Duration::from_secs(20));
        let poll = poll.expect("there are rings");
        let ranks: Vec<Rank> = poll.observations.iter().map(|it| it.rank).collect();
        (poll.restart, ranks)
    };
    let _first = [ring_of(0, 0), ring_of(1, 0)];
    assert_eq!(poll(), (false, vec![0, 1]));
    let _second = ring_of(0, 1);
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match poll() {
            (true, ranks) => break assert_eq!(ranks, [0]),
            (false, ranks) => assert_eq!(ranks, [0, 1]),
        }
        assert!(
            Instant::now() < deadline,
            "the later attempt is not noticed"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    // The other rank follows.
    let _third = ring_of(1, 1);
    while poll().1 != [0, 1] {
        assert!(Instant::now() < deadline, "the second rank is not noticed");
        std::thread::sleep(Duration::from_millis(10));
    }
}
