//! Tests verdicts on processes that a signal or a debugger has stopped.

use crate::job::{State, alive, at, dead, launch, record, stopped};
use crate::launched::judge_launched;
use crate::root;
use rcomm_recorder::model::{OpType, Peer, Rank};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Code, Policy, Verdict, analyze};

#[test]
fn a_stopped_rank_is_named_whether_it_came_or_not() {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let between = [(0.0, State::Done(0.1))];
    for (operations, word) in [(&waits[..], "is inside"), (&between, "never issued")] {
        let dumps = [
            alive(record(0, 2, &waits), 9.0),
            stopped(record(1, 2, operations), 1.2, 9.0),
        ];
        let report = analyze(&dumps, &Policy::default());
        assert_eq!(root(&report), (Verdict::Stuck, Code::E151, &[1][..]));
        let sentence = &report.findings[0].sentence;
        assert!(
            sentence.starts_with(
                "the process of rank 1 has been stopped by a signal since 13:00:01 UTC: it "
            ) && sentence.contains(word),
            "{sentence}"
        );
        let [waits, mut held] = dumps;
        held.identity.reason = rcomm_recorder::publish::RingReader::OWNER_IS_TRACED.to_owned();
        let finding = analyze(&[waits, held], &Policy::default())
            .findings
            .remove(0);
        assert!(finding.sentence.contains("held by a debugger"));
        assert!(
            finding.next.contains("TracerPid /proc/101/status"),
            "{}",
            finding.next
        );
    }
}

#[test]
fn the_watchdog_of_a_stopped_rank_is_no_finding_of_its_own() {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let between = [(0.0, State::Done(0.1))];
    let judge = |of_others: &[(f64, State)]| {
        let dumps = [
            alive(record(0, 2, of_others), 95.0),
            stopped(record(1, 2, &between), 1.2, 95.0),
        ];
        analyze(&dumps, &Policy::default()).findings
    };
    let codes: Vec<Code> = judge(&waits).iter().map(|finding| finding.code).collect();
    assert_eq!(codes, [Code::E151]);
    // No rank waits for it: only the silence of its watchdog shows. The process has to go on before stacks say more.
    let findings = judge(&between);
    let codes: Vec<Code> = findings.iter().map(|finding| finding.code).collect();
    assert_eq!(codes, [Code::E140]);
    assert!(findings[0].next.contains("kill -CONT 101"), "{findings:?}");
}

#[test]
fn the_record_of_a_stopped_rank_is_not_out_of_date() {
    // The rank was stopped inside an operation in which it had done its part: the other completed it after the stop.
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let went_on = [
        (0.0, State::Done(0.1)),
        (1.0, State::Done(1.3)),
        (1.4, State::Pending),
    ];
    let mut dumps = [
        alive(record(0, 2, &went_on), 9.0),
        stopped(record(1, 2, &inside), 1.2, 9.0),
    ];
    // Rings that a live view reads state no time.
    for dump in &mut dumps {
        dump.identity.dump_time_ns = 0;
    }
    let policy = Policy {
        now_ns: Some(at(9.0)),
        ..Policy::default()
    };
    let report = analyze(&dumps, &policy);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E151, &[1][..]));
    assert!(report.problems.is_empty(), "{:?}", report.problems);
    // Whether rank 1 is still inside is not known: its peer has left.
    let sentence = &report.findings[0].sentence;
    for says in [
        ": it never issued all_reduce #3 ",
        ", where 1 rank has waited 7.6 s; its last event is of all_reduce #2 ",
    ] {
        assert!(sentence.contains(says), "{sentence}");
    }
}

#[test]
fn a_stopped_rank_leads_once_those_that_waited_for_it_are_gone() {
    let between = [(0.0, State::Done(0.1))];
    // The others had waited for long before their ends, or had just begun.
    for began in [1.0, 8.9] {
        let waits = [(0.0, State::Done(0.1)), (began, State::Pending)];
        let mut dumps = [
            dead(record(0, 3, &waits), 9.0),
            dead(record(1, 3, &waits), 9.0),
            stopped(record(2, 3, &between), 1.2, 20.0),
        ];
        for dump in &mut dumps {
            dump.identity.dump_time_ns = 0;
        }
        let policy = Policy {
            snapshot: true,
            now_ns: Some(at(20.0)),
            ..Policy::default()
        };
        let report = analyze(&dumps, &policy);
        assert_eq!(root(&report), (Verdict::Stuck, Code::E151, &[2][..]));
        let sentence = &report.findings[0].sentence;
        assert!(
            sentence.contains(", where 2 ranks waited, whose processes are gone; it last issued "),
            "{sentence}"
        );
        // The ends of the others are a consequence of the stop.
        let findings = report.findings.iter();
        let roots = findings.filter(|it| it.caused_by.is_none());
        assert_eq!(roots.count(), 1, "{report:?}");
        assert_eq!(report.findings[0].victim_ranks, [0, 1]);
        let findings = report.findings.iter();
        let mut accused = findings.flat_map(|it| it.culprit_ranks.iter());
        assert!(accused.all(|&rank| rank == 2), "{report:?}");
    }
}

#[test]
fn a_job_whose_processes_are_all_stopped_is_one_finding() {
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let between = [(0.0, State::Done(0.1))];
    for (others, last) in [
        (&inside[..], &inside[..]),
        (&inside, &between),
        (&between, &between),
    ] {
        let dumps = [
            stopped(record(0, 3, others), 1.2, 9.0),
            stopped(record(1, 3, others), 1.3, 9.0),
            stopped(record(2, 3, last), 1.2, 9.0),
        ];
        let report = analyze(&dumps, &Policy::default());
        assert_eq!(root(&report), (Verdict::Stuck, Code::E151, &[0, 1, 2][..]));
        assert_eq!(report.findings.len(), 1, "{:?}", report.findings);
        let sentence = &report.findings[0].sentence;
        assert!(
            sentence.starts_with(
                "the processes of ranks 0-2 have been stopped by a signal since 13:00:01 UTC: these are all ranks of the job"
            ),
            "{sentence}"
        );
        if others.len() == between.len() {
            continue;
        }
        // Rank 0 is not stopped: it waits for the others.
        let mut one_waits = dumps.clone();
        one_waits[0] = alive(record(0, 3, &inside), 9.0);
        let report = analyze(&one_waits, &Policy::default());
        assert!(!report.findings[0].culprit_ranks.contains(&0));
    }
}

#[test]
fn a_stopped_rank_is_named_when_the_job_was_killed_as_soon_as_it_was_called_stuck() {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let between = [(0.0, State::Done(0.1))];
    // The watchdogs' last rounds were up to a tenth of a second before the ends.
    let dumps = [
        dead(record(0, 3, &waits), 5.9),
        dead(record(1, 3, &between), 1.0),
        dead(record(2, 3, &waits), 5.8),
    ];
    let report = analyze(&dumps, &Policy::default());
    assert_eq!(root(&report), (Verdict::Stuck, Code::E151, &[1][..]));
    // As long as the launcher has not recorded the ends, the records do not show that rank 1 was stopped.
    let mut launch = launch(None, &[(None, Some(9), 6.0); 3]);
    launch.ranks.iter_mut().for_each(|rank| rank.end = None);
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(6.1)),
        launches: vec![launch],
        ..Policy::default()
    };
    let report = analyze(&dumps, &policy);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
}

#[test]
fn a_stopped_rank_is_named_when_the_last_signs_of_life_are_old() {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    // On a busy host the watchdogs' last rounds were one and a half seconds before the ends, which the launcher
    // has noticed.
    let dumps = [
        dead(record(0, 3, &waits), 4.7),
        dead(record(1, 3, &waits), 1.1),
        dead(record(2, 3, &waits), 4.8),
    ];
    let killed = |then| (None, Some(15), then);
    let ends = [killed(6.3), killed(8.3), killed(6.3)];
    let report = judge_launched(&dumps, launch(Some((15, 6.2)), &ends));
    assert_eq!(root(&report), (Verdict::Stuck, Code::E151, &[1][..]));
}

#[test]
fn a_stopped_rank_is_named_although_its_ring_was_read_while_the_process_was_being_killed() {
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    // Rank 1 was stopped inside the operation. When its ring was read, SIGKILL had continued its process, which had not
    // ended yet. The launcher's record, read afterward, has all ends.
    let mut dumps = [
        dead(record(0, 3, &inside), 6.9),
        alive(record(1, 3, &inside), 9.0),
        dead(record(2, 3, &inside), 6.9),
    ];
    let status = dumps[1].status.as_mut().expect("the ring has a status");
    status.heartbeat_ns = at(1.1);
    let ends = [(15, 7.0), (9, 9.01), (15, 7.0)].map(|(signal, then)| (None, Some(signal), then));
    let ended = launch(Some((15, 6.95)), &ends);
    let report = judge_launched(&dumps, ended.clone());
    assert_eq!(root(&report), (Verdict::Stuck, Code::E151, &[1][..]));
    // Nor does it matter if the other rings were read just before their ends.
    let [first, _, last] = &mut dumps;
    *first = alive(first.clone(), 6.9);
    *last = alive(last.clone(), 6.9);
    let report = judge_launched(&dumps, ended);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E151, &[1][..]));
}

/// Changes operations of a record of two ranks into messages between them: those at these positions.
fn as_messages(dump: &mut Dump, positions: std::ops::Range<usize>, op: OpType, peer: Rank) {
    for entry in &mut dump.entries[positions] {
        (entry.op, entry.is_p2p, entry.peer) = (op, true, Peer::Rank(peer));
        (entry.p2p_seq_id, entry.collective_seq_id) = (entry.collective_seq_id, 0);
    }
}

#[test]
fn a_message_is_not_taken_for_one_that_was_received_before_it_was_sent() {
    // Rank 0 receives one message every tenth of a second, and is stopped in the wait for the fifth. Rank 1 has sent
    // that, and three more, since a small message needs no receiver; it waits in a collective.
    let done = |at: f64| (at, State::Done(at + 0.01));
    let mut received: Vec<(f64, State)> = (0..4).map(|nth| done(f64::from(nth) / 10.0)).collect();
    received.push((0.4, State::Pending));
    let mut sent: Vec<(f64, State)> = (0..8).map(|nth| done(f64::from(nth) / 10.0)).collect();
    sent.push((0.8, State::Pending));
    let mut receiver = record(0, 2, &received);
    as_messages(&mut receiver, 0..5, OpType::Recv, 1);
    let mut sender = record(1, 2, &sent);
    as_messages(&mut sender, 0..8, OpType::Send, 0);
    sender.entries[8].collective_seq_id = 9;
    // The rings do not hold the first messages, nor a collective that both ranks have completed.
    for entry in receiver.entries.iter_mut().chain(&mut sender.entries) {
        entry.record_id += 100;
    }
    let dumps = [stopped(receiver, 0.35, 9.0), alive(sender, 9.0)];
    let report = analyze(&dumps, &Policy::default());
    assert_eq!(root(&report), (Verdict::Stuck, Code::E151, &[0][..]));
}
