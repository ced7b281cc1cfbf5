//! Recent snapshots, for pausing and stepping.

use rcomm_analyzer::{GroupRef, RankView, Report, Snapshot, StackNode};
use rcomm_recorder::model::{Entry, Rank, Signature};
use rcomm_recorder::publish::{Dump, DumpGroup};
use std::collections::VecDeque;
use std::sync::Arc;

/// Maximum number of the newest frames that are kept whole.
const MAX_WHOLE: usize = 30;
/// Number of newest operations that older frames keep of each dump, if no older one is pending: as many as any screen
/// but the timeline shows. From a pending operation on, they keep all.
const KEPT_OPERATIONS: usize = 64;

/// Recorded snapshots (frames), oldest first, within a memory budget. Sizes are estimates.
#[derive(Debug)]
pub struct History {
    frames: VecDeque<Frame>,
    /// The frame that was cut last: the original and the cut one.
    newest_cut: Option<(Arc<Snapshot>, Arc<Snapshot>)>,
    /// Bytes of all frames.
    bytes: usize,
    /// Maximum number of bytes; `None` if it depends on the number of ranks: see [`History::default_budget`].
    budget: Option<usize>,
    /// Index of the displayed frame; `None` if the newest is displayed, whichever that is.
    displayed: Option<usize>,
}

#[derive(Debug)]
struct Frame {
    snapshot: Arc<Snapshot>,
    /// Bytes that the frame holds beyond what it shares with the previous one.
    bytes: usize,
    /// Whether the frame has not been cut yet, nor found too small to cut.
    is_whole: bool,
}

impl History {
    /// Creates a history with a budget in bytes; `None`: one MiB for each rank of the largest frame, at least 16 and at
    /// most 64. The newest frame is always kept.
    pub fn new(budget: Option<usize>) -> Self {
        Self {
            frames: VecDeque::new(),
            newest_cut: None,
            bytes: 0,
            budget,
            displayed: None,
        }
    }

    /// Estimated number of bytes that the frames hold.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds the newest frame and cuts older ones. While the budget is exceeded, drops the oldest frame, but neither
    /// the displayed one nor the newest.
    pub fn push(&mut self, snapshot: Arc<Snapshot>) {
        self.frames.push_back(Frame {
            snapshot,
            bytes: 0,
            is_whole: true,
        });
        self.estimate(self.frames.len() - 1);
        let budget = self.budget.unwrap_or_else(|| self.default_budget());
        self.cut_old(MAX_WHOLE);
        // Whole frames get at most half of the budget, so that there is room for older ones.
        let mut whole = self.frames.len().min(MAX_WHOLE);
        while whole > 1 && self.bytes_of_newest(whole) > budget / 2 {
            whole -= 1;
            self.cut_old(whole);
        }
        // The displayed frame is kept, and so is the newest.
        while self.bytes > budget && self.frames.len() > 1 && self.displayed != Some(0) {
            self.remove(0);
            self.displayed = self.displayed.map(|index| index - 1);
        }
        // If the displayed frame is the oldest, the frames after it are dropped, except the newest.
        while self.bytes > budget && self.frames.len() > 2 {
            self.remove(1);
        }
    }

    /// The budget that suits the largest number of ranks of a frame: a frame of a few ranks is small, and a view of
    /// them should be, too. A switch to a smaller job does not by itself drop the frames of the larger one.
    fn default_budget(&self) -> usize {
        let ranks = self.frames.iter().map(|frame| frame.snapshot.ranks.len());
        ranks.max().unwrap_or(0).clamp(16, 64) << 20
    }

    /// The bytes of the newest `count` frames.
    fn bytes_of_newest(&self, count: usize) -> usize {
        let newest = self.frames.iter().rev().take(count);
        newest.map(|frame| frame.bytes).sum()
    }

    fn remove(&mut self, index: usize) {
        if let Some(frame) = self.frames.remove(index) {
            self.bytes -= frame.bytes;
        }
        // Data shared with the next frame is now held by that frame alone.
        self.estimate(index);
    }

    /// Estimates the bytes of a frame anew; no effect if there is no such frame.
    fn estimate(&mut self, index: usize) {
        let before = index
            .checked_sub(1)
            .map(|index| self.frames[index].snapshot.clone());
        if let Some(frame) = self.frames.get_mut(index) {
            self.bytes -= frame.bytes;
            frame.bytes = bytes_of(&frame.snapshot, before.as_deref());
            self.bytes += frame.bytes;
        }
    }

    /// Keeps only the newest operations, and all from the oldest pending one on, of frames that are not among the
    /// newest `whole`. The displayed frame stays whole.
    fn cut_old(&mut self, whole: usize) {
        let old = self.frames.len().saturating_sub(whole);
        let uncut = (0..old)
            .rev()
            .take_while(|&index| self.frames[index].is_whole);
        let first = uncut.last().unwrap_or(old);
        for index in first..old {
            if self.displayed == Some(index) {
                continue;
            }
            let whole = self.frames[index].snapshot.clone();
            self.frames[index].is_whole = false;
            if whole
                .dumps()
                .all(|(_, dump)| dump.entries.len() <= KEPT_OPERATIONS)
            {
                continue;
            }
            let cut = Arc::new(cut(&whole, self.newest_cut.as_ref()));
            self.frames[index].snapshot = cut.clone();
            self.newest_cut = Some((whole, cut));
            self.estimate(index);
            self.estimate(index + 1);
        }
    }

    /// The newest frame; `None` before the first.
    pub fn newest(&self) -> Option<&Arc<Snapshot>> {
        self.frames.back().map(|frame| &frame.snapshot)
    }

    /// The displayed frame; `None` before the first.
    pub fn shown(&self) -> Option<&Arc<Snapshot>> {
        let index = self.displayed.unwrap_or(self.frames.len().checked_sub(1)?);
        self.frames.get(index).map(|frame| &frame.snapshot)
    }

    /// Whether a frame is kept on display while newer ones arrive.
    pub fn is_paused(&self) -> bool {
        self.displayed.is_some()
    }

    /// Number of the displayed frame, from 1, and the number of frames; (0, 0) before the first.
    pub fn position(&self) -> (usize, usize) {
        let newest = self.frames.len();
        (self.displayed.map_or(newest, |index| index + 1), newest)
    }

    /// Keeps the newest frame on display while newer ones arrive; no effect during a pause.
    pub fn pause(&mut self) {
        if self.displayed.is_none() {
            self.displayed = self.frames.len().checked_sub(1);
        }
    }

    /// Ends a pause: the newest frame is displayed from now on.
    pub fn live(&mut self) {
        self.displayed = None;
    }

    /// Pauses and steps by `delta` frames, stopping at the ends.
    pub fn step(&mut self, delta: isize) {
        self.pause();
        if let Some(index) = &mut self.displayed {
            let last = self.frames.len().saturating_sub(1);
            *index = index.saturating_add_signed(delta).min(last);
        }
    }
}

/// A copy of a frame with only the newest operations of each dump, and all from its oldest pending one on. Dumps that
/// whole frames share are shared by the cut frames as well. `before` is the frame that was cut last, and its copy.
fn cut(whole: &Snapshot, before: Option<&(Arc<Snapshot>, Arc<Snapshot>)>) -> Snapshot {
    let already_cut = |rank: Rank, dump: &Arc<Dump>| {
        let (whole, cut) = before?;
        let mut dumps = whole.rank(rank)?.dumps.iter();
        let index = dumps.position(|other| Arc::ptr_eq(other, dump))?;
        cut.rank(rank)?.dumps.get(index).cloned()
    };
    let newest = |dump: &Arc<Dump>| match dump.entries.len() > KEPT_OPERATIONS {
        true => Arc::new(dump.newest(KEPT_OPERATIONS)),
        false => dump.clone(),
    };
    let ranks = whole.ranks.iter().map(|view| {
        let dumps = view.dumps.iter();
        let dumps = dumps.map(|dump| already_cut(view.rank, dump).unwrap_or_else(|| newest(dump)));
        RankView {
            dumps: dumps.collect(),
            ..view.clone()
        }
    });
    Snapshot {
        ranks: ranks.collect(),
        ..whole.clone()
    }
}

/// Estimates the bytes that a frame holds in addition to the previous one: unchanged dumps and reports are shared.
/// Data behind pointers is counted if it is more than a few words.
fn bytes_of(snapshot: &Snapshot, before: Option<&Snapshot>) -> usize {
    let shared = |rank, dump: &Arc<Dump>| {
        before
            .and_then(|before| before.rank(rank))
            .is_some_and(|view| view.dumps.iter().any(|known| Arc::ptr_eq(known, dump)))
    };
    let views = snapshot.ranks.iter().map(|view| {
        let records = view.dumps.iter().filter(|dump| !shared(view.rank, dump));
        let remarks: usize = view.remarks.iter().map(String::capacity).sum();
        let pointers = view.dumps.capacity() * size_of::<Arc<Dump>>();
        size_of::<RankView>()
            + pointers
            + remarks
            + records.map(|record| bytes_of_record(record)).sum::<usize>()
    });
    let views: usize = views.sum();
    let same_report = before.is_some_and(|before| Arc::ptr_eq(&before.report, &snapshot.report));
    let report = match same_report {
        true => 0,
        false => bytes_of_report(&snapshot.report),
    };
    views + report
}

/// Estimates the bytes of a dump. A `Vec` itself takes 24 bytes, each of its elements 8 or 4; 64 and 32 allow for
/// strings.
fn bytes_of_record(dump: &Dump) -> usize {
    let signature = |signature: &Signature| {
        let sizes = signature.input_sizes.iter().chain(&signature.output_sizes);
        let sizes: usize = sizes.map(|sizes| 24 + 8 * sizes.len()).sum();
        size_of::<Signature>()
            + sizes
            + 8 * (signature.input_splits.len() + signature.output_splits.len())
            + 64
    };
    let stacks: usize = dump.stacks.iter().map(|stack| 24 + 4 * stack.len()).sum();
    let frames = dump.frames.iter();
    let frames: usize = frames
        .map(|frame| 64 + frame.name.len() + frame.filename.len())
        .sum();
    dump.entries.capacity() * size_of::<Entry>()
        + dump.groups.len() * (size_of::<DumpGroup>() + 32)
        + dump.signatures.iter().map(signature).sum::<usize>()
        + stacks
        + frames
        + size_of::<Dump>()
}

/// Estimates the bytes of a report.
fn bytes_of_report(report: &Report) -> usize {
    // The members of a group are shared by all references to it.
    let group = |group: &GroupRef| group.name.len() + group.desc.len();
    let ranks = |ranks: &[Rank]| size_of_val(ranks);
    let groups = report.groups.iter();
    let groups: usize = groups
        .map(|group_report| {
            size_of_val(group_report) + group(&group_report.group) + group_report.backend.len()
        })
        .sum();
    let sizes = report.ranks.iter().map(|rank_report| {
        let words = rank_report.phase.as_ref().map_or(0, String::len)
            + rank_report.last_call.as_ref().map_or(0, String::len);
        size_of_val(rank_report) + rank_report.host.len() + words
    });
    let in_flight = report.in_flight.iter().map(|instance| {
        let ranks = ranks(&instance.joined) + ranks(&instance.missing) + ranks(&instance.unknown);
        size_of_val(instance) + group(&instance.group) + instance.op.len() + ranks
    });
    let waits = report.waits.iter();
    let waits =
        waits.map(|wait| size_of_val(wait) + group(&wait.group) + wait.op.len() + ranks(&wait.on));
    let findings = report.findings.iter().map(|finding| {
        let named =
            ranks(&finding.culprit_ranks) + ranks(&finding.victim_ranks) + ranks(&finding.cycle);
        // 4096 bytes allow for sentences, evidence and call sites.
        size_of_val(finding) + named + 4096
    });
    let problems = report.problems.iter();
    let problems =
        problems.map(|problem| size_of_val(problem) + problem.path.len() + problem.sentence.len());
    groups
        + sizes.sum::<usize>()
        + in_flight.sum::<usize>()
        + waits.sum::<usize>()
        + findings.sum::<usize>()
        + problems.sum::<usize>()
        + bytes_of_stacks(&report.stacks)
}

fn bytes_of_stacks(stacks: &[StackNode]) -> usize {
    let mut pending: Vec<&StackNode> = stacks.iter().collect();
    let mut bytes = 0;
    while let Some(node) = pending.pop() {
        bytes +=
            size_of_val(node) + node.name.len() + node.filename.len() + size_of_val(&*node.ranks);
        pending.extend(&node.children);
    }
    bytes
}
