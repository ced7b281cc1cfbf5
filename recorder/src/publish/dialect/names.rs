//! Names of operations and backends: how recorders spell them, and which ones PyTorch's tools accept.
//!
//! A dump names an operation `<backend>:<op>[ <peers>]`. The backend may contain a colon, the
//! operation does not. Names were collected from the dumps of PyTorch's NCCL and gloo recorders, its
//! backend-agnostic hook, and torchcomms.

use crate::model::{OpType, Peer};

/// The parts of a profiling name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProfilingName<'a> {
    /// The backend; empty if the name has no colon.
    pub(super) backend: &'a str,
    /// The operation as the dump spells it, without peers.
    pub(super) op_name: &'a str,
    pub(super) op: OpType,
    pub(super) peer: Peer,
}

impl<'a> ProfilingName<'a> {
    pub(super) fn parse(name: &'a str) -> Self {
        let (backend, call) = name.rsplit_once(':').unwrap_or(("", name));
        let (op_name, peers) = call.split_once(' ').unwrap_or((call, ""));
        let op = op_type(op_name);
        Self {
            backend,
            op_name,
            op,
            peer: peer(op, peers.trim()),
        }
    }
}

/// The other end in the text after the operation: `source->destination` after `send`, `destination<-source` after
/// `recv`, as ranks of the group; `?` means any source.
fn peer(op: OpType, peers: &str) -> Peer {
    let arrow = if op == OpType::Send { "->" } else { "<-" };
    let other = peers.split_once(arrow).filter(|_| op.is_p2p());
    match other {
        Some((_, "?")) => Peer::Any,
        Some((_, rank)) => rank.trim().parse().map_or(Peer::None, Peer::Rank),
        None => Peer::None,
    }
}

/// The operation that has this name with any recorder; [`OpType::Other`] for an unknown name.
pub(super) fn op_type(name: &str) -> OpType {
    if let Some(op) = OpType::from_name(name) {
        return op;
    }
    match name {
        "allreduce" => OpType::AllReduce,
        "allreduce_coalesced" => OpType::AllReduceCoalesced,
        "allreduce_sparse" | "sparse_all_reduce" => OpType::AllReduceSparse,
        "_reduce_oop" => OpType::Reduce,
        "_broadcast_oop" => OpType::Broadcast,
        // NCCL has no barrier: PyTorch's NCCL recorder logs the all_reduce that implements one.
        "all_reduce_barrier" => OpType::Barrier,
        "allgather" => OpType::AllGather,
        "_all_gather_base" | "_allgather_base" | "all_gather_into_tensor" => {
            OpType::AllGatherSingle
        }
        "all_gather_into_tensor_coalesced"
        | "allgather_into_tensor_coalesced"
        | "allgather_coalesced" => OpType::AllGatherCoalesced,
        "_reduce_scatter_base" | "reduce_scatter_tensor" => OpType::ReduceScatterSingle,
        "reduce_scatter_tensor_coalesced" => OpType::ReduceScatterCoalesced,
        "alltoall" => OpType::AllToAll,
        "alltoall_base" => OpType::AllToAllSingle,
        "recv_any_source" | "recvAnySource" => OpType::Recv,
        _ if is_closing_marker(name) => OpType::Coalesced,
        _ => OpType::Other,
    }
}

/// Whether this is an operation's name in capitals before `_coalesced`, such as `ALLGATHER_coalesced`. PyTorch's NCCL
/// recorder closes a block with such a name, or with `coalesced` alone, which [`OpType::from_name`] knows.
fn is_closing_marker(name: &str) -> bool {
    name.strip_suffix("_coalesced").is_some_and(|prefix| {
        !prefix.is_empty() && prefix.bytes().all(|b| b.is_ascii_uppercase() || b == b'_')
    })
}

/// The name to write for PyTorch's tools in place of an operation's name; unchanged if they accept it as it is, or if
/// the operation is unknown.
pub(super) fn op_name_for_torch(name: &str) -> &str {
    OpType::from_name(name)
        .and_then(OpType::torch_name)
        .unwrap_or(name)
}

/// The backends that the analyzer of PyTorch 2.15 knows (`Op` in `flight_recorder/components/types.py`): for each
/// entry with another backend it prints a line of warning.
const BACKENDS_OF_TORCH: [&str; 11] = [
    "nccl",
    "ncclx",
    "nccl2",
    "nccl-lazy",
    "xccl",
    "gloo",
    "rccl",
    "rcclx",
    "mccl",
    "hccl",
    "c10d",
];

/// The name to write for PyTorch's tools in place of a backend's name: unchanged if they know it, else `c10d`, which
/// PyTorch's own recorder writes if it cannot tell the backend.
pub(super) fn backend_for_torch(name: &str) -> &str {
    match BACKENDS_OF_TORCH.contains(&name) {
        true => name,
        false => "c10d",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(name: &str) -> (&str, &str, OpType, Peer) {
        let ProfilingName {
            backend,
            op_name,
            op,
            peer,
        } = ProfilingName::parse(name);
        (backend, op_name, op, peer)
    }

    #[test]
    fn a_name_is_split_at_its_last_colon() {
        assert_eq!(
            parsed("cuda:nccl:all_reduce"),
            ("cuda:nccl", "all_reduce", OpType::AllReduce, Peer::None)
        );
        assert_eq!(
            parsed("barrier"),
            ("", "barrier", OpType::Barrier, Peer::None)
        );
        assert_eq!(parsed(""), ("", "", OpType::Other, Peer::None));
    }

    #[test]
    fn the_peer_of_a_message_is_its_other_end() {
        assert_eq!(
            parsed("nccl:send 1->2"),
            ("nccl", "send", OpType::Send, Peer::Rank(2))
        );
        assert_eq!(
            parsed("nccl:recv 3<-0"),
            ("nccl", "recv", OpType::Recv, Peer::Rank(0))
        );
        assert_eq!(
            parsed("gloo:recv 3<-?"),
            ("gloo", "recv", OpType::Recv, Peer::Any)
        );
        assert_eq!(
            parsed("nccl:send"),
            ("nccl", "send", OpType::Send, Peer::None)
        );
        assert_eq!(
            parsed("nccl:send 1->two"),
            ("nccl", "send", OpType::Send, Peer::None)
        );
    }

    #[test]
    fn closing_markers_are_distinguished_from_coalesced_operations() {
        assert_eq!(op_type("coalesced"), OpType::Coalesced);
        assert_eq!(op_type("REDUCE_SCATTER_coalesced"), OpType::Coalesced);
        assert_eq!(
            op_type("reduce_scatter_tensor_coalesced"),
            OpType::ReduceScatterCoalesced
        );
        assert_eq!(op_type("_coalesced"), OpType::Other);
    }

    #[test]
    fn operations_renamed_for_torch_are_read_as_known_operations() {
        for &op in OpType::ALL.iter().filter(|&&op| op != OpType::Other) {
            assert_ne!(op_type(op_name_for_torch(op.name())), OpType::Other, "{op}");
        }
    }
}
