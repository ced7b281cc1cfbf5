//! The table of operations, with every property that a recorder, a backend or an analysis uses.
//!
//! A row holds the name and the code, the data movement ([`Pattern`]), how the tensors are passed ([`Layout`]), which
//! lengths may differ ([`Parts`]), for whose arrival a member waits ([`WaitsFor`]), the share of the bytes that a link
//! of the bus carries ([`Bus`]), and the name to write for PyTorch's tools where it is another one. Backends implement
//! patterns and layouts, so a new operation of a known pattern needs a row here and no new algorithm; a new pattern is
//! a compile error wherever patterns are distinguished.
//!
//! The codes are part of the ring's layout and of the C binding: append, never renumber.

#![deny(clippy::wildcard_enum_match_arm)]

use super::coded::coded;
use serde::{Deserialize, Serialize};

/// How an operation moves data between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pattern {
    /// Every rank ends with the reduction of all ranks' tensors.
    AllReduce,
    /// The root ends with the reduction of all ranks' tensors.
    Reduce,
    /// Every rank ends with the root's tensor.
    Broadcast,
    /// Nothing is moved; no rank leaves before all have arrived.
    Barrier,
    /// Every rank ends with the parts of all ranks.
    AllGather,
    /// Every rank ends with its part of the reduction.
    ReduceScatter,
    /// Every rank sends one part to every rank.
    AllToAll,
    /// The root ends with the parts of all ranks.
    Gather,
    /// Every rank ends with its part of the root's tensors.
    Scatter,
    /// A message to one rank.
    Send,
    /// A message from one rank.
    Recv,
    /// Several operations issued as one.
    Block,
    /// The group's members agree on something and move no tensors.
    Agreement,
    /// Access to a rank's memory in which that rank takes no part, or a signal for such accesses.
    OneSided,
    /// Unknown.
    Unknown,
}

impl Pattern {
    /// Whether one rank, the root, has a different role from the others.
    #[inline]
    pub const fn is_rooted(self) -> bool {
        match self {
            Self::Reduce | Self::Broadcast | Self::Gather | Self::Scatter => true,
            Self::AllReduce
            | Self::Barrier
            | Self::AllGather
            | Self::ReduceScatter
            | Self::AllToAll
            | Self::Send
            | Self::Recv
            | Self::Block
            | Self::Agreement
            | Self::OneSided
            | Self::Unknown => false,
        }
    }

    /// Whether the operation combines values.
    #[inline]
    pub const fn reduces(self) -> bool {
        match self {
            Self::AllReduce | Self::Reduce | Self::ReduceScatter => true,
            Self::Broadcast
            | Self::Barrier
            | Self::AllGather
            | Self::AllToAll
            | Self::Gather
            | Self::Scatter
            | Self::Send
            | Self::Recv
            | Self::Block
            | Self::Agreement
            | Self::OneSided
            | Self::Unknown => false,
        }
    }

    /// Whether the members of a group number these operations together, by `collective_seq_id`. Unknown operations
    /// count as collectives.
    #[inline]
    pub const fn is_collective(self) -> bool {
        match self {
            Self::Send | Self::Recv | Self::OneSided => false,
            Self::AllReduce
            | Self::Reduce
            | Self::Broadcast
            | Self::Barrier
            | Self::AllGather
            | Self::ReduceScatter
            | Self::AllToAll
            | Self::Gather
            | Self::Scatter
            | Self::Block
            | Self::Agreement
            | Self::Unknown => true,
        }
    }
}

/// How an operation's tensors are passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// There are no tensors.
    Absent,
    /// One tensor, both input and output.
    InPlace,
    /// One tensor per side. A side with a part for every rank holds the parts one after another.
    Single,
    /// One tensor per part on a side with a part for every rank.
    List,
    /// Any number of tensors, on both sides; each is treated as with [`Layout::InPlace`] or
    /// [`Layout::Single`].
    Several,
    /// One sparse (COO) tensor.
    Sparse,
}

/// Which lengths may differ in one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Parts {
    /// None: all parts have the same length.
    Equal,
    /// The length may differ from rank to rank.
    PerRank,
    /// The length may differ for each pair of sender and receiver.
    PerPair,
}

/// The members without which a member cannot complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WaitsFor {
    /// All members of the group.
    All,
    /// The members from which it receives elements. A root that only sends, and a member that only sends to
    /// the root, may complete before the others arrive; so may a member whose splits let it receive nothing from a
    /// late member.
    Sources,
    /// The peer.
    Peer,
    /// No other member.
    NoOther,
    /// Unknown: the record does not contain it.
    Unknown,
}

/// The share of an operation's bytes that a link of the bus carries, as nccl-tests counts it (its
/// `doc/PERFORMANCE.md`). The bytes are those of the input or of the output, whichever is larger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bus {
    /// Every other rank's share, in and out: 2 (n - 1) / n.
    ReduceAndCopy,
    /// Every other rank's share: (n - 1) / n.
    OthersShare,
    /// All bytes.
    Whole,
    /// Not defined: it depends on the values, no bytes are carried, or the other rank takes no part.
    Unmeasured,
}

impl Bus {
    /// Ratio of bus bandwidth to algorithm bandwidth in a group of `ranks` (at least 1); `None` if it is not defined.
    pub fn factor(self, ranks: usize) -> Option<f64> {
        let rank_count = ranks as f64;
        match self {
            Self::ReduceAndCopy => Some(2.0 * (rank_count - 1.0) / rank_count),
            Self::OthersShare => Some((rank_count - 1.0) / rank_count),
            Self::Whole => Some(1.0),
            Self::Unmeasured => None,
        }
    }
}

/// A row of the table, without name and code.
struct Row {
    pattern: Pattern,
    layout: Layout,
    parts: Parts,
    waits_for: WaitsFor,
    bus: Bus,
    torch_name: Option<&'static str>,
}

macro_rules! torch_name {
    () => {
        None
    };
    ($name:literal) => {
        Some($name)
    };
}

macro_rules! operations {
    ($(
        #[doc = $meaning:literal]
        $variant:ident = $code:literal, $name:literal:
            $pattern:ident $layout:ident $parts:ident $waits_for:ident $bus:ident $(, torch $torch:literal)?;
    )+) => {
        coded! {
            /// The kind of an operation.
            ///
            /// The names are rcomm's. Other recorders' names for the same operation (`_all_gather_base`,
            /// `allreduce_coalesced`, ...) are translated when their dumps are read, and an unknown operation
            /// keeps its own name with [`OpType::Other`].
            OpType, "operation" {
                $( #[doc = $meaning] $variant = $code, $name; )+
            }
        }

        impl OpType {
            /// A description in one line.
            pub const fn meaning(self) -> &'static str {
                match self { $( Self::$variant => $meaning.trim_ascii(), )+ }
            }

            const fn row(self) -> &'static Row {
                match self {
                    $( Self::$variant => &Row {
                        pattern: Pattern::$pattern,
                        layout: Layout::$layout,
                        parts: Parts::$parts,
                        waits_for: WaitsFor::$waits_for,
                        bus: Bus::$bus,
                        torch_name: torch_name!($($torch)?),
                    }, )+
                }
            }
        }
    };
}

// `torch` gives the name that PyTorch's tools accept if they do not accept rcomm's. They reject a dump with an unknown
// operation, so a similar operation is named.
operations! {
    // variant, code, name                                     pattern       layout   parts   waits for  bus
    /// Every rank ends with the reduction of all inputs.
    AllReduce = 1, "all_reduce":                               AllReduce     InPlace  Equal   All      ReduceAndCopy;
    /// Several tensors reduced as one operation.
    AllReduceCoalesced = 2, "all_reduce_coalesced":            AllReduce     Several  Equal   All      ReduceAndCopy,
        torch "allreduce_coalesced";
    /// A reduction of sparse (COO) tensors.
    AllReduceSparse = 3, "all_reduce_sparse":                  AllReduce     Sparse   PerRank All      Unmeasured,
        torch "all_reduce";
    /// The reduction ends on the root alone.
    Reduce = 4, "reduce":                                      Reduce        InPlace  Equal   Sources  Whole;
    /// The root's tensor is copied to every rank.
    Broadcast = 5, "broadcast":                                Broadcast     InPlace  Equal   Sources  Whole;
    /// No rank leaves before all have arrived.
    Barrier = 6, "barrier":                                    Barrier       Absent   Equal   All      Unmeasured;
    /// A barrier in which rank 0 of the group reports the ranks that did not arrive.
    MonitoredBarrier = 7, "monitored_barrier":                 Barrier       Absent   Equal   All      Unmeasured,
        torch "barrier";
    /// Every rank ends with a list of all inputs.
    AllGather = 8, "all_gather":                               AllGather     List     Equal   All      OthersShare;
    /// Every rank ends with all inputs in one tensor.
    AllGatherSingle = 9, "all_gather_single":                  AllGather     Single   Equal   All      OthersShare;
    /// Like `all_gather`, with inputs of different sizes.
    AllGatherV = 10, "all_gather_v":                           AllGather     List     PerRank All      OthersShare;
    /// Several tensors gathered as one operation.
    AllGatherCoalesced = 11, "all_gather_coalesced":           AllGather     Several  Equal   All      OthersShare,
        torch "all_gather_into_tensor_coalesced";
    /// Rank i ends with the reduction of all ranks' i-th inputs.
    ReduceScatter = 12, "reduce_scatter":                      ReduceScatter List     Equal   All      OthersShare;
    /// Like `reduce_scatter`, from one tensor.
    ReduceScatterSingle = 13, "reduce_scatter_single":         ReduceScatter Single   Equal   All      OthersShare;
    /// Like `reduce_scatter`, with parts of different sizes.
    ReduceScatterV = 14, "reduce_scatter_v":                   ReduceScatter List     PerRank All      OthersShare;
    /// Several tensors reduced and scattered as one operation.
    ReduceScatterCoalesced = 15, "reduce_scatter_coalesced":   ReduceScatter Several  Equal   All      OthersShare,
        torch "reduce_scatter_tensor_coalesced";
    /// Every rank sends its i-th tensor to rank i.
    AllToAll = 16, "all_to_all":                               AllToAll      List     PerPair All      OthersShare;
    /// Like `all_to_all`, within one tensor of even parts.
    AllToAllSingle = 17, "all_to_all_single":                  AllToAll      Single   Equal   All      OthersShare;
    /// Like `all_to_all`, within one tensor of parts of any size.
    AllToAllVSingle = 18, "all_to_all_v_single":               AllToAll      Single   PerPair Sources  OthersShare;
    /// The root ends with a list of all inputs.
    Gather = 19, "gather":                                     Gather        List     Equal   Sources  OthersShare;
    /// Like `gather`, with inputs of different sizes.
    GatherV = 20, "gather_v":                                  Gather        List     PerRank Sources  OthersShare,
        torch "gather";
    /// Rank i ends with the root's i-th tensor.
    Scatter = 21, "scatter":                                   Scatter       List     Equal   Sources  OthersShare;
    /// Like `scatter`, with parts of different sizes.
    ScatterV = 22, "scatter_v":                                Scatter       List     PerRank Sources  OthersShare,
        torch "scatter";
    /// A message to one rank.
    Send = 23, "send":                                         Send          Single   Equal   Peer     Whole;
    /// A message from one rank, or from any.
    Recv = 24, "recv":                                         Recv          Single   Equal   Peer     Whole;
    /// The closing marker of a coalesced block.
    Coalesced = 25, "coalesced":                               Block         Absent   Equal   Unknown  Unmeasured;
    /// A group was split into sub-groups.
    Split = 26, "split":                                       Agreement     Absent   Equal   Unknown  Unmeasured;
    /// A one-sided window was made.
    NewWindow = 27, "new_window":                              Agreement     Absent   Equal   Unknown  Unmeasured;
    /// One-sided write into a window.
    Put = 28, "put":                                           OneSided      Single   Equal   NoOther  Unmeasured;
    /// One-sided read from a window.
    Get = 29, "get":                                           OneSided      Single   Equal   NoOther  Unmeasured;
    /// A signal to another rank of a window.
    Signal = 30, "signal":                                     OneSided      Absent   Equal   NoOther  Unmeasured;
    /// Waiting for a signal.
    WaitSignal = 31, "wait_signal":                            OneSided      Absent   Equal   Peer     Unmeasured;
    /// An unknown operation; its own name is in the signature.
    Other = 255, "other":                                      Unknown       Absent   Equal   Unknown  Unmeasured;
}

impl OpType {
    /// The data movement of the operation.
    #[inline]
    pub const fn pattern(self) -> Pattern {
        self.row().pattern
    }

    /// How the tensors are passed.
    #[inline]
    pub const fn layout(self) -> Layout {
        self.row().layout
    }

    /// Which lengths may differ. Other recorders use one name for exchanges of equal and of unequal parts.
    #[inline]
    pub const fn parts(self) -> Parts {
        self.row().parts
    }

    /// The members without which a member cannot complete the operation.
    #[inline]
    pub const fn waits_for(self) -> WaitsFor {
        self.row().waits_for
    }

    /// The share of the operation's bytes that a link of the bus carries.
    #[inline]
    pub const fn bus(self) -> Bus {
        self.row().bus
    }

    /// The name that PyTorch's tools accept; `None` if they accept [`name`](Self::name).
    #[inline]
    pub(crate) const fn torch_name(self) -> Option<&'static str> {
        self.row().torch_name
    }

    /// Whether the operation is one half of a point-to-point message.
    #[inline]
    pub const fn is_p2p(self) -> bool {
        matches!(self.pattern(), Pattern::Send | Pattern::Recv)
    }

    /// Whether the members of a group number the operation together, by `collective_seq_id`.
    #[inline]
    pub const fn is_collective(self) -> bool {
        self.pattern().is_collective()
    }

    /// Whether no member can complete the operation before all have issued it.
    #[inline]
    pub const fn needs_all_members(self) -> bool {
        matches!(self.waits_for(), WaitsFor::All)
    }

    /// Whether the caller passes one tensor and the length of each of its parts.
    #[inline]
    pub const fn has_splits(self) -> bool {
        matches!(
            (self.layout(), self.parts()),
            (Layout::Single, Parts::PerRank | Parts::PerPair)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(select: impl Fn(OpType) -> bool) -> Vec<&'static str> {
        let ops = OpType::ALL.iter().copied();
        ops.filter(|&op| select(op)).map(OpType::name).collect()
    }

    #[test]
    fn codes_and_names_are_converted_back_to_their_value() {
        for &op in OpType::ALL {
            assert_eq!(OpType::from_code(op.code()), Some(op));
            assert_eq!(OpType::from_name(op.name()), Some(op));
        }
    }

    #[test]
    fn codes_never_change() {
        let codes: Vec<String> = OpType::ALL
            .iter()
            .map(|op| format!("{}={}", op.code(), op.name()))
            .collect();
        assert_eq!(
            codes.join(" "),
            "1=all_reduce 2=all_reduce_coalesced 3=all_reduce_sparse 4=reduce 5=broadcast 6=barrier \
             7=monitored_barrier 8=all_gather 9=all_gather_single 10=all_gather_v \
             11=all_gather_coalesced 12=reduce_scatter 13=reduce_scatter_single 14=reduce_scatter_v \
             15=reduce_scatter_coalesced 16=all_to_all 17=all_to_all_single 18=all_to_all_v_single \
             19=gather 20=gather_v 21=scatter 22=scatter_v 23=send 24=recv 25=coalesced 26=split \
             27=new_window 28=put 29=get 30=signal 31=wait_signal 255=other"
        );
    }

    #[test]
    fn messages_and_one_sided_accesses_have_no_collective_number() {
        assert_eq!(names(OpType::is_p2p), ["send", "recv"]);
        assert_eq!(
            names(|op| !op.is_collective()),
            ["send", "recv", "put", "get", "signal", "wait_signal"]
        );
    }

    #[test]
    fn only_operations_in_which_each_member_needs_all_others_wait_for_all() {
        assert_eq!(
            names(|op| op.waits_for() == WaitsFor::All),
            [
                "all_reduce",
                "all_reduce_coalesced",
                "all_reduce_sparse",
                "barrier",
                "monitored_barrier",
                "all_gather",
                "all_gather_single",
                "all_gather_v",
                "all_gather_coalesced",
                "reduce_scatter",
                "reduce_scatter_single",
                "reduce_scatter_v",
                "reduce_scatter_coalesced",
                "all_to_all",
                "all_to_all_single",
            ]
        );
        for &op in OpType::ALL {
            if op.pattern().is_rooted() {
                assert_eq!(op.waits_for(), WaitsFor::Sources, "{op}");
            }
        }
    }

    #[test]
    fn the_caller_gives_splits_where_parts_of_one_tensor_differ() {
        assert_eq!(names(OpType::has_splits), ["all_to_all_v_single"]);
    }

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        let factor = |op: OpType| op.bus().factor(4);
        assert_eq!(factor(OpType::AllReduce), Some(1.5));
        assert_eq!(factor(OpType::AllGatherSingle), Some(0.75));
        assert_eq!(factor(OpType::ReduceScatterV), Some(0.75));
        assert_eq!(factor(OpType::AllToAllVSingle), Some(0.75));
        assert_eq!(factor(OpType::Broadcast), Some(1.0));
        assert_eq!(factor(OpType::Reduce), Some(1.0));
        assert_eq!(factor(OpType::Send), Some(1.0));
        assert_eq!(factor(OpType::Barrier), None);
        assert_eq!(factor(OpType::AllReduceSparse), None);
    }
}
