//! Translates NCCL's events into changes of the record.
//!
//! Since version 5 an operation is *issued* when its call begins. In all versions it is *in a plan* when
//! the event of its task begins, which NCCL reports once the kernel is launched (for a graph: when the
//! device reaches it), *started* when its first channel has started, and *completed* when its last channel
//! has ended. NCCL's proxy thread reports the channels; it reads the counters that the kernel writes.
//!
//! A function for an event that begins returns the event's handle; null if the event is not followed.

use crate::abi::event;
use crate::handle::{Handle, Kind, SlotUse};
use crate::process::{Call, Communicator, Op, Process, flag, naming};
use rcomm_recorder::model::LinkWait;
use rcomm_recorder::record::{
    ChannelEvent, GroupHandle, KernelPlan, LinkHandle, LinkPlace, Ticket, Timestamp,
};
use std::ffi::c_void;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};

/// A task as NCCL describes it when it is in a plan.
pub(crate) struct Task<'t, C> {
    /// Gives its call, which is needed only if the call itself was not reported.
    pub(crate) call: C,
    /// The other rank of a message.
    pub(crate) peer: Option<u32>,
    pub(crate) plan: KernelPlan,
    /// Whether the plan gives the largest number of channels that the task may use, and not the actual
    /// number.
    pub(crate) at_most: bool,
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

impl Process {
    fn communicator(&self, context: *mut c_void) -> Option<(SlotUse, &Communicator)> {
        let at = Handle::of(context)?.is(Kind::Communicator)?;
        Some((at, self.communicators.get(at)?))
    }

    /// Handles the beginning of the outermost group call.
    pub(crate) fn group_starts(&self) -> *mut c_void {
        let taken = self.groups.take(|group| group.first.store(0, Relaxed));
        taken.map_or(NONE, |at| at.handle(Kind::Group, 0))
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
            self.expect_replays(communicator);
            if let Some(ticket) = self.begin(communicator, call, false) {
                // NCCL does not report the graph.
                self.recorder.captured_at(ticket, self.now(), 0);
                self.recorder.retired(ticket);
            }
            return at.handle(Kind::Captured, 0);
        }
        let Some(ticket) = self.begin(communicator, call, false) else {
            return NONE;
        };
        let group = Handle::of(parent)
            .and_then(|parent| parent.is(Kind::Group))
            .and_then(|at| self.groups.get(at));
        let flags = if group.is_some() { flag::IN_GROUP } else { 0 };
        let Some(op_at) = self.follow(ticket, at, flags) else {
            return NONE;
        };
        if let (Some(group), Some(op)) = (group, self.operations.get(op_at)) {
            op.next.store(group.first.load(Relaxed), Relaxed);
            group.first.store(op_at.to_word(), Relaxed);
        }
        op_at.handle(Kind::Call, 0)
    }

    /// Handles the end of the outermost group call. An operation that is not in a plan by now is added to one on
    /// another thread, or, with some newer algorithms of NCCL, completes without an event. It is not watched until an
    /// event arrives.
    fn group_stops(&self, at: SlotUse) {
        let Some(group) = self.groups.get(at) else {
            return;
        };
        // The thread of the group call alone adds to its list.
        let mut next = group.first.load(Relaxed);
        self.groups.give_back(at);
        while next != 0 {
            let op_at = SlotUse::from_word(next);
            let Some(op) = self.operations.get(op_at) else {
                return;
            };
            next = op.next.load(Relaxed);
            // The ticket is read before the slot can belong to another operation.
            let ticket = op.ticket();
            let before = op.flags.fetch_and(!flag::IN_GROUP, AcqRel);
            if before & flag::OVER != 0 {
                self.operations.give_back(op_at);
            } else if before & flag::PLANNED == 0
                && op.flags.fetch_or(flag::LEFT, AcqRel) & flag::PLANNED == 0
            {
                self.recorder.retired(ticket);
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
        let called = parent.and_then(|parent| parent.is(Kind::Call));
        let is_replay = parent.is_some_and(|parent| parent.kind == Kind::Captured);
        let known = called.filter(|&at| self.operations.get(at).is_some());
        let op_at = match known {
            Some(op_at) => op_at,
            // A call without a slot was recorded when it was issued.
            None if called.is_some() => return NONE,
            None => {
                let Some(ticket) = self.begin(communicator, &(task.call)(), is_replay) else {
                    return NONE;
                };
                match self.follow(ticket, at, 0) {
                    Some(op_at) => op_at,
                    None => return NONE,
                }
            }
        };
        let Some(op) = self.operations.get(op_at) else {
            return NONE;
        };
        op.channels.store(task.plan.channels.into(), Relaxed);
        let at_most = if task.at_most { flag::AT_MOST } else { 0 };
        let before = op.flags.fetch_or(flag::PLANNED | at_most, AcqRel);
        let ticket = op.ticket();
        if before & flag::LEFT != 0 {
            op.flags.fetch_and(!flag::LEFT, AcqRel);
            self.recorder.watched(ticket);
        }
        if let (Some(peer), true) = (task.peer, known.is_some()) {
            self.recorder.set_peer(ticket, peer);
        }
        let now = self.now();
        op.planned.store(now.as_ns(), Relaxed);
        self.recorder.kernel_planned_at(ticket, &task.plan, now);
        op_at.handle(Kind::Task, 0)
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
        // Its kernel was launched before its task began, which the end of the task confirms.
        let planned = Timestamp::from_ns(op.planned.load(Relaxed));
        self.recorder.kernel_launched_at(ticket, planned);
        if self.events.mask & event::KERNEL_CH == 0 {
            // No event will report its end.
            self.recorder.retired(ticket);
            self.release(at, op);
        }
    }

    /// Handles the beginning of a channel's work on an operation; `timer` is the time of the device's clock, ns.
    pub(crate) fn kernel_starts(
        &self,
        parent: *mut c_void,
        channel: u8,
        timer: Option<u64>,
    ) -> *mut c_void {
        let task = Handle::of(parent).and_then(|parent| parent.is(Kind::Task));
        let Some((at, op)) = task.and_then(|at| Some((at, self.operations.get(at)?))) else {
            return NONE;
        };
        let ticket = op.ticket();
        // One proxy thread reports the channels of an operation, so loads and stores suffice: they cost less than
        // exchanges.
        if let Some(timer) = timer.filter(|&timer| timer > 0) {
            let known = op.first_start.load(Relaxed);
            if known == 0 || timer < known {
                op.first_start.store(timer, Relaxed);
            }
        }
        let started = op.started.load(Relaxed);
        op.started.store(started + 1, Relaxed);
        if started == 0 {
            self.recorder.started(ticket);
        }
        self.recorder
            .kernel_channel(ticket, channel, ChannelEvent::Started);
        at.handle(Kind::Kernel, channel)
    }

    fn kernel_stops(&self, at: SlotUse, op: &Op, channel: u8) {
        let ticket = op.ticket();
        self.recorder
            .kernel_channel(ticket, channel, ChannelEvent::Finished);
        // As in `kernel_starts`.
        let finished = op.finished.load(Relaxed) + 1;
        op.finished.store(finished, Relaxed);
        let channels = op.channels.load(Relaxed);
        let is_exact = channels > 0 && op.flags.load(Relaxed) & flag::AT_MOST == 0;
        let all = match is_exact {
            true => channels,
            // The number of channels that have started: the kernel starts on all of its channels at once.
            false => op.started.load(Relaxed),
        };
        if finished >= all {
            self.end(at, op);
        }
    }

    /// Handles the beginning of a network transfer. `has_progress` tells whether NCCL reports its progress without
    /// being asked for steps, as version 3 does.
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
        let task = Handle::of(parent).and_then(|parent| parent.is(Kind::Task));
        let Some(op) = task.and_then(|at| self.operations.get(at)) else {
            return NONE;
        };
        let at = SlotUse::from_word(op.communicator.load(Relaxed));
        let ticket = op.ticket();
        let [.., group] = ticket.to_words();
        let link = self.recorder.link(LinkPlace {
            group: GroupHandle::of_row(group as u32),
            channel: facts.channel,
            peer: facts.peer,
            is_send: facts.is_send,
        });
        let Some(link) = link else { return NONE };
        // NCCL passes transfers to its proxy thread when it puts the operation into a plan: a transfer waits since
        // then, or for less if it follows others of its link.
        let since = Timestamp::from_ns(op.planned.load(Relaxed));
        let post = |handle| {
            let active = &self.active[link.index()];
            active.store(active.load(Relaxed) + 1, Relaxed);
            let waits = (LinkWait::Posted, since);
            self.recorder
                .link_since(link, Some(ticket), (0, facts.steps), waits);
            handle
        };
        if !has_progress && self.current_mask() & event::PROXY_STEP == 0 {
            let whole = SlotUse {
                index: link.index() as u32,
                generation: self.released[link.index()].load(Relaxed),
            };
            return post(whole.handle(Kind::Whole, 0));
        }
        let taken = self.transfers.take(|transfer| {
            transfer.link.store(link.index() as u32, Relaxed);
            transfer.communicator.store(at.to_word(), Relaxed);
            for (word, value) in transfer.operation.iter().zip(ticket.to_words()) {
                word.store(value, Relaxed);
            }
            transfer.steps.store(facts.steps, Relaxed);
            transfer.done.store(0, Relaxed);
        });
        taken.map_or(NONE, |at| post(at.handle(Kind::Transfer, 0)))
    }

    fn update_transfer(&self, at: SlotUse, done: Option<u32>, wait: LinkWait) {
        let Some(transfer) = self.transfers.get(at) else {
            return;
        };
        if let Some(done) = done {
            transfer.done.store(done, Relaxed);
        }
        let words = [0, 1, 2].map(|word| transfer.operation[word].load(Relaxed));
        let steps = (transfer.done.load(Relaxed), transfer.steps.load(Relaxed));
        let link = LinkHandle::from_index(transfer.link.load(Relaxed));
        let ticket = Ticket::of_words(words);
        self.recorder.link_at(link, Some(ticket), steps, wait);
    }

    fn transfer_stops(&self, at: SlotUse) {
        let Some(transfer) = self.transfers.get(at) else {
            return;
        };
        let link = transfer.link.load(Relaxed);
        if self.transfers.give_back(at) {
            self.leave(link);
        }
    }

    /// Handles the end of a transfer whose steps are not reported.
    fn whole_stops(&self, at: SlotUse) {
        let released = self.released.get(at.index as usize);
        // If the communicator has ended, its links were released, and the count starts anew.
        if released.is_some_and(|it| it.load(Relaxed) == at.generation) {
            self.leave(at.index);
        }
    }

    /// Counts a transfer of this link as over.
    fn leave(&self, link: u32) {
        let active = &self.active[link as usize];
        let left = active.load(Relaxed).saturating_sub(1);
        active.store(left, Relaxed);
        // A newer transfer of the link may be in progress.
        if left == 0 {
            self.recorder.link_idle(LinkHandle::from_index(link));
        }
    }

    /// Handles the beginning of a step of a transfer.
    pub(crate) fn step_starts(&self, parent: *mut c_void) -> *mut c_void {
        let transfer = Handle::of(parent).and_then(|parent| parent.is(Kind::Transfer));
        let known = transfer.filter(|&at| self.transfers.get(at).is_some());
        known.map_or(NONE, |at| at.handle(Kind::Step, 0))
    }

    fn step_stops(&self, at: SlotUse) {
        if let Some(transfer) = self.transfers.get(at) {
            transfer.done.fetch_add(1, Relaxed);
            self.update_transfer(at, None, LinkWait::Posted);
        }
    }

    /// Handles the end of the event with this handle, of any kind.
    pub(crate) fn stops(&self, handle: *mut c_void) {
        let Some(Handle { kind, channel, at }) = Handle::of(handle) else {
            return;
        };
        match kind {
            Kind::Group => self.group_stops(at),
            Kind::Transfer => self.transfer_stops(at),
            Kind::Whole => self.whole_stops(at),
            Kind::Step => self.step_stops(at),
            Kind::Task | Kind::Kernel => {
                if let Some(op) = self.operations.get(at) {
                    match kind {
                        Kind::Task => self.task_stops(at, op),
                        _ => self.kernel_stops(at, op, channel),
                    }
                }
            }
            // An operation outlives its call; a communicator ends with `finalize`.
            Kind::Call | Kind::Captured | Kind::Communicator => {}
        }
    }

    /// Records what the step with this handle waits for.
    pub(crate) fn step_waits(&self, handle: *mut c_void, wait: LinkWait) {
        if let Some(at) = Handle::of(handle).and_then(|it| it.is(Kind::Step)) {
            self.update_transfer(at, None, wait);
        }
    }

    /// Records that the transfer with this handle has completed this many steps.
    pub(crate) fn transfer_has_done(&self, handle: *mut c_void, steps: u32) {
        if let Some(at) = Handle::of(handle).and_then(|it| it.is(Kind::Transfer)) {
            self.update_transfer(at, Some(steps), LinkWait::Posted);
        }
    }

    /// Notes the time of the device's clock at which the channel with this handle ended its work.
    pub(crate) fn kernel_ended_at(&self, handle: *mut c_void, timer: u64) {
        let at = Handle::of(handle).and_then(|it| it.is(Kind::Kernel));
        if let Some(op) = at.and_then(|at| self.operations.get(at)) {
            // As in `kernel_starts`.
            if timer > op.last_end.load(Relaxed) {
                op.last_end.store(timer, Relaxed);
            }
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
                at_most: false,
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
