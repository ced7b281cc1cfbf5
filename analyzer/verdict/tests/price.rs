//! Tests the prices of findings: how much time their causes cost.

use rcomm_recorder::model::{Entry, EntryState, OpType, Peer, ProcessGroupInfo, Rank, Signature};
use rcomm_recorder::publish::{Dump, DumpGroup, Identity};
use rcomm_verdict::{Code, Finding, Policy, Report, analyze};

const MIB: u64 = 1 << 20;

/// One operation of a rank.
struct TimedOperation {
    op: OpType,
    /// The size of the input, and of the output.
    bytes: u64,
    /// When it was issued, ms after the job began.
    at_ms: f64,
    /// How long it took, or `None` if that is not recorded.
    duration_ms: Option<f32>,
}

fn dump(rank: Rank, operations: &[TimedOperation]) -> Dump {
    let ranks: Vec<Rank> = (0..4).collect();
    let mut dump = Dump {
        identity: Identity {
            rank: Some(rank),
            ..Identity::default()
        },
        groups: vec![DumpGroup {
            info: ProcessGroupInfo {
                id: 0,
                name: "0".into(),
                desc: "default_pg".into(),
                ranks: ranks.into(),
            },
            place: None,
            status: None,
        }],
        ..Dump::default()
    };
    for (seq, operation) in (1..).zip(operations) {
        let created = 1_790_000_000_000_000_000 + (operation.at_ms * 1e6) as i64;
        let took = operation.duration_ms.unwrap_or(1.0);
        let ended = created + (f64::from(took) * 1e6) as i64;
        dump.signatures.push(Signature {
            op_name: operation.op.name().to_owned(),
            backend: "nccl".to_owned(),
            input_sizes: vec![vec![operation.bytes]],
            output_sizes: vec![vec![operation.bytes]],
            input_dtypes: vec!["Byte".to_owned()],
            output_dtypes: vec!["Byte".to_owned()],
            ..Signature::default()
        });
        dump.entries.push(Entry {
            record_id: seq,
            collective_seq_id: seq,
            op_id: seq,
            p2p_seq_id: 0,
            group: 0,
            signature: dump.signatures.len() as u32 - 1,
            stack: None,
            op: operation.op,
            state: EntryState::Completed,
            retired: true,
            is_p2p: false,
            peer: Peer::None,
            root: None,
            reduce_op: None,
            time_created_ns: created,
            time_discovered_started_ns: created,
            time_discovered_completed_ns: ended,
            duration_ms: operation.duration_ms,
            graph_id: None,
            timeout_ms: 0,
            thread: None,
        });
    }
    dump
}

fn report(operations: impl Fn(Rank) -> Vec<TimedOperation>) -> Report {
    let dumps: Vec<Dump> = (0..4).map(|rank| dump(rank, &operations(rank))).collect();
    analyze(&dumps, &Policy::default())
}

fn finding_of(report: &Report, code: Code) -> &Finding {
    let found = report.findings.iter().find(|finding| finding.code == code);
    found.unwrap_or_else(|| panic!("no {code} in {:?}", report.findings))
}

/// Exchanges in which rank 0 moves five times as much as each of the others, one every 20 ms.
fn exchanges(rank: Rank, duration_ms: Option<f32>) -> impl Iterator<Item = TimedOperation> {
    (0..20).map(move |nth| TimedOperation {
        op: OpType::AllToAllSingle,
        bytes: if rank == 0 { 50 * MIB } else { 10 * MIB },
        at_ms: f64::from(nth) * 20.0,
        duration_ms,
    })
}

/// A row of small operations after the exchanges.
fn small_operations(duration_ms: Option<f32>) -> impl Iterator<Item = TimedOperation> {
    (0..600).map(move |nth| TimedOperation {
        op: OpType::AllReduce,
        bytes: 64,
        at_ms: 400.0 + f64::from(nth) * 0.2,
        duration_ms,
    })
}

#[test]
fn equal_parts_would_save_what_the_largest_member_takes_longer_than_an_average_one() {
    let report = report(|rank| exchanges(rank, Some(10.0)).collect());
    let found = finding_of(&report, Code::W230);
    let price = found.price.expect("durations were measured");
    // On average a member moves 20 of the largest one's 50 MiB.
    assert!((price.ms - 20.0 * 10.0 * 0.6).abs() < 1e-3, "{price:?}");
    assert!((price.share - 120.0 / 390.0).abs() < 0.01, "{price:?}");
    let ending = "without that the job would take 120 ms less, 30.8 % of its time";
    assert!(found.sentence.ends_with(ending), "{}", found.sentence);
}

#[test]
fn one_operation_for_a_row_would_save_the_latency_of_the_others() {
    let report = report(|_| small_operations(Some(0.1)).collect());
    let price = finding_of(&report, Code::W240)
        .price
        .expect("durations were measured");
    assert!((price.ms - 599.0 * 0.1).abs() < 1e-3, "{price:?}");
}

#[test]
fn what_was_not_measured_has_no_price() {
    let uneven = report(|rank| exchanges(rank, None).collect());
    assert_eq!(finding_of(&uneven, Code::W230).price, None);
    let tiny = report(|_| small_operations(None).collect());
    assert_eq!(finding_of(&tiny, Code::W240).price, None);
}

#[test]
fn prices_together_are_at_most_the_job_s_time() {
    // Each small operation takes longer than the time between two of them: they overlap.
    let report = report(|rank| {
        exchanges(rank, Some(18.0))
            .chain(small_operations(Some(5.0)))
            .collect()
    });
    let prices: Vec<f64> = report
        .findings
        .iter()
        .filter_map(|finding| Some(finding.price?.share))
        .collect();
    assert_eq!(prices.len(), 2, "{:?}", report.findings);
    assert!(prices.iter().sum::<f64>() <= 1.0 + 1e-9, "{prices:?}");
}
