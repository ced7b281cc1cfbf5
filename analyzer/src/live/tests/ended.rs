//! Tests processes that end while a view watches them.

use super::*;

/// A poll of these dumps in which the processes of some ranks are gone.
fn poll_with_dead(dumps: Vec<Dump>, dead: &[Rank]) -> Result<Poll, SourceError> {
    let mut poll = poll(dumps)?;
    for observation in &mut poll.observations {
        if let Seen::Changed(dump) = &mut observation.seen
            && dead.contains(&observation.rank)
        {
            observation.liveness = Liveness::Dead;
            dump.identity.reason = RingReader::OWNER_IS_DEAD.into();
        }
    }
    Ok(poll)
}

#[test]
fn a_rank_killed_after_a_hang_was_shown_is_a_cause_or_a_victim() {
    let simulation = Simulation::new(Situation::StuckRank, 16, 0);
    let culprit = simulation.culprit();
    let fault = simulation.fault_ns() as f64 / 1e9;
    let dumps = |now: f64| simulation.dumps_at((now * 1e9) as i64);
    for killed in [culprit, (culprit + 1) % 16] {
        let mut live = Live::new(
            LiveOptions::default(),
            rcomm_verdict::analyze,
            vec!["test".into()],
        );
        let hung = fault + 20.0;
        live.observe(0, poll(dumps(hung)), moment(hung));
        let report = live
            .refresh(moment(hung))
            .expect("the first poll gives a snapshot")
            .report;
        assert_eq!(
            (report.verdict, report.findings[0].code),
            (Verdict::Stuck, Code::E101)
        );
        // The end of the rank is old enough to be judged.
        let later = hung + 2.0;
        let recorded = |(new, old): (Dump, Dump)| match new.identity.rank == Some(killed) {
            true => old,
            false => new,
        };
        let records = dumps(later).into_iter().zip(dumps(hung)).map(recorded);
        live.observe(
            0,
            poll_with_dead(records.collect(), &[killed]),
            moment(later),
        );
        let report = live
            .refresh(moment(later))
            .expect("the end of a rank gives a snapshot")
            .report;
        assert_eq!(report.verdict, Verdict::Stuck);
        let gone = report.findings.iter().find(|f| f.code == Code::E150);
        let gone = gone.expect("a finding names the rank that is gone");
        assert_eq!(gone.culprit_ranks, [killed], "{}", gone.sentence);
        assert!(gone.sentence.contains("is gone"), "{}", gone.sentence);
        let first = &report.findings[0];
        if killed == culprit {
            assert_eq!(first.id, gone.id);
        } else {
            // The killed rank died while it waited, so its end is not the cause.
            assert_eq!((first.code, gone.caused_by), (Code::E101, Some(first.id)));
            assert!(gone.sentence.contains("it was inside"), "{}", gone.sentence);
        }
    }
}

#[test]
fn a_process_that_ended_between_operations_is_reported_when_it_is_overdue() {
    let simulation = Simulation::new(Situation::Healthy, 4, 0);
    // At this time, no operation is pending.
    let dumps = || simulation.dumps_at(45_000_000);
    let mut live = Live::new(
        LiveOptions::default(),
        rcomm_verdict::analyze,
        vec!["test".into()],
    );
    live.observe(0, poll_with_dead(dumps(), &[2]), moment(0.1));
    let report = live
        .refresh(moment(0.1))
        .expect("the first poll gives a snapshot")
        .report;
    assert!(
        report.findings.is_empty(),
        "a job that ends looks like this, too"
    );
    let due = live
        .due()
        .expect("a job is judged again even if nothing changes");
    assert!((1.0..2.0).contains(&due.as_secs_f64()), "{due:?}");
    let later = || {
        let mut later = unchanged(0..4).expect("the observations succeeded");
        later.observations[2].liveness = Liveness::Dead;
        Ok(later)
    };
    live.observe(0, later(), moment(2.0));
    let report = live
        .refresh(moment(2.0))
        .expect("an end that has settled gives a snapshot")
        .report;
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    let due = live
        .due()
        .expect("a job is judged again even if nothing changes");
    assert!((4.0..6.0).contains(&due.as_secs_f64()), "{due:?}");
    live.observe(0, later(), moment(6.0));
    let report = live
        .refresh(moment(6.0))
        .expect("a job that is due gives a snapshot")
        .report;
    let finding = &report.findings[0];
    assert_eq!(
        (finding.code, &finding.culprit_ranks[..]),
        (Code::E150, &[2][..])
    );
    assert!(
        finding
            .sentence
            .contains("the others have issued no operation since"),
        "{}",
        finding.sentence
    );
    // If all have ended, no rank is missed.
    let mut live = Live::new(
        LiveOptions::default(),
        rcomm_verdict::analyze,
        vec!["test".into()],
    );
    live.observe(0, poll_with_dead(dumps(), &[0, 1, 2, 3]), moment(60.0));
    let report = live
        .refresh(moment(60.0))
        .expect("the first poll gives a snapshot")
        .report;
    assert!(report.findings.is_empty(), "{:?}", report.findings);
}

#[test]
fn a_rank_that_raised_an_exception_is_named_without_a_change_of_its_record() {
    let simulation = Simulation::new(Situation::StuckRank, 4, 0);
    let culprit = simulation.culprit();
    // The others wait for less than the time after which an operation is overdue.
    let raised = simulation.fault_ns() as f64 / 1e9 + 0.5;
    let mut dumps = simulation.dumps_at((raised * 1e9) as i64);
    for dump in &mut dumps {
        if dump.identity.rank == Some(culprit) {
            let status = dump.status.get_or_insert_default();
            status.phase = "raised ValueError: bad batch".into();
            status.phase_since_ns = (raised * 1e9) as i64;
        }
    }
    let mut live = Live::new(
        LiveOptions::default(),
        rcomm_verdict::analyze,
        vec!["test".into()],
    );
    live.observe(0, poll(dumps), moment(raised));
    let report = live
        .refresh(moment(raised))
        .expect("the first poll gives a snapshot")
        .report;
    assert!(
        report.findings.iter().all(|f| f.culprit_ranks.is_empty()),
        "the program may catch the exception: {:?}",
        report.findings
    );
    let due = live.due().expect("the exception is about to settle");
    assert!(due <= Duration::from_secs_f64(raised + 1.0), "{due:?}");
    let later = moment(raised + 1.1);
    live.observe(0, unchanged(0..4), later);
    let report = live
        .refresh(later)
        .expect("an exception that has settled gives a snapshot")
        .report;
    assert_eq!(report.verdict, Verdict::Stuck);
    assert_eq!(report.findings[0].culprit_ranks, [culprit]);
}
