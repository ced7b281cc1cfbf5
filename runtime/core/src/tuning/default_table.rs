//! The table of algorithms before the configuration adds lines, as measured on one machine.

use super::{Algorithm, Choice, Pattern, Topology};
use Algorithm::{Chain, Direct, Exchange, Nested, Notice, Shares, Slots, Swap, Whole};
use Pattern::{
    AllGather, AllReduce, AllToAll, Barrier, Broadcast, Gather, Reduce, ReduceScatter, Scatter,
};
use Topology::{Hosts, Memory, Sockets};

/// How many sockets two ranks have for the collectives of a group, and how many for its messages: on the machine that
/// was measured, more would share one link and two cores.
pub(super) const STREAMS: usize = 1;

/// A line for any number of ranks and bytes.
const fn always(pattern: Pattern, topology: Topology, algorithm: Algorithm) -> Choice {
    Choice {
        pattern,
        topology,
        ranks: None,
        bytes: None,
        algorithm,
    }
}

/// A line for at most this many bytes and any number of ranks.
const fn up_to(bytes: usize, pattern: Pattern, topology: Topology, algorithm: Algorithm) -> Choice {
    Choice {
        bytes: Some(bytes),
        ..always(pattern, topology, algorithm)
    }
}

/// A line for at most this many ranks and bytes.
const fn among(
    ranks: usize,
    bytes: usize,
    pattern: Pattern,
    topology: Topology,
    algorithm: Algorithm,
) -> Choice {
    Choice {
        ranks: Some(ranks),
        ..up_to(bytes, pattern, topology, algorithm)
    }
}

const K: usize = 1 << 10;
const M: usize = 1 << 20;

/// The lines, in the order in which they are tried: the first one that matches is used, unless its algorithm cannot
/// carry out the operation ([`Algorithm`]). So a line `Direct` is followed by one for buffers that are not registered.
#[rustfmt::skip]
pub(super) const CHOICES: &[Choice] = &[
    // Between two ranks `Whole` reads as many bytes as `Shares`, in one phase.
    among(2, 64 * K, AllReduce,     Memory,  Whole),
    up_to(   16 * K, AllReduce,     Memory,  Whole),
    up_to(   64 * K, AllReduce,     Memory,  Shares),
    always(          AllReduce,     Memory,  Direct),
    always(          AllReduce,     Memory,  Shares),
    up_to(   64 * K, Reduce,        Memory,  Shares),
    always(          Reduce,        Memory,  Direct),
    always(          Reduce,        Memory,  Shares),
    up_to(   64 * K, ReduceScatter, Memory,  Slots),
    always(          ReduceScatter, Memory,  Direct),
    always(          ReduceScatter, Memory,  Slots),
    up_to(   64 * K, Broadcast,     Memory,  Slots),
    always(          Broadcast,     Memory,  Direct),
    always(          Broadcast,     Memory,  Slots),
    up_to(   64 * K, AllGather,     Memory,  Slots),
    always(          AllGather,     Memory,  Direct),
    always(          AllGather,     Memory,  Slots),
    up_to(   64 * K, AllToAll,      Memory,  Slots),
    always(          AllToAll,      Memory,  Direct),
    always(          AllToAll,      Memory,  Slots),
    always(          Gather,        Memory,  Slots),
    always(          Scatter,       Memory,  Slots),
    always(          Barrier,       Memory,  Notice),

    among(2,  2 * M, AllReduce,     Sockets, Swap),
    // The messages of `Notice` carry the data of all ranks: the more ranks there are, the fewer bytes it is used for.
    among(4,  8 * K, AllReduce,     Sockets, Notice),
    among(8,  4 * K, AllReduce,     Sockets, Notice),
    up_to(        K, AllReduce,     Sockets, Notice),
    always(          AllReduce,     Sockets, Exchange),
    always(          Reduce,        Sockets, Exchange),
    always(          ReduceScatter, Sockets, Exchange),
    up_to(   16 * K, Broadcast,     Sockets, Notice),
    always(          Broadcast,     Sockets, Chain),
    up_to(   32 * K, AllGather,     Sockets, Notice),
    always(          AllGather,     Sockets, Exchange),
    always(          AllToAll,      Sockets, Exchange),
    always(          Gather,        Sockets, Exchange),
    always(          Scatter,       Sockets, Exchange),
    always(          Barrier,       Sockets, Notice),

    among(4,  8 * K, AllReduce,     Hosts,   Notice),
    among(8,  4 * K, AllReduce,     Hosts,   Notice),
    up_to(        K, AllReduce,     Hosts,   Notice),
    always(          AllReduce,     Hosts,   Nested),
    always(          AllReduce,     Hosts,   Exchange),
    always(          Reduce,        Hosts,   Nested),
    always(          Reduce,        Hosts,   Exchange),
    always(          ReduceScatter, Hosts,   Nested),
    always(          ReduceScatter, Hosts,   Exchange),
    up_to(   16 * K, Broadcast,     Hosts,   Notice),
    always(          Broadcast,     Hosts,   Nested),
    always(          Broadcast,     Hosts,   Chain),
    up_to(   32 * K, AllGather,     Hosts,   Notice),
    always(          AllGather,     Hosts,   Nested),
    always(          AllGather,     Hosts,   Exchange),
    up_to(   64 * K, AllToAll,      Hosts,   Nested),
    always(          AllToAll,      Hosts,   Exchange),
    up_to(   64 * K, Gather,        Hosts,   Nested),
    always(          Gather,        Hosts,   Exchange),
    up_to(   64 * K, Scatter,       Hosts,   Nested),
    always(          Scatter,       Hosts,   Exchange),
    always(          Barrier,       Hosts,   Notice),
];
