//! Measures the bus bandwidth of a group's collectives, as nccl-tests defines it.
//!
//! The rank that arrives last is in a collective only for the time of the transfer, so the shortest of the members'
//! durations is the time of the collective. Only durations that a backend measured count: the time from issue to the
//! noticed completion includes the sleep of a watchdog. The bus bandwidth is the bytes of the whole buffer, times the
//! share of them that each rank's link carries with any algorithm, by this time (nccl-tests, `doc/PERFORMANCE.md`).

use crate::align::signature::Call;
use crate::align::{Aligned, GroupIx};
use rcomm_recorder::model::Pattern;
use std::collections::HashMap;

/// Collectives of fewer bytes do not count: their durations are mostly latency.
const LEAST_BYTES: u64 = 1 << 20;

/// At most this many newest collectives of a member are used.
const NEWEST: usize = 512;

/// One collective, summed up over the members that were read so far.
#[derive(Clone, Copy)]
struct Instance {
    seq: u32,
    shortest_ms: f32,
    /// The bytes that a link of the bus carries for the collective.
    bus_bytes: f64,
    /// The number of entries that were counted: one of each member, unless `is_block`.
    members: usize,
    /// The member that was counted last.
    last_member: usize,
    /// Whether a member has several entries under this number: a coalesced block.
    is_block: bool,
}

/// The median bus bandwidth, GB/s, of a group's newest collectives that need all members and are of at least 1 MiB;
/// `None` if none of these has a measured duration on every member.
pub(crate) fn busbw_gbs(aligned: &Aligned<'_>, group: GroupIx) -> Option<f64> {
    let ranks = aligned.groups[group].ranks.len();
    let mut bus_bytes_of_call: HashMap<u32, Option<f64>> = HashMap::new();
    // By sequence number, ascending. A collective that the first member lacks is not on every member.
    let mut instances: Vec<Instance> = Vec::new();
    for (member_index, &(record, lane)) in
        (aligned.groups[group].lanes.iter().flatten()).enumerate()
    {
        let lane = &aligned.lanes[record][lane];
        let done = &lane.collectives[..lane.pending_from];
        let newest = &done[done.len().saturating_sub(NEWEST)..];
        let mut last = None;
        let mut index = 0;
        for op in newest.iter().map(|&position| aligned.op(record, position)) {
            if op.duration_ms <= 0.0 {
                continue;
            }
            let bus_bytes = match last {
                Some((call, bus_bytes)) if call == op.call => bus_bytes,
                _ => *bus_bytes_of_call
                    .entry(op.call)
                    .or_insert_with(|| bus_bytes(aligned.shared.calls.get(op.call), ranks)),
            };
            last = Some((op.call, bus_bytes));
            let Some(bus_bytes) = bus_bytes else {
                continue;
            };
            while instances
                .get(index)
                .is_some_and(|instance| instance.seq < op.seq)
            {
                index += 1;
            }
            if member_index == 0 && instances.get(index).is_none() {
                instances.push(Instance {
                    seq: op.seq,
                    shortest_ms: f32::MAX,
                    bus_bytes: 0.0,
                    members: 0,
                    last_member: usize::MAX,
                    is_block: false,
                });
            }
            if let Some(instance) = instances
                .get_mut(index)
                .filter(|instance| instance.seq == op.seq)
            {
                instance.shortest_ms = instance.shortest_ms.min(op.duration_ms);
                instance.bus_bytes = instance.bus_bytes.max(bus_bytes);
                instance.is_block |= instance.last_member == member_index;
                instance.last_member = member_index;
                instance.members += 1;
            }
        }
    }
    let complete = instances
        .iter()
        .filter(|instance| instance.members == ranks && !instance.is_block);
    let mut rates: Vec<f64> = complete
        .map(|instance| instance.bus_bytes / f64::from(instance.shortest_ms) / 1e6)
        .collect();
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied()
}

/// The bytes that a link of the bus carries for a collective: the size by nccl-tests' definition times its bus factor.
/// `None` for a small collective, in a group of one rank, and for an operation that members may leave before the last
/// arrives or that has no bus factor.
fn bus_bytes(call: &Call, ranks: usize) -> Option<f64> {
    if ranks < 2 || !call.op.needs_all_members() {
        return None;
    }
    let signature = &call.signature;
    let bytes = match call.op.pattern() {
        Pattern::AllGather => signature.output_bytes(),
        // The result may be recorded as large as the input.
        Pattern::ReduceScatter | Pattern::AllToAll => signature.input_bytes(),
        Pattern::AllReduce
        | Pattern::Reduce
        | Pattern::Broadcast
        | Pattern::Barrier
        | Pattern::Gather
        | Pattern::Scatter
        | Pattern::Send
        | Pattern::Recv
        | Pattern::Block
        | Pattern::Agreement
        | Pattern::OneSided
        | Pattern::Unknown => call.bytes(),
    };
    let factor = call.op.bus().factor(ranks)?;
    (bytes >= LEAST_BYTES).then_some(bytes as f64 * factor)
}

#[cfg(test)]
mod tests {
    use super::bus_bytes;
    use crate::align::signature::Call;
    use crate::judge::{Policy, analyze};
    use rcomm_recorder::model::{
        Entry, EntryState, OpType, Peer, ProcessGroupInfo, Rank, Signature,
    };
    use rcomm_recorder::publish::{Dump, DumpGroup, Identity};

    const MIB: u64 = 1 << 20;

    /// The dump of one of two ranks with collectives of floats: for each the operation, the elements of input and
    /// output, and the duration, ms.
    fn dump(rank: Rank, calls: &[(OpType, [u64; 2], f32)]) -> Dump {
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
                    ranks: [0, 1].into(),
                },
                place: None,
                status: None,
            }],
            ..Dump::default()
        };
        for (index, &(op, [input, output], duration_ms)) in calls.iter().enumerate() {
            dump.signatures.push(Signature {
                backend: "nccl".into(),
                op_name: op.name().into(),
                input_sizes: vec![vec![input]],
                output_sizes: vec![vec![output]],
                input_dtypes: vec!["Float".into()],
                output_dtypes: vec!["Float".into()],
                ..Signature::default()
            });
            let created = 1_790_000_000_000_000_000 + index as i64 * 1_000_000_000;
            dump.entries.push(Entry {
                record_id: index as u64 + 1,
                collective_seq_id: index as u64 + 1,
                p2p_seq_id: 0,
                op_id: index as u64 + 1,
                group: 0,
                signature: index as u32,
                stack: None,
                op,
                state: EntryState::Completed,
                retired: true,
                is_p2p: false,
                peer: Peer::None,
                root: None,
                reduce_op: None,
                time_created_ns: created,
                time_discovered_started_ns: created,
                time_discovered_completed_ns: created + (duration_ms * 1e6) as i64,
                duration_ms: Some(duration_ms),
                graph_id: None,
                timeout_ms: 0,
                thread: None,
            });
        }
        dump
    }

    fn measured(one: &[(OpType, [u64; 2], f32)], other: &[(OpType, [u64; 2], f32)]) -> Option<f64> {
        let report = analyze(&[dump(0, one), dump(1, other)], &Policy::default());
        report.groups[0].busbw_gbs
    }

    #[test]
    fn the_shortest_duration_is_the_time_of_the_transfer() {
        // 4 MiB, of which a link between two ranks carries all: the factor 2 (n - 1) / n is 1.
        let call = |ms| [(OpType::AllReduce, [MIB; 2], ms)];
        let rate = measured(&call(80.0), &call(4.0)).unwrap();
        assert!((rate - 4.0 * MIB as f64 / 4e6).abs() < 1e-9, "{rate}");
    }

    #[test]
    fn each_operation_has_the_factor_of_its_kind() {
        for (op, sides) in [
            (OpType::AllGatherSingle, [MIB, 2 * MIB]),
            (OpType::ReduceScatterSingle, [2 * MIB, MIB]),
            (OpType::AllToAllSingle, [2 * MIB; 2]),
        ] {
            let call = [(op, sides, 8.0)];
            let rate = measured(&call, &call).unwrap();
            // Half of 8 MiB is the rank's own.
            assert!(
                (rate - 4.0 * MIB as f64 / 8e6).abs() < 1e-9,
                "{op:?} {rate}"
            );
        }
    }

    #[test]
    fn small_and_unmeasured_collectives_do_not_count() {
        let small = [(OpType::AllReduce, [1024; 2], 4.0)];
        assert_eq!(measured(&small, &small), None);
        let measured_once = [(OpType::AllReduce, [MIB; 2], 4.0)];
        let not_measured = [(OpType::AllReduce, [MIB; 2], f32::NAN)];
        assert_eq!(measured(&measured_once, &not_measured), None);
    }

    #[test]
    fn two_entries_of_one_member_are_not_those_of_two() {
        let call = (OpType::AllReduce, [MIB; 2], 4.0);
        let mut block = dump(0, &[call, call]);
        block.entries[1].collective_seq_id = 1;
        let mut other = dump(1, &[call]);
        other.entries[0].collective_seq_id = 2;
        let report = analyze(&[block, other], &Policy::default());
        assert_eq!(report.groups[0].busbw_gbs, None);
    }

    #[test]
    fn only_operations_that_need_all_members_are_measured() {
        let line = |op: &OpType| {
            let call = Call {
                op: *op,
                signature: Signature {
                    input_sizes: vec![vec![2 * MIB]],
                    output_sizes: vec![vec![3 * MIB]],
                    input_dtypes: vec!["Byte".into()],
                    output_dtypes: vec!["Byte".into()],
                    ..Signature::default()
                },
                root: None,
                reduce_op: None,
                timeout_ms: 0,
            };
            let bytes = bus_bytes(&call, 4)? / MIB as f64;
            Some(format!("{op} {bytes}\n"))
        };
        let measured: String = OpType::ALL.iter().filter_map(line).collect();
        assert_eq!(
            measured,
            "all_reduce 4.5\n\
             all_reduce_coalesced 4.5\n\
             all_gather 2.25\n\
             all_gather_single 2.25\n\
             all_gather_v 2.25\n\
             all_gather_coalesced 2.25\n\
             reduce_scatter 1.5\n\
             reduce_scatter_single 1.5\n\
             reduce_scatter_v 1.5\n\
             reduce_scatter_coalesced 1.5\n\
             all_to_all 1.5\n\
             all_to_all_single 1.5\n"
        );
    }
}
