//! Translates NCCL's events into changes of the record.
//!
//! Since version 5 an operation is *issued* when its call begins, up to version 4 when its task's event begins. In all
//! versions it is *in a plan* when that event begins, *started* when its first channel has started, and *completed*
//! when its last channel has ended. NCCL reports the task once it has launched the kernel; for a graph, and for a
//! launch behind a graph that has not reached its kernel yet, a host callback reports it before the kernel runs. NCCL's
//! proxy thread reports the channels; it reads the counters that the kernel writes.
//!
//! A function for an event that begins returns the event's handle; null if the event is not followed.

use crate::abi::event;
use crate::group_call;
use crate::handle::{Handle, Kind, SlotUse};
use crate::links::{Begun, Left};
use crate::names;
use crate::operation::{Op, State, flag};
use crate::process::{Call, Communicator, Process, Reported, naming};
use rcomm_recorder::model::LinkWait;
use rcomm_recorder::record::{
    ChannelEvent, GroupHandle, KernelPlan, LinkHandle, LinkPlace, Ticket, Timestamp,
};
use std::ffi::c_void;
use std::sync::atomic::Ordering::Relaxed;

/// A task as NCCL describes it when it is in a plan.
pub(crate) struct Task<'t, C> {
    /// Returns the task's call, which is needed only if the call itself was not reported.
    pub(crate) call: C,
    /// The other rank of a message.
    pub(crate) peer: Option<u32>,
    pub(crate) plan: KernelPlan,
    /// The communicator, if the task names it.
    pub(crate) named: Option<Named<'t>>,
}

/// How a task of version 3 names its communicator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Named<'t> {
    pub(crate) name: &'t [u8],
    pub(crate) hash: u64,
    pub(crate) rank: u32,
}

/// A network transfer as NCCL describes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransferFacts {
    pub(crate) pid: u32,
    pub(crate) channel: u8,
    pub(crate) peer: u32,
    pub(crate) steps: u32,
    pub(crate) is_send: bool,
}

const NONE: *mut c_void = std::ptr::null_mut();
/// A use that no slot has.
const NO_SLOT: SlotUse = SlotUse {
    index: 0,
    generation: 0,
};

impl Process {
    fn communicator(&self, context: *mut c_void) -> Option<(SlotUse, &Communicator)> {
        let at = Handle::of(context)?.slot_if(Kind::Communicator)?;
        Some((at, self.communicators.get(at)?))
    }

    /// Handles the beginning of a plan: the operations reported after it come after those before it. Up to version 4
    /// NCCL reports the operations of a plan only if the plan has a handle, whether or not the plug-in asks for plans
    /// (`ncclProfilerStartTaskEvents`, plugin/profiler.cc:235 of 2.26.2 and 240 of 2.27.7).
    pub(crate) fn plan_starts(&self, context: *mut c_void) -> *mut c_void {
        if let Some((_, communicator)) = self.communicator(context) {
            communicator.order.begins_plan();
        }
        let any = SlotUse {
            index: 0,
            generation: 1,
        };
        any.handle(Kind::Plan, 0)
    }

    /// Handles the beginning of the outermost group call.
    #[inline]
    pub(crate) fn group_starts(&self) -> *mut c_void {
        let (left, number) = group_call::begin();
        // NCCL may not have ended the thread's former group call: its operations leave it now.
        self.leave_groups(left);
        let at = SlotUse {
            index: 0,
            generation: number,
        };
        at.handle(Kind::Group, 0)
    }

    /// Handles the beginning of the call of an operation, and records the operation.
    pub(crate) fn call_starts(
        &self,
        context: *mut c_void,
        parent: *mut c_void,
        call: &Call,
        is_captured: bool,
    ) -> *mut c_void {
        let Some((at, communicator)) = self.communicator(context) else {
            return NONE;
        };
        if is_captured {
            self.record_captured(communicator, call);
            return at.handle(Kind::Captured, 0);
        }
        let Some(ticket) = self.begin(communicator, call, Reported::Call) else {
            return NONE;
        };
        let group = Handle::of(parent).and_then(|parent| parent.slot_if(Kind::Group));
        let op_at = group_call::add(group.map(|group| group.generation), |list| {
            self.follow(ticket, at, list)
        });
        // An operation without a slot has a handle too, by which its task is known to be recorded already.
        op_at.unwrap_or(NO_SLOT).handle(Kind::Call, 0)
    }

    /// Records an operation that is captured into a graph.
    #[cold]
    fn record_captured(&self, communicator: &Communicator, call: &Call) {
        // Without events of channels, NCCL reports the replays only of plans with work for the network: a different
        // number on each rank, so nothing may be concluded from them.
        if self.events.mask & event::KERNEL_CH != 0 {
            self.expect_replays(communicator);
        }
        if let Some(ticket) = self.begin(communicator, call, Reported::Call) {
            // NCCL does not report the graph.
            self.recorder.captured_at(ticket, self.now(), 0);
            self.recorder.retired(ticket);
        }
    }

    /// Handles the end of the outermost group call. An operation that is not in a plan by now is put into a plan by
    /// another thread, or completes without an event, as with symmetric memory and copy engines. It is not watched
    /// until an event arrives.
    fn group_stops(&self, number: u32) {
        self.leave_groups(group_call::end(number));
    }

    /// Ends the group call that the operations of this list were issued in.
    #[inline]
    fn leave_groups(&self, first: u64) {
        let mut next = first;
        while next != 0 {
            let op_at = SlotUse::from_word(next);
            // The slot is in use until here, even if its communicator was aborted.
            let Some(op) = self.operations.get(op_at) else {
                return;
            };
            next = op.next.load(Relaxed);
            let ticket = op.ticket();
            let left = op.leave_group(
                op_at,
                || self.recorder.retired(ticket),
                || self.recorder.watched(ticket),
            );
            if left.is_some_and(|state| state.has(flag::OVER)) {
                self.operations.release(op_at);
            }
        }
    }

    /// Handles the beginning of a task, by which an operation becomes part of a plan. An operation whose call was not
    /// reported is recorded now.
    pub(crate) fn task_starts(
        &self,
        context: *mut c_void,
        parent: *mut c_void,
        task: Task<'_, impl FnOnce() -> Call>,
    ) -> *mut c_void {
        let Some((at, communicator)) = self.communicator(context) else {
            return NONE;
        };
        if let Some(named) = &task.named {
            self.create_group_once(communicator, named);
        }
        let parent = Handle::of(parent);
        let called = parent.and_then(|parent| parent.slot_if(Kind::Call));
        let is_replay = parent.is_some_and(|parent| parent.kind == Kind::Captured);
        let known = called.filter(|&at| self.operations.get(at).is_some());
        let op_at = match known {
            Some(op_at) => op_at,
            // A call without a slot was recorded when it was issued.
            None if called.is_some() => return NONE,
            None => {
                let reported = match is_replay {
                    true => Reported::Replay,
                    false => Reported::Plan,
                };
                match self.follow_planned(at, communicator, &(task.call)(), reported) {
                    Some(op_at) => op_at,
                    None => return NONE,
                }
            }
        };
        // A message to the own rank is a copy, for which NCCL adds no work to a channel's proxy thread
        // (`addP2pToPlan`, enqueue.cc:788 of 2.28.3).
        let own = communicator.rank.load(Relaxed);
        let no_channels = self.events.mask & event::KERNEL_CH == 0 || task.peer == Some(own);
        let Some(op) = self.operations.get(op_at) else {
            return NONE;
        };
        let ticket = op.ticket();
        let collnet = match names::uses_collnet(task.plan.algorithm) {
            true => flag::COLLNET,
            false => 0,
        };
        let silent = if no_channels { flag::NO_CHANNELS } else { 0 };
        let watch = || self.recorder.watched(ticket);
        // Most group calls have one operation, which then leaves the list with its plan.
        let is_last = known.is_some() && group_call::is_last(op_at.to_word());
        let before = op.next.load(Relaxed);
        let flags = collnet | silent;
        let planned = op.plan(op_at, task.plan.channels, flags, is_last, watch);
        if planned.is_none() {
            return NONE;
        }
        if is_last {
            group_call::remove_last(before);
        }
        if let (Some(peer), true) = (task.peer, known.is_some()) {
            self.recorder.set_peer(ticket, peer);
        }
        if !is_replay && !no_channels {
            op.place.store(communicator.order.adds(), Relaxed);
        }
        let now = self.now();
        op.planned.store(now.as_ns(), Relaxed);
        self.recorder.kernel_planned_at(ticket, &task.plan, now);
        op_at.handle(Kind::Task, 0)
    }

    /// Records and follows an operation that is reported when it is in a plan.
    #[inline(never)]
    fn follow_planned(
        &self,
        at: SlotUse,
        communicator: &Communicator,
        call: &Call,
        reported: Reported,
    ) -> Option<SlotUse> {
        let ticket = self.begin(communicator, call, reported)?;
        self.follow(ticket, at, None)
    }

    fn create_group_once(&self, communicator: &Communicator, named: &Named<'_>) {
        let claim =
            communicator
                .naming
                .compare_exchange(naming::OPEN, naming::UNDER_WAY, Relaxed, Relaxed);
        if claim.is_ok() {
            let name = String::from_utf8_lossy(named.name);
            self.create_group(communicator, &name, named.hash, named.rank, None);
            communicator.naming.store(naming::DONE, Relaxed);
        }
    }

    fn task_stops(&self, at: SlotUse, op: &Op) {
        let ticket = op.ticket();
        // NCCL begins a task's event with the launch of its kernel, and ends it once the proxy thread has its
        // transfers.
        let planned = Timestamp::from_ns(op.planned.load(Relaxed));
        let Some(state) = op.state(at).filter(|state| !state.has(flag::OVER)) else {
            return;
        };
        self.recorder.kernel_launched_at(ticket, planned);
        if !state.has(flag::NO_CHANNELS) {
            return;
        }
        // No event will report the end of this operation.
        if let Some((_, after)) = op.change_open(at, |state| state.with(flag::OVER)) {
            self.recorder.retired(ticket);
            if !after.has(flag::IN_GROUP) {
                self.operations.release(at);
            }
        }
    }

    /// Handles the beginning of a channel's work on an operation; `timer` is the time of the device's clock, ns.
    #[inline(always)]
    pub(crate) fn kernel_starts(
        &self,
        parent: *mut c_void,
        channel: u8,
        timer: Option<u64>,
    ) -> *mut c_void {
        let task = Handle::of(parent).and_then(|parent| parent.slot_if(Kind::Task));
        let Some((at, op)) = task.and_then(|at| Some((at, self.operations.get(at)?))) else {
            return NONE;
        };
        let ticket = op.ticket();
        let Some(is_first) = op.starts(at) else {
            return NONE;
        };
        op.notes_start(at, timer.unwrap_or(0));
        if is_first {
            self.recorder.started_in_turn(ticket);
        }
        self.recorder
            .kernel_channel(ticket, channel, ChannelEvent::Started);
        at.handle(Kind::Kernel, channel)
    }

    #[inline(always)]
    fn kernel_stops(&self, at: SlotUse, op: &Op, channel: u8) {
        let ticket = op.ticket();
        let Some((_, after)) = op.change_open(at, State::finishes) else {
            return;
        };
        self.recorder
            .kernel_channel(ticket, channel, ChannelEvent::Finished);
        if after.has(flag::OVER) {
            self.end(at, op, ticket, after);
        }
    }

    /// Handles the beginning of a network transfer. `has_progress` states whether NCCL reports its progress without
    /// being asked for steps, as version 3 does.
    #[inline(always)]
    pub(crate) fn transfer_starts(
        &self,
        parent: *mut c_void,
        facts: &TransferFacts,
        has_progress: bool,
    ) -> *mut c_void {
        // A handle of another process, whose transfers this process carries out, has no meaning here.
        if facts.pid != self.pid {
            return NONE;
        }
        let task = Handle::of(parent).and_then(|parent| parent.slot_if(Kind::Task));
        let Some((task, op)) = task.and_then(|at| Some((at, self.operations.get(at)?))) else {
            return NONE;
        };
        let (ticket, at) = (op.ticket(), op.communicator());
        // CollNet's transfers go to a number beyond the ranks of the communicator (`collnetDirect.out`,
        // graph/connect.cc:204 of 2.30.7), and NCCL never reports their end. Version 3 gives no number of ranks, so the
        // algorithm must show them.
        let Some(communicator) = self.communicators.get(at) else {
            return NONE;
        };
        let size = communicator.size.load(Relaxed);
        if size > 0 && facts.peer >= size {
            return NONE;
        }
        // NCCL passes an operation's transfers to its proxy thread right after the event of the task has begun: a
        // transfer waits since then, or for less if it follows others of its link.
        let since = Timestamp::from_ns(op.planned.load(Relaxed));
        if op
            .state(task)
            .is_none_or(|state| state.has(flag::OVER | flag::COLLNET))
        {
            return NONE;
        }
        let [.., group] = ticket.to_words();
        let group = GroupHandle::of_row(group as u32);
        let place = LinkPlace {
            group,
            channel: facts.channel,
            peer: facts.peer,
            is_send: facts.is_send,
        };
        let Some((link, begun)) = self.begin_on_link(place, ticket) else {
            return NONE;
        };
        let number = begun.number;
        let whole = !has_progress && self.current_mask() & event::PROXY_STEP == 0;
        let handle = match whole {
            true => {
                let whole = SlotUse {
                    index: link.index() as u32,
                    generation: number,
                };
                Some(whole.handle(Kind::Whole, 0))
            }
            false => self
                .transfers
                .take(|transfer, _| {
                    transfer.link.store(link.index() as u32, Relaxed);
                    transfer.link_use.store(number, Relaxed);
                    transfer.communicator.store(at.to_word(), Relaxed);
                    for (word, value) in transfer.operation.iter().zip(ticket.to_words()) {
                        word.store(value, Relaxed);
                    }
                    transfer.steps.store(facts.steps, Relaxed);
                    transfer.done.store(0, Relaxed);
                    transfer.waits.store(0, Relaxed);
                })
                .map(|at| at.handle(Kind::Transfer, 0)),
        };
        let Some(handle) = handle else {
            self.leave(link.index() as u32, number);
            return NONE;
        };
        if begun.is_first {
            let waits = (LinkWait::Posted, since);
            self.recorder
                .link_since(link, Some(ticket), (0, facts.steps), waits);
        }
        if self.communicators.get(at).is_none() {
            // An abort has released the communicator's links before this one.
            self.release_links(group);
            self.stops(handle);
            return NONE;
        }
        handle
    }

    /// Counts a transfer of this operation on the link at this place; `None` if the ring has no row for the link, or if
    /// other links take the row each time.
    #[inline(always)]
    fn begin_on_link(&self, place: LinkPlace, ticket: Ticket) -> Option<(LinkHandle, Begun)> {
        let [record, ..] = ticket.to_words();
        // The row of a link without transfers is used again for another link, which may happen between the search and
        // the count.
        for _ in 0..3 {
            let link = self
                .recorder
                .link_or_reuse(place, |link| self.links.release_idle(link.index()))?;
            let begun = self.links.begins(link.index(), record);
            if self.recorder.is_link_at(link, place) {
                return Some((link, begun));
            }
            self.links.ends(link.index(), begun.number);
        }
        None
    }

    #[inline]
    fn transfer_stops(&self, at: SlotUse) {
        let Some(transfer) = self.transfers.get(at) else {
            return;
        };
        let link = transfer.link.load(Relaxed);
        let number = transfer.link_use.load(Relaxed);
        if self.transfers.give_back(at) {
            self.leave(link, number);
        }
    }

    /// Counts a transfer of this use of a link as over.
    #[inline(always)]
    fn leave(&self, link: u32, number: u32) {
        let handle = LinkHandle::from_index(link);
        match self.links.ends(link as usize, number) {
            Left::Unchanged => {}
            Left::Idle => self.recorder.link_idle(handle),
            // If NCCL reports the steps of the transfer, they follow.
            Left::Next(record) => {
                let ticket = Ticket::of_words([record, 0, 0]);
                (self.recorder).link_at(handle, Some(ticket), (0, 0), LinkWait::Posted);
            }
        }
    }

    /// Handles the end of the event with this handle, of any kind.
    #[inline(always)]
    pub(crate) fn stops(&self, handle: *mut c_void) {
        let Some(Handle { kind, channel, at }) = Handle::of(handle) else {
            return;
        };
        match kind {
            Kind::Group => self.group_stops(at.generation),
            Kind::Transfer => self.transfer_stops(at),
            // If the link has had another use since, this transfer was on a communicator that has ended.
            Kind::Whole => self.leave(at.index, at.generation),
            Kind::Step => self.step_stops(at, channel),
            Kind::Task | Kind::Kernel => {
                if let Some(op) = self.operations.get(at) {
                    match kind {
                        Kind::Task => self.task_stops(at, op),
                        _ => self.kernel_stops(at, op, channel),
                    }
                }
            }
            // An operation outlives its call, a communicator ends with `finalize`, and nothing is kept of a plan.
            Kind::Call | Kind::Captured | Kind::Communicator | Kind::Plan => {}
        }
    }

    /// Notes the time of the device's clock at which the channel with this handle ended its work.
    #[inline(always)]
    pub(crate) fn kernel_ended_at(&self, handle: *mut c_void, timer: u64) {
        let at = Handle::of(handle).and_then(|handle| handle.slot_if(Kind::Kernel));
        if let Some((at, op)) = at.and_then(|at| Some((at, self.operations.get(at)?))) {
            op.notes_end(at, timer);
        }
    }

    /// Handles the end of a communicator.
    pub(crate) fn communicator_ends(&self, context: *mut c_void) {
        if let Some((at, _)) = self.communicator(context) {
            self.forget(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Events;
    use rcomm_recorder::model::{DType, OpType};
    use rcomm_recorder::record::{Placement, RecorderConfig, RingPart};

    /// The number of links with a transfer under way, for each communicator.
    fn under_way(process: &Process) -> Vec<usize> {
        let communicators = process.recorder.snapshot().communicators();
        communicators.iter().map(|it| it.links.len()).collect()
    }

    #[test]
    fn a_transfer_that_ends_after_its_communicator_changes_no_other_transfer() {
        let config = RecorderConfig {
            placement: Placement::Memory,
            entries: 64,
            groups: 8,
            // The links of both communicators have the same row.
            links: 1,
            part: RingPart::NcclProfiler,
            ..RecorderConfig::new("job", 0, 2)
        };
        let events = Events::parse(None).expect("the default");
        let process = Process::open(&config, events).expect("memory for a ring");
        let post = |hash| {
            let at = process.add_communicator().expect("a free slot");
            let communicator = process.communicators.get(at).expect("in use");
            process.create_group(communicator, "", hash, 0, Some(2));
            let context = Process::context(at);
            let call = || Call {
                op: OpType::AllReduce,
                dtype: DType::F32,
                count: 8,
                root: None,
                peer: None,
            };
            let task = Task {
                call,
                peer: None,
                plan: KernelPlan::default(),
                named: None,
            };
            let task = process.task_starts(context, NONE, task);
            let facts = TransferFacts {
                pid: process.pid,
                channel: 0,
                peer: 1,
                steps: 4,
                is_send: true,
            };
            let [first, second] = [0, 1].map(|_| process.transfer_starts(task, &facts, false));
            assert!(first != NONE && second != NONE);
            (context, [first, second])
        };
        let (ended, old) = post(1);
        assert_eq!(under_way(&process), [1]);
        process.communicator_ends(ended);
        let (_, [first, second]) = post(2);
        for handle in old {
            process.stops(handle);
        }
        assert_eq!(under_way(&process), [0, 1]);
        // A link is idle once the last of its transfers has ended.
        process.stops(first);
        assert_eq!(under_way(&process), [0, 1]);
        process.stops(second);
        assert_eq!(under_way(&process), [0, 0]);
    }
}
