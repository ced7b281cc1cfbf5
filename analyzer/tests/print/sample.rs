//! Makes reports, written by hand, for tests of the printers.

use rcomm_analyzer::{
    Code, Evidence, Finding, FrameRef, GroupRef, GroupReport, Input, InstanceReport, InstanceState,
    Problem, RankReport, Report, SeqKind, StackNode, Verdict, Wait,
};
use rcomm_recorder::model::EntryState;

pub(crate) fn group(name: &str, desc: &str, ranks: &[u32]) -> GroupRef {
    GroupRef {
        name: name.into(),
        desc: desc.into(),
        ranks: ranks.into(),
    }
}

fn finding(id: u32, code: Code, sentence: &str) -> Finding {
    Finding {
        id,
        confidence: 0.97,
        ..Finding::new(code, vec![], sentence.into())
    }
}

fn empty(verdict: Verdict) -> Report {
    Report {
        schema: Report::SCHEMA.into(),
        verdict,
        findings: vec![],
        now: vec![],
        problems: vec![],
        end: None,
        input: Input {
            files: 8,
            ranks_expected: 8,
            ranks_read: 8,
            may_have_more: false,
            entries: 1024,
            logs: None,
        },
        groups: vec![],
        ranks: vec![],
        in_flight: vec![],
        waits: vec![],
        stacks: vec![],
    }
}

pub(crate) fn healthy() -> Report {
    empty(Verdict::Healthy)
}

pub(crate) fn running() -> Report {
    let mut report = empty(Verdict::Running);
    report.in_flight.push(instance());
    report
}

pub(crate) fn inconclusive() -> Report {
    let mut report = empty(Verdict::Inconclusive);
    report.input = Input {
        files: 1,
        ranks_expected: 0,
        ranks_read: 0,
        may_have_more: false,
        entries: 0,
        logs: None,
    };
    report.problems.push(Problem::unreadable_dump(
        "dumps/rank_0",
        "the file is empty; nothing could be salvaged",
    ));
    report
}

pub(crate) fn warning() -> Report {
    let mut report = empty(Verdict::Slow);
    let mut slow = finding(
        1,
        Code::W220,
        "rank 2 arrives late in 58 of 60 operations on dp; the others lost 11.8 % of the job's time",
    );
    slow.culprit_ranks = vec![2];
    slow.next = "compare host n031 with its neighbours: CPU, power and temperature".into();
    report.findings.push(slow);
    report
}

fn instance() -> InstanceReport {
    InstanceReport {
        group: group("12", "dp", &[1, 5, 6]),
        seq: 9133,
        seq_kind: SeqKind::CollectiveSeqId,
        op: "all_reduce".into(),
        bytes: 536_870_912,
        least_bytes: None,
        joined: vec![1, 5],
        missing: vec![6],
        unknown: vec![],
        state: InstanceState::Waiting,
        error: None,
        age_ms: Some(102_000.0),
        overdue: true,
    }
}

/// One root with two layers of waiting ranks, a consequence, a second root, notes, and every table.
pub(crate) fn stuck() -> Report {
    let mut report = empty(Verdict::Stuck);
    let dp = group("12", "dp", &[1, 5, 6]);
    let tp = group("3", "tp", &[4, 5]);

    let mut root = finding(
        1,
        Code::E101,
        "rank 6 never issued all_reduce #9133 on group dp; it was last seen in load (data.py:88), and 2 ranks have waited 102 s",
    );
    root.culprit_ranks = vec![6];
    root.victim_ranks = vec![1, 4, 5];
    root.victim_count = 3;
    root.group = Some(dp.clone());
    root.seq = Some(9133);
    root.seq_kind = Some(SeqKind::CollectiveSeqId);
    root.op = Some("all_reduce".into());
    root.evidence = vec![Evidence {
        rank: 5,
        record_id: 811,
        state: EntryState::Started,
        group: None,
        seq: 9133,
        op: "all_reduce".into(),
    }];
    root.ruled_out =
        vec!["op_mismatch: both ranks that arrived issued all_reduce of the same size".into()];
    root.frames = vec![FrameRef {
        rank: 6,
        when: "last_seen".into(),
        name: "load".into(),
        filename: "/srv/train/input/data.py".into(),
        line: 88,
    }];
    root.diff = vec![
        "- ranks 1, 5: all_reduce #9133 on dp at step (train.py:212)".into(),
        "+ rank 6: nothing after all_gather #48211 on tp at load (data.py:88)".into(),
    ];
    root.next =
        "look at rank 6 in data.py:88; its last completed operation was all_gather #48211 on tp"
            .into();

    let mut consequence = finding(
        2,
        Code::E101,
        "rank 5 has not arrived in all_gather #48211 on tp, because it waits in all_reduce #9133 on dp",
    );
    consequence.caused_by = Some(1);
    consequence.culprit_ranks = vec![5];

    let mut other = finding(
        3,
        Code::W250,
        "the slowest all_to_all on ep took 412 s of its time-out of 600 s",
    );
    other.next = "raise the time-out of group ep, or shorten that operation".into();

    report.findings = vec![root, consequence, other];
    report.problems = vec![Problem::unreadable_dump(
        "dumps/rank_7",
        "the file is cut after 812 of its entries; those were used",
    )];
    report.waits = vec![
        Wait {
            rank: 1,
            on: vec![6],
            group: dp.clone(),
            op: "all_reduce".into(),
            seq: 9133,
            seq_kind: SeqKind::CollectiveSeqId,
        },
        Wait {
            rank: 5,
            on: vec![6],
            group: dp.clone(),
            op: "all_reduce".into(),
            seq: 9133,
            seq_kind: SeqKind::CollectiveSeqId,
        },
        Wait {
            rank: 4,
            on: vec![5],
            group: tp.clone(),
            op: "all_gather".into(),
            seq: 48212,
            seq_kind: SeqKind::CollectiveSeqId,
        },
    ];
    report.in_flight = vec![instance()];
    report.groups = vec![GroupReport {
        group: dp,
        backend: "nccl".into(),
        last_seq: Some(9133),
        min_seq: Some(9132),
        ranks_read: 3,
        in_flight: 1,
        oldest_ms: Some(102_000.0),
        lag_p50_ms: Some(0.1),
        lag_p99_ms: None,
        busbw_gbs: Some(412.0),
        timeout_ms: 600_000,
    }];
    report.ranks = (0..8)
        .map(|rank| RankReport {
            rank,
            host: if rank < 4 { "n000" } else { "n001" }.into(),
            pid: 4000 + rank,
            read: rank != 7,
            phase: (rank == 6).then(|| "load data".to_owned()),
            step: (rank == 6).then_some(48_211),
            pending: usize::from(rank == 1),
            failure: None,
            lost: 0,
            last_call: (rank != 7).then(|| "all_gather #48211 on tp".to_owned()),
            lag_p50_ms: None,
            lag_share: None,
        })
        .collect();
    report.input.ranks_read = 7;
    report.stacks = vec![StackNode {
        name: "main".into(),
        filename: "train.py".into(),
        line: 12,
        ranks: (0..7).collect(),
        children: vec![
            StackNode {
                name: "step".into(),
                filename: "train.py".into(),
                line: 212,
                ranks: vec![0, 1, 2, 3, 4, 5],
                children: vec![],
            },
            StackNode {
                name: "load".into(),
                filename: "data.py".into(),
                line: 88,
                ranks: vec![6],
                children: vec![],
            },
        ],
    }];
    report
}

/// Two ranks that wait for each other, without a culprit.
pub(crate) fn cycle() -> Report {
    let mut report = empty(Verdict::Stuck);
    let left = group("1", "left", &[0, 1]);
    let right = group("2", "right", &[0, 1]);
    let mut cycle = finding(
        1,
        Code::E130,
        "ranks 0 and 1 wait on each other: 0 in barrier #3 on left, 1 in barrier #3 on right",
    );
    cycle.confidence = 0.5;
    cycle.cycle = vec![0, 1];
    cycle.alternatives = vec![vec![0], vec![1]];
    cycle.victim_ranks = vec![0, 1];
    cycle.victim_count = 2;
    cycle.next = "make both ranks use left and right in the same order".into();
    report.findings.push(cycle);
    for (rank, on, group) in [(0, 1, left), (1, 0, right)] {
        report.waits.push(Wait {
            rank,
            on: vec![on],
            group,
            op: "barrier".into(),
            seq: 3,
            seq_kind: SeqKind::CollectiveSeqId,
        });
    }
    report
}
