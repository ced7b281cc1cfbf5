//! Collectives of a group on several hosts, at least one of which has several of its ranks. They use shared memory
//! inside a host and channels between hosts, and send each byte between two hosts as few times as possible.
//!
//! | pattern | between hosts | inside a host | bytes out of a host, at most: h hosts, n ranks, s bytes of data, or p bytes in each part |
//! |---|---|---|---|
//! | headers, barrier, small data ([`agree`]) | doubling, first ranks only | one phase before, one after | n × p in ⌈log2 h⌉ messages |
//! | all_reduce, reduce, reduce_scatter ([`chain`]) | from host to host; results back | each rank combines a stripe | 2 s for all_reduce, s for the others |
//! | broadcast ([`spread`]) | from host to host, by stripes | all data before, stripes put together after | s |
//! | all_gather ([`spread`]) | each host's parts to all others | parts put together after | p (h-1) × ranks of the host |
//! | gather, scatter ([`rooted`]) | one message between the root and each host | parts collected before or handed out after | p × ranks of the host that is not the root's |
//! | all_to_all ([`pairs`]) | one message from each host to each other | parts collected before, handed out after | to each host: p × ranks here × ranks there |
//!
//! A *stripe* is the part of the data that one rank of each host sends. The number of stripes is the number of ranks
//! on the host with the fewest. The ranks with a stripe send between hosts at the same time, each over its own
//! channel.
//!
//! Reductions combine in order of ranks: the first host sends its result to the second, which combines its ranks'
//! values with it one by one and forwards the result. The last host has the complete result and sends it back, or only
//! to the ranks that get it. So the result has the same bits as with every other algorithm here, and the hosts together
//! send no more bytes than in a ring. If the ranks of a host are not consecutive in the group, reductions of more than
//! small data use [`ChannelEngine`] instead.

mod agree;
mod chain;
mod hierarchy;
mod host_exchange;
mod pairs;
mod rooted;
mod spread;

use super::{ChannelEngine, choose, extent, finish_small, small_input};
use crate::channels::Channels;
use crate::collective::{Collective, Position, Step, has_lists};
use crate::mesh::layout::Layout;
use crate::transport::shm::ShmExchange;
use crate::wait::{Failure, WaitPolicy};
use agree::{Contribution, HostAgreement};
use chain::Chain;
use hierarchy::{Hierarchy, area_key};
use host_exchange::HostExchange;
use rcomm_core::store::{Store, StoreQuery};
use rcomm_core::tuning::{Algorithm, Pattern, Plan};
use rcomm_recorder::model::Rank;
use rooted::Sizes;
use std::sync::Arc;
use std::time::Duration;

/// One group's collectives over several hosts.
pub(crate) struct HostsEngine {
    layout: Layout,
    host_exchange: HostExchange,
    agreement: HostAgreement,
    chain: Chain,
    /// Runs what uses channels alone. The hosts send over its channels in all other operations too.
    engine: ChannelEngine,
    store: Arc<dyn Store>,
    plan: Plan,
    hierarchy: Hierarchy,
    /// The exchange area with the streams of `engine` inside this host, which must live as long as `engine`.
    _streams: Option<ShmExchange>,
}

/// The exchange areas of a group on one host.
pub(crate) struct ShmExchanges {
    /// For phases; `None` on a host with one rank, or without space for the group.
    pub(crate) phases: Option<ShmExchange>,
    /// For the streams of the group's channels; without it they use sockets.
    pub(crate) streams: Option<ShmExchange>,
}

/// The means by which an operation reaches the other ranks.
struct HostTransports<'a> {
    layout: &'a Layout,
    host_exchange: &'a mut HostExchange,
    channels: &'a mut Channels,
}

impl HostsEngine {
    /// Makes the engine. On the first of several ranks of a host, it also publishes in the group's `store` whether this
    /// host has an exchange area; waits for the store for `limit` at most.
    ///
    /// # Errors
    /// Those of the store; `Timeout` if it does not answer.
    pub(crate) fn new(
        layout: Layout,
        shm_exchanges: ShmExchanges,
        engine: ChannelEngine,
        plan: Plan,
        store: Arc<dyn Store>,
        limit: Duration,
    ) -> Result<Self, Failure> {
        let neighbors = layout.neighbors();
        if neighbors.len() > 1 && layout.index_on_host() == 0 {
            let has_shm_exchange = [b'0' + u8::from(shm_exchanges.phases.is_some())];
            let key = area_key(layout.host());
            let set = move |store: &dyn Store| store.set(&key, &has_shm_exchange);
            StoreQuery::within(&store, limit, set).map_err(Failure::Store)?;
        }
        let ranks = neighbors
            .iter()
            .map(|&rank| engine.channels.global(rank))
            .collect();
        Ok(Self {
            host_exchange: HostExchange::new(shm_exchanges.phases, ranks, layout.index_on_host()),
            layout,
            agreement: HostAgreement::default(),
            chain: Chain::default(),
            engine,
            store,
            plan,
            hierarchy: Hierarchy::Unknown,
            _streams: shm_exchanges.streams,
        })
    }

    /// Works like [`ChannelEngine::run`]; the first operation also waits until all hosts with several ranks of the
    /// group have published whether they have an exchange area.
    pub(crate) fn run(
        &mut self,
        step: Step<'_>,
        position: Position,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        if matches!(self.hierarchy, Hierarchy::Unknown) {
            let several = |&host: &usize| self.layout.ranks_of(host).len() > 1;
            let hosts: Vec<(usize, Rank)> = (0..self.layout.hosts())
                .filter(several)
                .map(|host| {
                    let first = self.layout.ranks_of(host)[0];
                    (host, self.engine.channels.global(first))
                })
                .collect();
            self.hierarchy = Hierarchy::find(&self.store, &hosts, policy)?;
        }
        if matches!(self.hierarchy, Hierarchy::Flat) {
            return self.engine.run(step, position, policy);
        }
        let Step {
            op_header,
            lists,
            mut collective,
            ..
        } = step;
        let in_order = self.layout.is_in_order();
        let reduces = matches!(
            collective,
            Collective::AllReduce { .. }
                | Collective::Reduce { .. }
                | Collective::ReduceScatter { .. }
        );
        let mut choice = choose(&self.plan, &collective, position, |algorithm| {
            algorithm != Algorithm::Nested || in_order || !reduces
        });
        let is_inline_data = choice == Algorithm::Notice;
        let listed: Vec<u8>;
        let contributed = if !has_lists(op_header.op) {
            let input = small_input(&collective, position).filter(|_| is_inline_data);
            (
                contribution(&collective, is_inline_data),
                input.unwrap_or(&[]),
            )
        } else {
            listed = lists.iter().flat_map(|count| count.to_le_bytes()).collect();
            (Contribution::List, &listed[..])
        };
        let mut via = HostTransports {
            layout: &self.layout,
            host_exchange: &mut self.host_exchange,
            channels: &mut self.engine.channels,
        };
        let agreement = &mut self.agreement;
        agreement.exchange(&mut via, position, op_header, contributed, policy)?;
        if is_inline_data {
            let inline = |rank| agreement.bytes_of(rank);
            return finish_small(&mut collective, position, inline, via.channels);
        }
        let is_listed = has_lists(op_header.op);
        if is_listed {
            // The sizes of the parts are known only after the agreement.
            let (pattern, _) = extent(&collective, position);
            let sizes_fit =
                pattern != Pattern::AllToAll || pairs::sizes_fit_slot(via.layout, position.size);
            choice = self
                .plan
                .choose(pattern, agreement.max_listed(), |algorithm| {
                    algorithm != Algorithm::Nested || sizes_fit
                });
        }
        let sizes = if is_listed {
            Sizes::Listed
        } else {
            Sizes::Even
        };
        if choice != Algorithm::Nested {
            return self.engine.run_agreed(collective, position, policy);
        }
        match collective {
            Collective::AllReduce { data, by } => {
                self.chain.all_reduce(&mut via, position, data, by, policy)
            }
            Collective::Reduce { data, by, root } => {
                let chain = &mut self.chain;
                chain.reduce(&mut via, position, data, by, root, policy)
            }
            Collective::ReduceScatter { inputs, output, by } => {
                let chain = &mut self.chain;
                chain.reduce_scatter(&mut via, position, &inputs, output, by, policy)
            }
            Collective::Broadcast { data, root } => spread::broadcast(&mut via, data, root, policy),
            Collective::AllGather { input, outputs } => {
                spread::all_gather(&mut via, position, input, outputs, policy)
            }
            Collective::AllToAll { inputs, outputs } => {
                pairs::all_to_all(&mut via, position, &inputs, outputs, sizes, policy)
            }
            Collective::Gather {
                input,
                outputs,
                root,
            } => rooted::gather(&mut via, position, input, outputs, (root, sizes), policy),
            Collective::Scatter {
                inputs,
                output,
                root,
            } => rooted::scatter(&mut via, inputs.as_ref(), output, (root, sizes), policy),
            Collective::Barrier => Ok(()),
        }
    }
}

/// The bytes that each rank sends with its header in the agreement on this collective.
fn contribution(collective: &Collective<'_>, is_inline_data: bool) -> Contribution {
    match collective {
        _ if !is_inline_data => Contribution::Nothing,
        Collective::AllReduce { data, .. } => Contribution::Each(data.len()),
        Collective::Broadcast { data, root } => Contribution::One(*root, data.bytes().len()),
        Collective::AllGather { input, .. } => Contribution::Each(input.len()),
        _ => Contribution::Nothing,
    }
}
