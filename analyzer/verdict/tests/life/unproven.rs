//! Tests that no finding concludes or states what the records do not prove.

use crate::job::{State, alive, at, record};
use rcomm_recorder::model::{Entry, EntryState, OpType, Peer, ProcessGroupInfo, Rank, Signature};
use rcomm_recorder::publish::{Dump, DumpGroup, Recorder, ThreadInfo};
use rcomm_verdict::{Analysis, Code, Finding, Policy, Report, Severity, Verdict, analyze};

fn live(dumps: &[Dump], now: f64) -> Report {
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(now)),
        ..Policy::default()
    };
    analyze(dumps, &policy)
}

/// The report on records that are judged at 13:01.
fn judge_later(dumps: &[Dump]) -> Report {
    let policy = Policy {
        now_ns: Some(at(60.0)),
        ..Policy::default()
    };
    analyze(dumps, &policy)
}

fn errors(report: &Report) -> Vec<&Finding> {
    let errors = report.findings.iter();
    errors
        .filter(|finding| finding.severity == Severity::Error)
        .collect()
}

fn group(id: u32, name: &str, desc: &str, ranks: &[Rank]) -> DumpGroup {
    DumpGroup {
        info: ProcessGroupInfo {
            id,
            name: name.to_owned(),
            desc: desc.to_owned(),
            ranks: ranks.into(),
        },
        place: None,
        status: None,
    }
}

/// The dump by gloo's own recorder of a rank whose job consists of pairs: it names the members of the pair, which was
/// made last, and those of no other group. All operations are on the pair, but with `barrier` the last one is a barrier
/// on the world.
fn of_a_pair(rank: Rank, operations: &[(f64, State)], barrier: bool) -> Dump {
    let mut dump = record(rank, 4, operations);
    dump.recorder = Recorder::NativeGloo;
    dump.status = None;
    dump.identity.world_size = None;
    dump.signatures[0].backend = "gloo".to_owned();
    let pair = rank / 2;
    dump.groups = vec![
        group(1 + pair, &(1 + pair).to_string(), "tp", &[]),
        group(0, "0", "default_pg", &[]),
        group(9, "", "", &[2 * pair, 2 * pair + 1]),
    ];
    for (entry, number) in dump.entries.iter_mut().zip(0..) {
        entry.record_id = number;
        entry.state = EntryState::Scheduled;
        entry.time_discovered_started_ns = 0;
        entry.time_discovered_completed_ns = 0;
    }
    let last = dump.entries.last_mut().filter(|_| barrier);
    if let Some(last) = last {
        (last.group, last.op, last.signature) = (1, OpType::Barrier, 1);
        last.collective_seq_id = 1;
        dump.signatures.push(Signature {
            backend: "gloo".to_owned(),
            op_name: "barrier".to_owned(),
            ..Signature::default()
        });
    } else {
        // The recorder learns of a group with its first operation.
        dump.groups.remove(1);
    }
    dump
}

fn paced(last: State) -> Vec<(f64, State)> {
    let done = (0..10).map(|second| (f64::from(second), State::Done(f64::from(second) + 0.1)));
    done.chain([(10.0, last)]).collect()
}

#[test]
fn a_rank_that_calls_a_barrier_out_of_turn_is_named_and_not_the_one_that_waits_for_it() {
    let waits = paced(State::Pending);
    let done = paced(State::Done(10.1));
    // Ranks 2 and 3 have nothing to do with rank 1, and go on.
    let dumps = [
        of_a_pair(0, &waits, false),
        of_a_pair(1, &waits, true),
        of_a_pair(2, &done, false),
        of_a_pair(3, &done, false),
    ];
    let report = judge_later(&dumps);
    let found = errors(&report);
    let blamed: Vec<&[Rank]> = found
        .iter()
        .map(|finding| &finding.culprit_ranks[..])
        .collect();
    assert_eq!(blamed, [&[1][..]], "{:?}", report.findings);
    let sentence = &found[0].sentence;
    assert!(
        sentence.starts_with("rank 1 went to barrier #1 on group default_pg before all_reduce #11"),
        "{sentence}"
    );
    assert_eq!(found[0].cycle, [1, 0]);
    assert!(found[0].confidence <= 0.75, "{}", found[0].confidence);
    let expected =
        "gloo records no completions: ranks 2 and 3 may be stuck in all_reduce #11 on group tp";
    let mut doubts = found[0].doubts.iter();
    assert!(
        doubts.any(|doubt| doubt.starts_with(expected)),
        "{:?}",
        found[0].doubts
    );
    // Of a second pair that goes on, the same is doubted.
    let mut dumps = Vec::from(dumps);
    dumps.extend([4, 5].map(|rank| of_a_pair(rank, &done, false)));
    let of_six = judge_later(&dumps);
    let doubts = &errors(&of_six)[0].doubts;
    let expected = "ranks 2 and 3 may be stuck in all_reduce #11 on group tp/2, ranks 4 and 5 may be stuck in \
                    all_reduce #11 on group tp/3; all members have joined these";
    assert!(
        doubts.iter().any(|doubt| doubt.contains(expected)),
        "{doubts:?}"
    );
    // The members of the world are not those of the pair.
    let world = report.groups.iter();
    let world = world.filter(|group| group.group.desc == "default_pg");
    let members: Vec<&[Rank]> = world.map(|world| &world.group.ranks[..]).collect();
    assert_eq!(members, [&[0, 1, 2, 3][..]]);
}

#[test]
fn dumps_that_name_the_newest_group_do_not_show_how_many_ranks_there_are() {
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    // Ranks 0 and 1 of four are in a barrier of the world, and ranks 2 and 3 left no dump. Their operation on the pair
    // shows that the pair is not the world.
    let dumps = [of_a_pair(0, &inside, true), of_a_pair(1, &inside, true)];
    let report = judge_later(&dumps);
    assert!(report.input.may_have_more);
    assert_eq!(errors(&report), Vec::<&Finding>::new());
    assert_eq!(report.verdict, Verdict::Inconclusive);
    // With the number of ranks stated, it is known who is missing.
    let stated = Policy {
        world_size: Some(4),
        now_ns: Some(at(60.0)),
        ..Policy::default()
    };
    let report = analyze(&dumps, &stated);
    assert!(!report.input.may_have_more);
    assert_eq!(
        (report.input.ranks_read, report.input.ranks_expected),
        (2, 4)
    );
    assert_eq!(errors(&report)[0].code, Code::E102);
    // A record that states the members of the world leaves nothing open.
    let report = judge_later(&[record(0, 2, &inside), record(1, 2, &inside)]);
    assert!(!report.input.may_have_more);
    let mut dumps = [of_a_pair(0, &inside, true), of_a_pair(1, &inside, true)];
    for dump in &mut dumps {
        dump.groups[1].info.ranks = (0..4).collect();
    }
    let report = judge_later(&dumps);
    assert!(!report.input.may_have_more);
    assert_eq!(report.input.ranks_expected, 4);
}

/// Three ranks whose program runs ahead of its device. Ranks 0 and 1 issued operations on the world, which rank 2 has
/// not reached, and one among them on a group of their own. None of these has completed. Their rings hold 39 operations
/// each; those of the ranks in `dropped` no longer hold the one on the group.
fn run_ahead(dropped: &[Rank], rank_2: &[(f64, State)]) -> Vec<Dump> {
    let of_rank = |rank: Rank| {
        let operations: Vec<(f64, State)> = match rank {
            2 => rank_2.to_vec(),
            _ => (0..60)
                .map(|nth| (f64::from(nth) / 10.0, State::Pending))
                .collect(),
        };
        let mut dump = record(rank, 3, &operations);
        dump.recorder = Recorder::Nccl;
        dump.status = None;
        dump.identity.pid = 0;
        dump.identity.host.clear();
        dump.identity.world_size = None;
        dump.signatures[0].backend = "nccl".to_owned();
        dump.groups.push(group(1, "1", "pair", &[0, 1]));
        for entry in &mut dump.entries {
            entry.state = match entry.state {
                EntryState::Started => EntryState::Scheduled,
                other => other,
            };
            entry.time_discovered_started_ns = 0;
        }
        if rank < 2 {
            // The operation on the pair is the 21st.
            let pair = &mut dump.entries[20];
            (pair.group, pair.collective_seq_id) = (1, 1);
            for entry in &mut dump.entries[21..] {
                entry.collective_seq_id -= 1;
            }
            let first = if dropped.contains(&rank) { 21 } else { 20 };
            dump.entries.drain(..first);
            dump.entries.truncate(39);
        }
        dump
    };
    (0..3).map(of_rank).collect()
}

#[test]
fn a_small_ring_without_a_completed_operation_is_no_dump_of_active_operations() {
    // The dump of rank 2 holds a completed operation, is missing, or is empty, which says nothing about the size of
    // rings: rank 1 may have issued what its ring lacks.
    let done = [(0.0, State::Done(0.1))];
    for dumps in [
        run_ahead(&[1], &done),
        run_ahead(&[1], &[])[..2].to_vec(),
        run_ahead(&[1], &[]),
    ] {
        let report = judge_later(&dumps);
        assert_eq!(errors(&report), Vec::<&Finding>::new());
        assert_eq!(report.verdict, Verdict::Inconclusive);
        let problem = report
            .problems
            .iter()
            .find(|problem| problem.code == Code::N302);
        let sentence = &problem.expect("the rings lack operations").sentence;
        let expected = "the oldest entry in the rings of ranks 0 and 1 has not completed";
        assert!(sentence.starts_with(expected), "{sentence}");
    }
}

#[test]
fn dumps_of_active_operations_are_known_by_what_differs_between_them() {
    // The dump of a rank that holds only its unfinished operations, of which there are this many.
    let of_rank = |rank: Rank, unfinished: u32| {
        let done = (0..4).map(|nth| (f64::from(nth), State::Done(f64::from(nth) + 0.1)));
        let pending = (4..4 + unfinished).map(|nth| (f64::from(nth), State::Pending));
        let mut dump = record(rank, 3, &done.chain(pending).collect::<Vec<_>>());
        dump.recorder = Recorder::Nccl;
        dump.status = None;
        dump.signatures[0].backend = "nccl".to_owned();
        dump.entries
            .retain(|entry| entry.state != EntryState::Completed);
        dump
    };
    // All are inside the first, or rank 1 never issued it.
    let expected = [
        ([3, 1, 3], Code::E135, &[][..]),
        ([3, 0, 2], Code::E101, &[1]),
    ];
    for (unfinished, code, culprits) in expected {
        let dumps: Vec<Dump> = (0..)
            .zip(unfinished)
            .map(|(rank, held)| of_rank(rank, held))
            .collect();
        let report = judge_later(&dumps);
        let mut problems = report.problems.iter();
        assert!(
            !problems.any(|problem| problem.code == Code::N302),
            "{:?}",
            report.problems
        );
        let finding = errors(&report)[0];
        assert_eq!((finding.code, &finding.culprit_ranks[..]), (code, culprits));
    }
}

/// Two ranks with an all_reduce each half second, up to 5 s with `later`, else up to 2 s. Rank 0 issued a send to
/// rank 1 at 2.2 s, which was never received.
pub(super) fn sends(later: bool) -> [Dump; 2] {
    let last = if later { 10 } else { 4 };
    let operations: Vec<(f64, State)> = (0..=last)
        .map(|half| f64::from(half) / 2.0)
        .map(|issued| (issued, State::Done(issued + 0.1)))
        .collect();
    let mut dumps = [record(0, 2, &operations), record(1, 2, &operations)];
    for dump in &mut dumps {
        dump.threads = vec![ThreadInfo {
            id: "main".to_owned(),
            name: "main".to_owned(),
        }];
        for entry in &mut dump.entries {
            entry.thread = Some(0);
        }
    }
    let entries = &mut dumps[0].entries;
    let send = Entry {
        op: OpType::Send,
        state: EntryState::Started,
        retired: false,
        is_p2p: true,
        p2p_seq_id: 1,
        collective_seq_id: 0,
        peer: Peer::Rank(1),
        time_created_ns: at(2.2),
        time_discovered_started_ns: at(2.2),
        time_discovered_completed_ns: 0,
        ..entries[0].clone()
    };
    entries.insert(5, send);
    for (entry, number) in entries.iter_mut().zip(1..) {
        entry.record_id = number;
    }
    dumps
}

#[test]
fn a_rank_that_went_on_after_a_send_is_not_said_to_wait_in_it() {
    let report = live(&sends(true).map(|dump| alive(dump, 20.0)), 20.0);
    let found = errors(&report);
    assert_eq!(
        (found[0].code, &found[0].culprit_ranks[..]),
        (Code::E120, &[1][..])
    );
    assert!(found[0].confidence <= 0.6, "{}", found[0].confidence);
    assert!(
        !found[0].sentence.contains("has waited"),
        "{}",
        found[0].sentence
    );
    let expected = "rank 1 never posted the receive for send #1 to rank 1 on group default_pg, which rank 0 issued 18 \
                    s ago by a call that did not block";
    assert!(
        found[0].sentence.starts_with(expected),
        "{}",
        found[0].sentence
    );
    assert_eq!(found[0].alternatives, [vec![1], vec![0]]);
    // A rank that did nothing else since may wait in the send.
    let report = live(&sends(false).map(|dump| alive(dump, 20.0)), 20.0);
    let sentence = &errors(&report)[0].sentence;
    assert!(
        sentence.contains("that rank 0 has waited 18 s for in send #1"),
        "{sentence}"
    );
}

/// The report on PyTorch's dumps of two ranks. Their files were written `written` s after rank 0 came to wait for rank
/// 1. Operations have this time-out.
fn in_files(written: f64, timeout_ms: u64) -> Report {
    let mut analysis = Analysis::new(Policy::default());
    for rank in 0..2 {
        let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
        let operations = if rank == 0 { &waits[..] } else { &waits[..1] };
        let mut dump = record(rank, 2, operations);
        dump.recorder = Recorder::Hook;
        dump.status = None;
        for entry in &mut dump.entries {
            entry.timeout_ms = timeout_ms;
        }
        analysis.note_written(Some(at(1.0 + written)));
        analysis.add(&dump);
    }
    analysis.finish()
}

#[test]
fn a_file_that_took_seconds_to_write_does_not_make_a_wait_old() {
    for (written, timeout_ms, stuck) in [
        (7.5, 600_000, false),
        (14.0, 600_000, false),
        (16.0, 600_000, true),
        (7.5, 10_000, true),
    ] {
        let report = in_files(written, timeout_ms);
        let is_stuck = report.verdict == Verdict::Stuck;
        assert_eq!(is_stuck, stuck, "{written} s, {:?}", report.findings);
        assert!(is_stuck || report.verdict == Verdict::Inconclusive);
    }
}

#[test]
fn of_two_ranks_that_wait_in_nothing_one_may_wait_for_the_other() {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let job = |phases: [&str; 2]| {
        let dumps = (0..4).map(|rank| {
            let operations = if rank < 2 { &waits[..] } else { &waits[..1] };
            let mut dump = record(rank, 4, operations);
            if let Some(status) = dump.status.as_mut().filter(|_| rank >= 2) {
                status.phase = phases[rank as usize - 2].to_owned();
                status.phase_since_ns = at(0.5);
            }
            alive(dump, 100.0)
        });
        live(&dumps.collect::<Vec<_>>(), 100.0)
    };
    let report = job(["", ""]);
    let finding = errors(&report)[0];
    assert_eq!(
        (finding.code, &finding.culprit_ranks[..]),
        (Code::E101, &[2, 3][..])
    );
    assert!(finding.confidence <= 0.75, "{}", finding.confidence);
    let mut doubts = finding.doubts.iter();
    assert!(doubts.any(|doubt| doubt.starts_with("one of ranks 2 and 3 may wait for another")));
    // Where each names what it does, both are at fault.
    let report = job(["load data", "load data"]);
    assert!(errors(&report)[0].confidence > 0.9);
}

#[test]
fn a_rank_that_lives_and_is_missed_for_seconds_may_be_at_work() {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let at_age = |seconds: f64, phase: &str, timeout_ms: u64| {
        let dumps = (0..4).map(|rank| {
            let operations = if rank == 0 { &waits[..1] } else { &waits[..] };
            let mut dump = record(rank, 4, operations);
            for entry in &mut dump.entries {
                entry.timeout_ms = timeout_ms;
            }
            if let Some(status) = dump.status.as_mut().filter(|_| rank == 0) {
                status.phase = phase.to_owned();
                status.phase_since_ns = at(0.5);
            }
            alive(dump, 1.0 + seconds)
        });
        live(&dumps.collect::<Vec<_>>(), 1.0 + seconds)
    };
    for (seconds, phase, timeout_ms, is_likely) in [
        (12.0, "", 600_000, false),
        (12.0, "save", 600_000, false),
        (12.0, "raised ValueError: bad", 600_000, true),
        (12.0, "", 20_000, true),
        (90.0, "", 600_000, true),
    ] {
        let report = at_age(seconds, phase, timeout_ms);
        let finding = errors(&report)[0];
        assert_eq!(
            (finding.code, &finding.culprit_ranks[..]),
            (Code::E101, &[0][..])
        );
        assert_eq!(finding.confidence > 0.9, is_likely, "{finding:?}");
        let expected = "rank 0 waits in no operation and its process lives: a checkpoint";
        let mut doubts = finding.doubts.iter();
        assert_eq!(doubts.any(|doubt| doubt.starts_with(expected)), !is_likely);
        assert!(finding.sentence.contains(phase), "{}", finding.sentence);
    }
}
