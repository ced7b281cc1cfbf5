//! Finds the roots of the wait-for graph.
//!
//! Every wait leads to a sink: a rank that waits for nothing, a rank whose record cannot be read, a place where all
//! members have arrived, or a cycle. The checks judge these sinks. A sink counts only if a wait that leads to it is due
//! ([`WaitGraph::due`]).

use crate::align::Aligned;
use crate::align::pending::Arrival;
use crate::judge::waits::wait_graph::{Missing, Node, WaitGraph};

/// A sink of the graph, where waits end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WaitRoot {
    /// Others wait for this rank, and it waits for nothing that is recorded.
    Idle(Node),
    /// Others wait for this rank, and it left no readable record, or one that shows its state at none of the places
    /// where it is missed.
    Unread(Node),
    /// All members have arrived at this place.
    Full(usize),
    /// Ranks wait for each other.
    Cycle {
        ranks: Vec<Node>,
        places: Vec<usize>,
    },
}

/// Finds the sinks. A rank whose device may or may not have reached an operation counts as missing there at first. If
/// such ranks close a cycle, they no longer count, provided that the waits then lead to a rank that waits for none.
pub(crate) fn find(aligned: &Aligned<'_>, graph: &mut WaitGraph) -> Vec<WaitRoot> {
    graph.leave_out_delivered();
    // Releasing one cycle may show the next; eight rounds bound the time.
    for _ in 0..8 {
        let found = wait_roots(aligned, graph);
        let uncertain: Vec<usize> = found
            .iter()
            .filter_map(|wait_root| match wait_root {
                WaitRoot::Cycle { places, .. } => Some(places),
                _ => None,
            })
            .flatten()
            .copied()
            .filter(|&place| {
                graph.missing[place]
                    .iter()
                    .any(|&(_, why)| why == Missing::Held(Arrival::Head))
            })
            .collect();
        if uncertain.is_empty() {
            return found;
        }
        let kept: Vec<_> = uncertain
            .iter()
            .map(|&place| graph.missing[place].clone())
            .collect();
        graph.release_heads(&uncertain);
        let released = wait_roots(aligned, graph);
        let leads_out = released.iter().any(|wait_root| {
            !found.contains(wait_root)
                && matches!(wait_root, WaitRoot::Idle(_) | WaitRoot::Unread(_))
        });
        if !leads_out {
            for (&place, missing) in uncertain.iter().zip(kept) {
                graph.missing[place] = missing;
            }
            return found;
        }
    }
    wait_roots(aligned, graph)
}

/// The sinks of the graph to which due waits lead.
fn wait_roots(aligned: &Aligned<'_>, graph: &WaitGraph) -> Vec<WaitRoot> {
    let components = graph.components();
    let mut component_of = vec![0; graph.ranks + graph.places.len()];
    for (index, nodes) in components.iter().enumerate() {
        for &node in nodes {
            component_of[node] = index;
        }
    }
    let mut waited_for = vec![false; graph.ranks];
    for missing in &graph.missing {
        for &(rank, _) in missing {
            waited_for[rank] = true;
        }
    }
    let due = graph.due(aligned);
    let mut found = Vec::new();
    for (index, nodes) in components.iter().enumerate() {
        if !nodes.iter().any(|&node| due[node]) {
            continue;
        }
        let leaves = nodes.iter().any(|&node| {
            graph
                .successors(node)
                .any(|next| component_of[next] != index)
        });
        if leaves {
            continue;
        }
        match nodes.as_slice() {
            [rank] if *rank < graph.ranks => {
                let rank = *rank;
                if waited_for[rank] {
                    let read = aligned.record_of(aligned.expected[rank]).is_some();
                    found.push(if read && !unread_by_all(graph, rank) {
                        WaitRoot::Idle(rank)
                    } else {
                        WaitRoot::Unread(rank)
                    });
                }
            }
            [place] => found.push(WaitRoot::Full(place - graph.ranks)),
            _ => found.push(WaitRoot::Cycle {
                ranks: nodes
                    .iter()
                    .copied()
                    .filter(|&node| node < graph.ranks)
                    .collect(),
                places: nodes
                    .iter()
                    .filter_map(|node| node.checked_sub(graph.ranks))
                    .collect(),
            }),
        }
    }
    found
}

/// Whether a rank's record shows at none of the places where the rank is missed whether it arrived there.
fn unread_by_all(graph: &WaitGraph, rank: Node) -> bool {
    graph
        .missing
        .iter()
        .flatten()
        .all(|&(node, why)| node != rank || matches!(why, Missing::Unknown(_)))
}
