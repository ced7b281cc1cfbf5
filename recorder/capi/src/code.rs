//! Codes of operations, as C sees them.

/// Every rank ends with the reduction of all inputs.
pub const RCOMM_RECORDER_ALL_REDUCE: u8 = 1;
/// Several tensors reduced as one operation.
pub const RCOMM_RECORDER_ALL_REDUCE_COALESCED: u8 = 2;
/// A reduction of sparse (COO) tensors.
pub const RCOMM_RECORDER_ALL_REDUCE_SPARSE: u8 = 3;
/// The reduction ends on the root alone.
pub const RCOMM_RECORDER_REDUCE: u8 = 4;
/// The root's tensor is copied to every rank.
pub const RCOMM_RECORDER_BROADCAST: u8 = 5;
/// No rank leaves before every rank has come.
pub const RCOMM_RECORDER_BARRIER: u8 = 6;
/// A barrier in which the root names the ranks that did not come.
pub const RCOMM_RECORDER_MONITORED_BARRIER: u8 = 7;
/// Every rank ends with a list of all inputs.
pub const RCOMM_RECORDER_ALL_GATHER: u8 = 8;
/// Every rank ends with all inputs in one tensor.
pub const RCOMM_RECORDER_ALL_GATHER_SINGLE: u8 = 9;
/// As `all_gather`, inputs of different sizes.
pub const RCOMM_RECORDER_ALL_GATHER_V: u8 = 10;
/// Several tensors gathered as one operation.
pub const RCOMM_RECORDER_ALL_GATHER_COALESCED: u8 = 11;
/// Rank i ends with the reduction of the i-th inputs of all ranks.
pub const RCOMM_RECORDER_REDUCE_SCATTER: u8 = 12;
/// As `reduce_scatter`, from one tensor.
pub const RCOMM_RECORDER_REDUCE_SCATTER_SINGLE: u8 = 13;
/// As `reduce_scatter`, parts of different sizes.
pub const RCOMM_RECORDER_REDUCE_SCATTER_V: u8 = 14;
/// Several tensors reduced and scattered as one operation.
pub const RCOMM_RECORDER_REDUCE_SCATTER_COALESCED: u8 = 15;
/// Every rank sends its i-th tensor to rank i.
pub const RCOMM_RECORDER_ALL_TO_ALL: u8 = 16;
/// As `all_to_all`, within one tensor of even parts.
pub const RCOMM_RECORDER_ALL_TO_ALL_SINGLE: u8 = 17;
/// As `all_to_all`, within one tensor of parts of any size.
pub const RCOMM_RECORDER_ALL_TO_ALL_V_SINGLE: u8 = 18;
/// The root ends with a list of all inputs.
pub const RCOMM_RECORDER_GATHER: u8 = 19;
/// As `gather`, inputs of different sizes.
pub const RCOMM_RECORDER_GATHER_V: u8 = 20;
/// Rank i ends with the root's i-th tensor.
pub const RCOMM_RECORDER_SCATTER: u8 = 21;
/// As `scatter`, parts of different sizes.
pub const RCOMM_RECORDER_SCATTER_V: u8 = 22;
/// A message to one rank.
pub const RCOMM_RECORDER_SEND: u8 = 23;
/// A message from one rank, or from any.
pub const RCOMM_RECORDER_RECV: u8 = 24;
/// The closing marker of a coalesced block.
pub const RCOMM_RECORDER_COALESCED: u8 = 25;
/// A group was split into sub-groups.
pub const RCOMM_RECORDER_SPLIT: u8 = 26;
/// A one-sided window was made.
pub const RCOMM_RECORDER_NEW_WINDOW: u8 = 27;
/// One-sided write into a window.
pub const RCOMM_RECORDER_PUT: u8 = 28;
/// One-sided read from a window.
pub const RCOMM_RECORDER_GET: u8 = 29;
/// A signal to a window's other end.
pub const RCOMM_RECORDER_SIGNAL: u8 = 30;
/// Waiting for a signal.
pub const RCOMM_RECORDER_WAIT_SIGNAL: u8 = 31;
/// An operation without a code of its own; its signature holds its name.
pub const RCOMM_RECORDER_OTHER: u8 = 255;

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::model::OpType;

    #[test]
    fn codes_are_those_of_the_recorder() {
        let codes = [
            (RCOMM_RECORDER_ALL_REDUCE, OpType::AllReduce),
            (
                RCOMM_RECORDER_ALL_REDUCE_COALESCED,
                OpType::AllReduceCoalesced,
            ),
            (RCOMM_RECORDER_ALL_REDUCE_SPARSE, OpType::AllReduceSparse),
            (RCOMM_RECORDER_REDUCE, OpType::Reduce),
            (RCOMM_RECORDER_BROADCAST, OpType::Broadcast),
            (RCOMM_RECORDER_BARRIER, OpType::Barrier),
            (RCOMM_RECORDER_MONITORED_BARRIER, OpType::MonitoredBarrier),
            (RCOMM_RECORDER_ALL_GATHER, OpType::AllGather),
            (RCOMM_RECORDER_ALL_GATHER_SINGLE, OpType::AllGatherSingle),
            (RCOMM_RECORDER_ALL_GATHER_V, OpType::AllGatherV),
            (
                RCOMM_RECORDER_ALL_GATHER_COALESCED,
                OpType::AllGatherCoalesced,
            ),
            (RCOMM_RECORDER_REDUCE_SCATTER, OpType::ReduceScatter),
            (
                RCOMM_RECORDER_REDUCE_SCATTER_SINGLE,
                OpType::ReduceScatterSingle,
            ),
            (RCOMM_RECORDER_REDUCE_SCATTER_V, OpType::ReduceScatterV),
            (
                RCOMM_RECORDER_REDUCE_SCATTER_COALESCED,
                OpType::ReduceScatterCoalesced,
            ),
            (RCOMM_RECORDER_ALL_TO_ALL, OpType::AllToAll),
            (RCOMM_RECORDER_ALL_TO_ALL_SINGLE, OpType::AllToAllSingle),
            (RCOMM_RECORDER_ALL_TO_ALL_V_SINGLE, OpType::AllToAllVSingle),
            (RCOMM_RECORDER_GATHER, OpType::Gather),
            (RCOMM_RECORDER_GATHER_V, OpType::GatherV),
            (RCOMM_RECORDER_SCATTER, OpType::Scatter),
            (RCOMM_RECORDER_SCATTER_V, OpType::ScatterV),
            (RCOMM_RECORDER_SEND, OpType::Send),
            (RCOMM_RECORDER_RECV, OpType::Recv),
            (RCOMM_RECORDER_COALESCED, OpType::Coalesced),
            (RCOMM_RECORDER_SPLIT, OpType::Split),
            (RCOMM_RECORDER_NEW_WINDOW, OpType::NewWindow),
            (RCOMM_RECORDER_PUT, OpType::Put),
            (RCOMM_RECORDER_GET, OpType::Get),
            (RCOMM_RECORDER_SIGNAL, OpType::Signal),
            (RCOMM_RECORDER_WAIT_SIGNAL, OpType::WaitSignal),
            (RCOMM_RECORDER_OTHER, OpType::Other),
        ];
        for (code, op) in codes {
            assert_eq!(code, op.code());
        }
        assert_eq!(codes.len(), OpType::ALL.len());
    }
}
