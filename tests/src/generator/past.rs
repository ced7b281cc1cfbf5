//! Gives a short job a long past: it repeats a healthy step, so that rings are as full as those of a job that has run
//! for days.

use rcomm_recorder::model::{Entry, Frame, OpType};
use rcomm_recorder::publish::Dump;
use std::ops::Range;

/// How the records of a job are lengthened.
#[derive(Clone, Copy, Debug)]
pub struct Past {
    /// How often the second step is repeated.
    repeats: u64,
    /// The number of operations that a ring holds; the newest stay.
    entries: usize,
    /// The smallest number of frames of a stack.
    frames: usize,
    /// The time from one repetition to the next, in ns. It is the same on all ranks, so that they stay in step.
    period_ns: i64,
}

impl Past {
    /// A past that fills rings of `entries` operations on every rank, and stacks of `frames` frames.
    ///
    /// Nothing is repeated if the second step is not complete on every rank.
    pub fn of(dumps: &[Dump], entries: usize, frames: usize) -> Self {
        let steps: Option<Vec<_>> = dumps
            .iter()
            .map(|dump| second_step(dump).map(|step| (dump, step)))
            .collect();
        let steps = steps.unwrap_or_default();
        let shortest = steps.iter().map(|(_, step)| step.len()).min();
        let period_ns = steps.iter().map(|(dump, step)| {
            let end = &dump.entries[step.end - 1];
            end.time_created_ns - dump.entries[step.start - 1].time_created_ns
        });
        Self {
            repeats: shortest.map_or(0, |shortest| entries.div_ceil(shortest) as u64),
            entries,
            frames,
            period_ns: period_ns.max().unwrap_or(0),
        }
    }

    /// Returns the record with this past.
    pub fn lengthen(&self, mut dump: Dump) -> Dump {
        if self.repeats > 0
            && let Some(step) = second_step(&dump)
        {
            self.repeat(&mut dump, step);
        }
        let excess = dump.entries.len().saturating_sub(self.entries);
        dump.entries.drain(..excess);
        self.deepen(&mut dump);
        dump
    }

    fn repeat(&self, dump: &mut Dump, step: Range<usize>) {
        let growth: Vec<[u64; 3]> = (0..dump.groups.len())
            .map(|group| growth(dump, group, &step))
            .collect();
        let later = |entry: &Entry, times: u64| {
            let [collectives, messages, operations] = growth[entry.group as usize];
            let mut entry = entry.clone();
            let ns = self.period_ns * times as i64;
            entry.record_id += step.len() as u64 * times;
            entry.collective_seq_id += collectives * times;
            // NCCL's recorder leaves the number at 0 where it counts no messages.
            if entry.p2p_seq_id > 0 {
                entry.p2p_seq_id += messages * times;
            }
            entry.op_id += operations * times;
            entry.time_created_ns += ns;
            for time in [
                &mut entry.time_discovered_started_ns,
                &mut entry.time_discovered_completed_ns,
            ] {
                if *time > 0 {
                    *time += ns;
                }
            }
            entry
        };
        let mut entries = dump.entries[..step.end].to_vec();
        for times in 1..=self.repeats {
            entries.extend(
                dump.entries[step.clone()]
                    .iter()
                    .map(|entry| later(entry, times)),
            );
        }
        entries.extend(
            dump.entries[step.end..]
                .iter()
                .map(|entry| later(entry, self.repeats)),
        );
        dump.entries = entries;
        for (group, [collectives, ..]) in dump.groups.iter_mut().zip(&growth) {
            let Some(status) = &mut group.status else {
                continue;
            };
            for number in [
                &mut status.last_enqueued,
                &mut status.last_started,
                &mut status.last_completed,
            ] {
                if *number >= 0 {
                    *number += (collectives * self.repeats) as i64;
                }
            }
        }
    }

    /// Adds the frames of calls through the layers of a model, as real stacks have them.
    fn deepen(&self, dump: &mut Dump) {
        for (at, stack) in dump.stacks.iter_mut().enumerate() {
            while stack.len() < self.frames {
                let depth = stack.len();
                stack.insert(depth - 1, dump.frames.len() as u32);
                dump.frames.push(Frame {
                    name: format!("forward_{depth}"),
                    filename: format!("/srv/model/layers_{}.py", at % 7),
                    line: (40 + 13 * depth + at) as u32,
                });
            }
        }
    }
}

/// The entries of the second step. A step ends with the norm over the world, which is every rank's first group.
fn second_step(dump: &Dump) -> Option<Range<usize>> {
    let is_norm = |entry: &Entry| entry.group == 0 && entry.op == OpType::AllReduce;
    let entries = dump.entries.iter().enumerate();
    let mut ends = entries.filter(|(_, entry)| is_norm(entry));
    let (first, _) = ends.next()?;
    let (second, _) = ends.next()?;
    Some(first + 1..second + 1)
}

/// Returns by how much a step raises a group's counters of collectives, messages and operations.
fn growth(dump: &Dump, group: usize, step: &Range<usize>) -> [u64; 3] {
    let newest = |entries: &[Entry]| {
        let group_entries = entries.iter().filter(|entry| entry.group as usize == group);
        group_entries.fold([0; 3], |newest: [u64; 3], entry| {
            let [collectives, messages, operations] = newest;
            [
                collectives.max(entry.collective_seq_id),
                messages.max(entry.p2p_seq_id),
                operations.max(entry.op_id),
            ]
        })
    };
    let before = newest(&dump.entries[..step.start]);
    let after = newest(&dump.entries[..step.end]);
    std::array::from_fn(|at| after[at] - before[at])
}

#[cfg(test)]
mod tests {
    use super::super::{Kind, Spec};
    use super::*;
    use rcomm_analyzer::{Policy, analyze};

    #[test]
    fn a_lengthened_job_has_the_culprits_of_the_short_one() {
        let mut diagnosed = 0;
        for seed in 0..24 {
            let mut spec = Spec::random(seed, 16);
            spec.steps = 6;
            spec.recording.window = super::super::Window::Whole;
            spec.faults = vec![Kind::Stuck];
            let job = spec.make();
            let past = Past::of(&job.dumps, 2000, 10);
            let dumps = job.dumps.iter();
            let long: Vec<Dump> = dumps.map(|dump| past.lengthen(dump.clone())).collect();
            assert!(long.iter().all(|dump| dump.entries.len() <= 2000));
            let report = analyze(&long, &Policy::default());
            let Some(first) = report.findings.first() else {
                continue;
            };
            assert_eq!(first.culprit_ranks, job.culprits(), "seed {seed}");
            assert!(long.iter().any(|dump| dump.entries.len() == 2000));
            diagnosed += 1;
        }
        assert!(diagnosed > 16, "only {diagnosed} jobs have a finding");
    }
}
