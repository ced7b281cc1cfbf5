//! Jobs of unknown size, and jobs that begin again.

use super::*;
use rcomm_verdict::LaterAttempt;

/// Records of four ranks as gloo's own recorder leaves them, in a group other than the world: none states how many
/// ranks the job has.
fn dumps_of_unknown_size() -> Vec<Dump> {
    let simulation = Simulation::new(Situation::Healthy, 4, 0);
    let mut dumps = simulation.dumps_at(45_000_000);
    for dump in &mut dumps {
        dump.recorder = Recorder::NativeGloo;
        dump.identity.world_size = None;
        for group in &mut dump.groups {
            group.info.desc = "tp".to_owned();
        }
    }
    dumps
}

fn analyzing(sources: &[&str]) -> Live {
    let sources = sources.iter().map(|source| (*source).to_owned());
    Live::new(LiveOptions::default(), analyze, sources.collect())
}

#[test]
fn the_highest_rank_seen_states_no_number_of_ranks() {
    for (stated, may_have_more) in [(None, true), (Some(4), false)] {
        let mut live = analyzing(&["test"]);
        let mut poll = poll(dumps_of_unknown_size()).expect("the poll is made of dumps");
        poll.world_size = stated;
        live.observe(0, Ok(poll), moment(1.0));
        let snapshot = live.refresh(moment(1.0));
        let input = &snapshot
            .expect("the first poll gives a snapshot")
            .report
            .input;
        assert_eq!(input.may_have_more, may_have_more, "{stated:?}");
        assert_eq!((input.ranks_read, input.ranks_expected), (4, 4));
    }
}

#[test]
fn a_silent_rank_of_a_job_of_unknown_size_stays_in_the_report() {
    let mut live = analyzing(&["test"]);
    live.observe(0, poll(dumps_of_unknown_size()), moment(1.0));
    live.refresh(moment(1.0))
        .expect("the first poll gives a snapshot");
    let failed = |rank: Rank| Observation {
        rank,
        part: 0,
        liveness: Liveness::Unknown,
        seen: Seen::Failed("refused".into()),
    };
    let mut later = unchanged(0..3).expect("the poll is made of observations");
    later.observations.push(failed(3));
    live.observe(0, Ok(later), moment(60.0));
    let snapshot = live.refresh(moment(60.0)).expect("a rank fell silent");
    let ranks: Vec<(Rank, bool)> = (snapshot.report.ranks.iter())
        .map(|row| (row.rank, row.read))
        .collect();
    assert_eq!(ranks, [(0, true), (1, true), (2, true), (3, false)]);
    let input = &snapshot.report.input;
    assert_eq!((input.ranks_read, input.ranks_expected), (3, 4));
    assert!(input.may_have_more);
    let states = States::of_snapshot(&snapshot, &Default::default());
    assert_eq!(states.rank(3), RankState::Silent);
    assert_eq!(states.rank(2), RankState::Ok);
}

#[test]
fn a_job_of_unknown_size_still_has_one_when_all_its_ranks_fell_silent() {
    for (stated, may_have_more) in [(None, true), (Some(4), false)] {
        let mut live = analyzing(&["test"]);
        let mut first = poll(dumps_of_unknown_size()).expect("the poll is made of dumps");
        first.world_size = stated;
        live.observe(0, Ok(first), moment(1.0));
        live.refresh(moment(1.0))
            .expect("the first poll gives a snapshot");
        let mut later = unchanged(0..4).expect("the poll is made of observations");
        later.world_size = stated;
        for observation in &mut later.observations {
            observation.seen = Seen::Failed("refused".into());
        }
        live.observe(0, Ok(later), moment(60.0));
        let snapshot = live.refresh(moment(60.0)).expect("the ranks fell silent");
        let input = &snapshot.report.input;
        assert_eq!((input.ranks_read, input.ranks_expected), (0, 4));
        assert_eq!(input.may_have_more, may_have_more, "{stated:?}");
    }
}

#[test]
fn a_number_of_ranks_that_no_job_can_have_is_not_taken_as_stated() {
    let mut live = analyzing(&["test"]);
    let mut poll = poll(dumps_of_unknown_size()).expect("the poll is made of dumps");
    poll.world_size = Some(rcomm_verdict::MAX_WORLD + 1);
    live.observe(0, Ok(poll), moment(1.0));
    let snapshot = live.refresh(moment(1.0));
    let snapshot = snapshot.expect("the first poll gives a snapshot");
    let input = &snapshot.report.input;
    assert!(input.may_have_more);
    assert_eq!((input.ranks_read, input.ranks_expected), (4, 4));
}

#[test]
fn a_later_attempt_on_another_host_is_in_the_sentence_and_in_the_snapshot() {
    let simulation = Simulation::new(Situation::Healthy, 4, 0);
    let mut live = analyzing(&["rings", "another host"]);
    let mut ended = poll(simulation.dumps_at(45_000_000)).expect("the poll is made of dumps");
    for observation in &mut ended.observations {
        observation.liveness = Liveness::Dead;
        if let Seen::Changed(dump) = &mut observation.seen {
            dump.identity.reason = RingReader::OWNER_IS_DEAD.into();
        }
    }
    live.observe(0, Ok(ended), moment(10.0));
    let snapshot = live
        .refresh(moment(10.0))
        .expect("the first poll gives a snapshot");
    let end = snapshot.report.end.clone().expect("no process is left");
    assert_eq!((end.attempt, end.later_attempt), (0, None), "{end:?}");
    let other = Poll {
        later_attempt: Some(LaterAttempt {
            attempt: 1,
            ranks: vec![2, 3],
        }),
        ..Poll::default()
    };
    live.observe(1, Ok(other), moment(11.0));
    let snapshot = live.refresh(moment(11.0)).expect("an attempt has begun");
    let later = snapshot.later_attempt.as_ref().map(|later| later.attempt);
    assert_eq!(later, Some(1));
    let end = snapshot.report.end.clone().expect("no process is left");
    assert_eq!((end.attempt, end.later_attempt), (0, Some(1)), "{end:?}");
    let lead = snapshot.report.lead().map(|finding| &finding.sentence);
    let sentence = lead.unwrap_or(&end.sentence);
    assert!(
        sentence.starts_with(
            "attempt 1 has begun, and ranks 2 and 3 run and have no ring yet; of attempt 0:"
        ),
        "{sentence}"
    );
}
