//! Tests ranks that go on beside an unfinished operation: on another thread, or without a wait for a message.

use crate::job::{State, alive, at, record};
use rcomm_recorder::model::{Entry, OpType, Peer, ProcessGroupInfo, Rank, Signature};
use rcomm_recorder::publish::{Dump, DumpGroup, ThreadInfo};
use rcomm_verdict::{Code, Finding, Policy, Severity, Verdict, analyze};

const RANKS: Rank = 4;
/// When the records were read.
const NOW: f64 = 20.0;

fn live() -> Policy {
    Policy {
        snapshot: true,
        now_ns: Some(at(NOW)),
        ..Policy::default()
    }
}

fn first(findings: &[Finding]) -> Option<&Finding> {
    let mut errors = findings.iter();
    errors.find(|finding| finding.severity == Severity::Error)
}

/// Adds an all_reduce every half second in a second group, by a thread of its own. The newest one is issued
/// `before` the records are read and has not ended.
fn with_a_second_thread(mut dump: Dump, before: f64) -> Dump {
    let members = dump.groups[0].info.ranks.clone();
    dump.groups.push(DumpGroup {
        info: ProcessGroupInfo {
            id: 1,
            name: "1".to_owned(),
            desc: "heartbeat".to_owned(),
            ranks: members,
        },
        place: None,
        status: None,
    });
    for entry in &mut dump.entries {
        entry.thread = Some(0);
    }
    let newest = NOW - before;
    let mut beats: Vec<(f64, State)> = (0..)
        .map(|nth| f64::from(nth) / 2.0)
        .take_while(|&then| then < newest - 0.1)
        .map(|then| (then, State::Done(then + 0.01)))
        .collect();
    beats.push((newest, State::Pending));
    let beats = record(0, RANKS, &beats).entries.into_iter();
    dump.entries.extend(beats.map(|entry| Entry {
        group: 1,
        thread: Some(1),
        ..entry
    }));
    dump.entries.sort_by_key(|entry| entry.time_created_ns);
    for (entry, number) in dump.entries.iter_mut().zip(1..) {
        entry.record_id = number;
    }
    dump.threads = ["main", "beat"]
        .map(|name| ThreadInfo {
            id: name.to_owned(),
            name: name.to_owned(),
        })
        .to_vec();
    dump
}

#[test]
fn a_thread_that_goes_on_does_not_excuse_its_rank() {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let job = |before: [f64; 4]| -> Vec<Dump> {
        let of_rank = |(rank, before)| {
            let operations = if rank == 2 { &waits[..1] } else { &waits };
            let mut dump = with_a_second_thread(record(rank, RANKS, operations), before);
            for entry in &mut dump.entries {
                entry.timeout_ms = 600_000;
            }
            alive(dump, NOW)
        };
        (0..RANKS).zip(before).map(of_rank).collect()
    };
    // All ranks are in a heartbeat that began just now; or rank 0 has not come to it yet.
    let together = [0.02; 4];
    let mut apart = job(together);
    apart[0].entries.pop();
    for dumps in [job(together), apart] {
        for policy in [Policy::default(), live()] {
            let report = analyze(&dumps, &policy);
            let found = first(&report.findings).expect("three ranks have waited for 19 s");
            assert_eq!(
                (found.code, &found.culprit_ranks[..], report.verdict),
                (Code::E101, &[2][..], Verdict::Stuck),
                "{}",
                found.sentence
            );
            let group = found.group.as_ref().map(|group| group.desc.as_str());
            assert_eq!(group, Some("default_pg"));
            let says = |text: &&String| text.starts_with("cross_group_deadlock");
            assert_eq!(found.ruled_out.iter().find(says), None);
            // Rank 2 is in a heartbeat.
            let says = |text: &&String| text.contains("waits in no operation");
            assert_eq!(found.doubts.iter().find(says), None);
        }
    }
    // Once the heartbeat is stuck as well, it may be why.
    let report = analyze(&job([18.9; 4]), &live());
    assert_ne!(
        first(&report.findings).map(|found| found.code),
        Some(Code::E101)
    );
}

/// Adds messages on the world to the record of a rank: of which kind, with whom, when each was issued, and its state.
fn exchanges(mut dump: Dump, messages: &[(OpType, Rank, f64, State)]) -> Dump {
    for &(op, peer, issued, state) in messages {
        let mut entry = record(0, 1, &[(issued, state)]).entries.remove(0);
        let number = dump.entries.len() as u64 + 1;
        (entry.record_id, entry.op_id) = (number, number);
        (entry.op, entry.peer, entry.is_p2p) = (op, Peer::Rank(peer), true);
        let newest = dump.entries.iter().map(|entry| entry.p2p_seq_id).max();
        entry.p2p_seq_id = newest.unwrap_or(0) + 1;
        entry.collective_seq_id = 1;
        entry.signature = dump.signatures.len() as u32;
        let shape = vec![vec![64]];
        let (inputs, outputs) = match op {
            OpType::Send => (shape, Vec::new()),
            _ => (Vec::new(), shape),
        };
        dump.signatures.push(Signature {
            backend: "gloo".to_owned(),
            op_name: op.name().to_owned(),
            input_dtypes: vec!["Float".to_owned(); inputs.len()],
            output_dtypes: vec!["Float".to_owned(); outputs.len()],
            input_sizes: inputs,
            output_sizes: outputs,
            ..Signature::default()
        });
        dump.entries.push(entry);
    }
    dump
}

fn on_gloo(rank: Rank, operations: &[(f64, State)]) -> Dump {
    let mut dump = record(rank, RANKS, operations);
    dump.signatures[0].backend = "gloo".to_owned();
    dump
}

#[test]
fn a_receive_that_has_arrived_is_not_what_a_rank_with_another_wait_is_in() {
    let past = [(0.0, State::Done(0.1))];
    // Rank 1 waits for its send to rank 2, and has not come to wait for its receive from rank 0.
    let (done, open) = (State::Done(1.1), State::Pending);
    let ring = |rank: Rank, messages: &[(OpType, Rank, f64, State)]| {
        let mut dump = exchanges(on_gloo(rank, &past), messages);
        if rank != 1 {
            let mut next = record(rank, RANKS, &[(0.0, State::Done(0.1)), (2.0, open)]).entries;
            let mut entry = next.pop().expect("two operations");
            entry.record_id = dump.entries.len() as u64 + 1;
            dump.entries.push(entry);
        }
        alive(dump, NOW)
    };
    let dumps = [
        ring(
            0,
            &[(OpType::Send, 1, 1.0, done), (OpType::Recv, 3, 1.0, done)],
        ),
        ring(
            1,
            &[(OpType::Send, 2, 1.0, open), (OpType::Recv, 0, 1.0, open)],
        ),
        ring(2, &[(OpType::Send, 3, 1.0, done)]),
        ring(
            3,
            &[(OpType::Send, 0, 1.0, done), (OpType::Recv, 2, 1.0, done)],
        ),
    ];
    for policy in [Policy::default(), live()] {
        let report = analyze(&dumps, &policy);
        let found = first(&report.findings).expect("rank 2 posted no receive");
        assert_eq!(
            (found.code, &found.culprit_ranks[..]),
            (Code::E120, &[2][..]),
            "{}",
            found.sentence
        );
        assert!(!found.sentence.contains("tags"), "{}", found.sentence);
    }
}

#[test]
fn a_send_that_was_received_is_no_wait() {
    let past = [(0.0, State::Done(0.1))];
    let sends = [(OpType::Send, 1, 1.0, State::Pending)];
    let receives = [(OpType::Recv, 0, 1.0, State::Done(1.1))];
    let dumps = [
        alive(exchanges(on_gloo(0, &past), &sends), NOW),
        alive(exchanges(on_gloo(1, &past), &receives), NOW),
        alive(on_gloo(2, &past), NOW),
        alive(on_gloo(3, &past), NOW),
    ];
    for policy in [Policy::default(), live()] {
        let report = analyze(&dumps, &policy);
        assert_eq!(first(&report.findings), None);
        assert_ne!(report.verdict, Verdict::Stuck);
    }
}

#[test]
fn a_rank_that_waits_for_nothing_may_still_post_the_message_that_another_awaits() {
    let past = [(0.0, State::Done(0.1))];
    let waits_since = |then| {
        let receives = [(OpType::Recv, 1, then, State::Pending)];
        let mut dumps = vec![exchanges(on_gloo(0, &past), &receives)];
        dumps.extend((1..RANKS).map(|rank| on_gloo(rank, &past)));
        let dumps: Vec<Dump> = dumps.into_iter().map(|dump| alive(dump, NOW)).collect();
        let report = analyze(&dumps, &live());
        let found = first(&report.findings).expect("rank 1 posted no send");
        assert_eq!(
            (found.code, &found.culprit_ranks[..]),
            (Code::E120, &[1][..])
        );
        // Rank 1 has sent it nothing before, either.
        let next = "find out why rank 1 posted no send for rank 0";
        assert!(found.next.starts_with(next), "{}", found.next);
        found.confidence
    };
    // The time-out is 30 s.
    assert!(waits_since(NOW - 6.0) <= 0.6);
    assert!(waits_since(NOW - 10.0) <= 0.75);
    assert!(waits_since(NOW - 16.0) >= 0.9);
}

#[test]
fn a_receive_that_arrived_may_not_have_been_waited_for() {
    let past = [(0.0, State::Done(0.1))];
    let waits = [past[0], (2.0, State::Pending)];
    let sends = [(OpType::Send, 1, 1.0, State::Done(1.1))];
    let receives = [(OpType::Recv, 0, 1.0, State::Pending)];
    let mut sender = exchanges(on_gloo(0, &past), &sends);
    let mut next = on_gloo(0, &waits).entries.pop().expect("two operations");
    next.record_id = 3;
    sender.entries.push(next);
    let dumps = [
        alive(sender, NOW),
        alive(exchanges(on_gloo(1, &past), &receives), NOW),
        alive(on_gloo(2, &waits), NOW),
        alive(on_gloo(3, &waits), NOW),
    ];
    for policy in [Policy::default(), live()] {
        let report = analyze(&dumps, &policy);
        let found = first(&report.findings).expect("three ranks wait for rank 1");
        assert_eq!(found.code, Code::E120);
        assert_eq!(found.alternatives, [vec![1], vec![0]]);
        assert!(
            found.sentence.contains("has not come to wait for it"),
            "{}",
            found.sentence
        );
        assert!(!found.sentence.contains("rank 1 has waited"));
    }
}
